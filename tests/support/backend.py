"""A backend whose answers the test writes, event by event, and requests to send to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.backends.base import Capabilities, Load, ModelCard
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, Usage
from headrace.core.health import Health, State
from headrace.core.request import Endpoint, Message, Request, SamplingParams

VOCABULARY = 256
ALL_FIELDS = frozenset(
    (
        *("echo", "logprobs", "n", "top_k", "min_p", "repetition_penalty", "logit_bias"),
        *("min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"),
    )
)


def request(prompt: str | tuple[int, ...] | None = "hello", **changes: Any) -> Request:
    """A completion with an id of its own; `sampling` takes a dict of parameters."""
    sampling = SamplingParams(**{"max_tokens": 8, **changes.pop("sampling", {})})
    if "messages" in changes:
        changes.setdefault("endpoint", Endpoint.CHAT)
        prompt = None
    values = {
        "id": "req-1",
        "endpoint": Endpoint.COMPLETION,
        "model": "fake",
        "arrival": 0.0,
        "prompt": prompt,
        **changes,
    }
    return Request(sampling=sampling, **values)


class CharacterCodec:
    """One token a character. With `gate`, encoding blocks its thread until the gate is set."""

    vocab_size = VOCABULARY
    has_chat_template = True

    def __init__(self, bos: int | None = 1) -> None:
        self.bos = bos
        self.gate: threading.Event | None = None
        self.threads: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(10), "the test forgot to open the gate"
        head = [self.bos] if add_special_tokens and self.bos is not None else []
        return head + [ord(c) % VOCABULARY for c in text]

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        del tools
        text = "".join(f"{m.role}:{m.content};" for m in messages)
        return self.encode(text + ("assistant:" if add_generation_prompt else ""))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return "".join(map(chr, token_ids))

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


@dataclass(eq=False)
class Call:
    """One request at the backend. `say` sends events or raises an exception at its reader."""

    request: Request
    script: asyncio.Queue[Event | Exception] = field(default_factory=asyncio.Queue)
    closed: bool = False

    def say(self, *items: Event | Exception) -> None:
        for item in items:
            self.script.put_nowait(item)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids or ())

    def start(self) -> None:
        self.say(Start("fake", "fake", self.prompt_tokens))

    def token(self, index: int = 0, text: str = "x") -> None:
        self.say(Delta(index, text, (7,)))

    def finish(self, reason: FinishReason = FinishReason.STOP) -> None:
        """Each choice ends, after one token each."""
        for index in range(self.request.n):
            self.say(Finish(index, reason))
        self.say(Usage(self.prompt_tokens, self.request.n))

    def answer(self) -> None:
        """A whole answer of one token a choice."""
        self.start()
        for index in range(self.request.n):
            self.token(index)
        self.finish()


class FakeBackend:
    """Computes nothing: `calls` are those it got, `auto` answers each at once."""

    name = "fake"

    def __init__(
        self, *, max_running: int = 2, context: int = 128, codec: CharacterCodec | None = None
    ) -> None:
        self.capabilities = Capabilities(frozenset(Endpoint), ALL_FIELDS)
        self.models: tuple[ModelCard, ...] = (ModelCard("fake", 0, context, vocab_size=VOCABULARY),)
        self.codec: CharacterCodec | None = codec or CharacterCodec()
        self.max_running = max_running
        self.kv_blocks = 0
        self.block_size = 16
        self.state = State.READY
        self.auto = False
        self.calls: list[Call] = []
        self.closed = False

    @property
    def open(self) -> list[Call]:
        return [call for call in self.calls if not call.closed]

    async def start(self) -> None:
        self.state = State.READY

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        call = Call(request)
        self.calls.append(call)
        if self.auto:
            call.answer()
        try:
            while True:
                item = await call.script.get()
                if isinstance(item, StopAsyncIteration):
                    return
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            call.closed = True

    def load(self) -> Load:
        choices = sum(call.request.n for call in self.open)
        running = min(choices, self.max_running)
        return Load(
            running=running,
            waiting=choices - running,
            max_running=self.max_running,
            as_of=0.0,
            kv_blocks=self.kv_blocks,
            kv_blocks_used=min(running, self.kv_blocks),
            block_size=self.block_size,
        )

    def health(self) -> Health:
        return Health(self.state)

    async def close(self, grace: float) -> None:
        del grace
        self.closed = True
        self.state = State.CLOSED
