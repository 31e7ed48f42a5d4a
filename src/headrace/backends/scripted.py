"""A backend that says what it is told to: for tests, and for trying the server without a model."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headrace.backends.base import Capabilities, Load, ModelCard
from headrace.backends.bytecodec import ByteCodec
from headrace.backends.script import Line, Piece, Script, echo_script
from headrace.core.clock import Clock, SystemClock
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, TokenLogprob, Usage
from headrace.core.health import Health, State
from headrace.core.request import Endpoint, Request

__all__ = ["ALL_FIELDS", "Counters", "ScriptedBackend"]

ALL_FIELDS = frozenset(
    {
        "echo",
        "logprobs",
        "n",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "include_stop_str_in_output",
    }
)


@dataclass(slots=True)
class Counters:
    """What became of the requests so far; `requests` are those that came, in order."""

    started: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    requests: list[Request] = field(default_factory=list)


class ScriptedBackend:
    """Answers from `script`, one piece of each choice a step; `max_running` choices at once.

    `pace` is awaited before Start, as step 0, and before each step; without it steps follow each
    other at once. `health` and `load` are what `set_health` and `set_load` say, if called.
    """

    def __init__(
        self,
        script: Script | Callable[[Request], Script] = echo_script,
        *,
        name: str = "scripted",
        model: str = "scripted",
        context_length: int = 4096,
        capabilities: Capabilities | None = None,
        max_running: int = 64,
        pace: Callable[[Request, int], Awaitable[None]] | None = None,
        codec: ByteCodec | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.capabilities = capabilities or Capabilities(frozenset(Endpoint), ALL_FIELDS)
        self.codec = codec or ByteCodec()
        self.models = (
            ModelCard(model, 1_700_000_000, context_length, vocab_size=self.codec.vocab_size),
        )
        self.counters = Counters()
        self._script = script
        self._pace = pace
        self._clock = clock or SystemClock()
        self._max_running = max_running
        self._room = _Room(max_running)
        self._health = Health(State.STARTING, "not started")
        self._load: Load | None = None

    def set_health(self, health: Health) -> None:
        self._health = health

    def set_load(self, load: Load | None) -> None:
        self._load = load

    def health(self) -> Health:
        return self._health

    def load(self) -> Load:
        return self._load or Load(
            running=self._room.running,
            waiting=self._room.waiting,
            max_running=self._max_running,
            as_of=self._clock.monotonic(),
        )

    async def start(self) -> None:
        self._health = Health(State.READY)

    async def close(self, grace: float) -> None:
        del grace
        self._health = Health(State.CLOSED)

    async def generate(self, request: Request) -> AsyncGenerator[Event]:
        self.counters.requests.append(request)
        script = self._script(request) if callable(self._script) else self._script
        await self._room.enter(request.n)
        ended = False
        try:
            self.counters.started += 1
            async for event in self._perform(request, script):
                ended = isinstance(event, Usage)
                if ended:
                    self.counters.finished += 1
                yield event
        except Exception:
            self.counters.failed += 1
            ended = True
            raise
        finally:
            if not ended:
                self.counters.cancelled += 1
            self._room.leave(request.n)

    async def _perform(self, request: Request, script: Script) -> AsyncGenerator[Event]:
        await self._step(request, 0)
        if script.refuse is not None:
            raise script.refuse
        prompt = self._prompt(request)
        yield Start(self.models[0].id, self.name, len(prompt), script.cached_tokens)
        lines = [script.lines[i % len(script.lines)] for i in range(request.n)]
        takes = [_Take(i, line, request) for i, line in enumerate(lines)]
        sent = 0
        if request.echo:
            for take in takes:
                yield take.echo(prompt, self.codec)
        step = 0
        while waiting := [take for take in takes if not take.done]:
            step += 1
            await self._step(request, step)
            for take in waiting:
                if script.fail is not None and sent >= script.fail_after:
                    raise script.fail
                for event in take.step():
                    sent += isinstance(event, Delta)
                    yield event
        if script.fail is not None:
            raise script.fail
        yield Usage(len(prompt), sum(take.tokens for take in takes), script.cached_tokens)

    def _prompt(self, request: Request) -> tuple[int, ...]:
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        if request.messages is not None:
            return tuple(self.codec.encode_chat(request.messages))
        if isinstance(request.prompt, str):
            return tuple(self.codec.encode(request.prompt))
        return request.prompt or ()

    async def _step(self, request: Request, step: int) -> None:
        if self._pace is not None:
            await self._pace(request, step)


class _Take:
    """One choice being performed: its line, cut where `max_tokens` ends it."""

    def __init__(self, index: int, line: Line, request: Request) -> None:
        self.tokens = 0
        self.done = False
        self._index = index
        self._line = line
        self._limit = request.sampling.max_tokens
        self._top = request.sampling.logprobs
        self._prompt_top = request.sampling.prompt_logprobs
        self._next = 0

    def echo(self, prompt: Sequence[int], codec: ByteCodec) -> Delta:
        logprobs = None
        if self._prompt_top is not None:
            scored = [_logprob(token, self._prompt_top) for token in prompt]
            first = scored[0]
            logprobs = (TokenLogprob(first.token_id, first.text, first.raw, None), *scored[1:])
        text = codec.decode(prompt, skip_special_tokens=True)
        return Delta(self._index, text, tuple(prompt), logprobs, prompt=True)

    def step(self) -> list[Delta | Finish]:
        """The next piece, and the end if that was the last one."""
        events: list[Delta | Finish] = []
        room = None if self._limit is None else self._limit - self.tokens
        if room != 0 and self._next < len(self._line.pieces):
            events.append(self._delta(self._line.pieces[self._next], room))
            self._next += 1
        if self._limit is not None and self.tokens >= self._limit:
            self.done = True
            events.append(Finish(self._index, FinishReason.LENGTH))
        elif self._next == len(self._line.pieces):
            self.done = True
            events.append(Finish(self._index, self._line.reason, self._line.stop))
        return events

    def _delta(self, piece: Piece, room: int | None) -> Delta:
        ids, text, logprobs = piece.ids, piece.text, piece.logprobs
        if room is not None and len(ids) > room:
            ids = ids[:room]
            text = text.encode()[:room].decode(errors="ignore")
        self.tokens += len(ids)
        if self._top is None:
            logprobs = None
        elif logprobs is None:
            logprobs = tuple(_logprob(token, self._top) for token in ids)
        return Delta(self._index, text, ids, logprobs)


def _logprob(token: int, top: int) -> TokenLogprob:
    """A made-up score: the token itself is the best, then its neighbours."""
    near = [(token + i) % 256 for i in range(top)]
    best = tuple(_scored(other, -0.25 * (i + 1)) for i, other in enumerate(near))
    return _scored(token, -0.25, best)


def _scored(token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    raw = bytes([token]) if token < 256 else b""
    return TokenLogprob(token, raw.decode(errors="replace"), raw, logprob, top)


class _Room:
    """Places for choices, given in order of arrival."""

    def __init__(self, places: int) -> None:
        self.running = 0
        self._places = places
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        return sum(choices for choices, _ in self._queue)

    async def enter(self, choices: int) -> None:
        entry = (choices, asyncio.get_running_loop().create_future())
        self._queue.append(entry)
        self._admit()
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
            else:
                self.leave(choices)
            raise

    def leave(self, choices: int) -> None:
        self.running -= choices
        self._admit()

    def _admit(self) -> None:
        """A request wider than all there is runs alone."""
        while self._queue:
            choices, place = self._queue[0]
            if self.running and self.running + choices > self._places:
                return
            self._queue.popleft()
            self.running += choices
            place.set_result(None)
