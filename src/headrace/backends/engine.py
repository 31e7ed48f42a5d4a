"""The embedded engine as a backend: requests become sequences, their outputs become events."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING

from headrace import __version__
from headrace.backends.base import Capabilities, Load, ModelCard, StepReport
from headrace.backends.prefixes import PrefixIndex
from headrace.core.clock import Clock, Entropy, SystemClock, SystemEntropy
from headrace.core.errors import (
    BackendFailed,
    ContextLengthExceeded,
    InvalidRequest,
)
from headrace.core.events import Delta, Event, Finish, Start, TokenLogprob, Usage
from headrace.core.health import Health, State
from headrace.core.request import Endpoint, Request
from headrace.engine.client import DEFAULT_BUILDER, EngineClient, EngineObserver
from headrace.engine.supervisor import Timings
from headrace.engine.wire import EngineConfig, ModelInfo, Output, Step

if TYPE_CHECKING:
    from headrace.core.codec import TextCodec
    from headrace.engine.mailbox import Mailbox

__all__ = ["EngineBackend", "EngineObserver", "Timings", "cache_salt", "choice_seed"]

_CAPABILITIES = Capabilities(
    endpoints=frozenset(Endpoint),
    fields=frozenset(
        {
            "echo",
            "ignore_eos",
            "include_stop_str_in_output",
            "logit_bias",
            "logprobs",
            "min_p",
            "min_tokens",
            "n",
            "repetition_penalty",
            "stop_token_ids",
            "top_k",
        }
    ),
)


def cache_salt(secret: bytes, tenant: str, salt: str | None) -> bytes:
    """What separates one tenant's prefix cache from another's; a caller's salt narrows it."""
    digest = hashlib.blake2b(key=secret, digest_size=16)
    for part in (tenant, salt):
        # The length goes first, so that no two pairs read the same; absent is not empty.
        data = b"" if part is None else part.encode("utf-8", "surrogatepass")
        digest.update((-1 if part is None else len(data)).to_bytes(8, "little", signed=True))
        digest.update(data)
    return digest.digest()


def choice_seed(seed: int, choice: int) -> int:
    """A seed of its own for each choice of a seeded request, in [0, 2**63)."""
    digest = hashlib.blake2b(b"%d:%d" % (seed, choice), digest_size=8, person=b"choice-seed")
    return int.from_bytes(digest.digest(), "little") >> 1


class EngineBackend:
    """A Backend over one supervised engine process."""

    capabilities = _CAPABILITIES

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str = "engine",
        timings: Timings | None = None,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        observer: EngineObserver | None = None,
        builder: str = DEFAULT_BUILDER,
    ) -> None:
        self._config = config
        self._name = name
        self._clock = clock or SystemClock()
        self._entropy = entropy or SystemEntropy()
        self._secret = bytes.fromhex(self._entropy.token(32))
        self._client = EngineClient(
            config,
            timings=timings,
            clock=self._clock,
            builder=builder,
            observer=observer,
            listener=self,
        )
        self._prefixes = PrefixIndex()
        self._listeners: list[Callable[[StepReport], None]] = []
        self._targets: tuple[int, int] | None = None
        self._open: dict[str, Mailbox] = {}
        self._created = 0
        self._codec: tuple[str, TextCodec] | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def models(self) -> tuple[ModelCard, ...]:
        """Empty until the engine was ready once."""
        info = self._client.info
        if info is None:
            return ()
        return (
            ModelCard(
                id=self._config.model_name,
                created=self._created,
                context_length=info.context_length,
                vocab_size=info.vocab_size,
                revision=f"{info.revision}-{info.dtype}-{info.device}-{__version__}",
            ),
        )

    @property
    def info(self) -> ModelInfo | None:
        """What the engine said of the model when it became ready."""
        return self._client.info

    @property
    def codec(self) -> TextCodec | None:
        """Built on first use, from what the engine sent; None until the engine was ready once."""
        info = self._client.info
        if info is None:
            return None
        if self._codec is None or self._codec[0] != info.revision:
            from headrace.engine.models.codec import TokenizerCodec  # noqa: PLC0415 - heavy

            self._codec = (info.revision, TokenizerCodec.from_info(info))
        return self._codec[1]

    @property
    def client(self) -> EngineClient:
        return self._client

    async def start(self) -> None:
        await self._client.start()
        self._created = int(self._clock.wall())
        await asyncio.to_thread(lambda: self.codec)

    def load(self) -> Load:
        client, stats = self._client, self._client.stats
        info = client.info
        return Load(
            running=stats.running,
            waiting=stats.waiting,
            max_running=self._config.max_running if info is None else info.max_running,
            as_of=client.stats_as_of,
            kv_blocks=stats.blocks_total,
            kv_blocks_used=stats.blocks_used,
            block_size=self._config.block_size if info is None else info.block_size,
            recent_step_s=tuple(client.recent_step_s),
        )

    def health(self) -> Health:
        return self._client.health()

    async def close(self, grace: float) -> None:
        await self._client.close(grace)

    async def generate(self, request: Request) -> AsyncGenerator[Event]:
        """See Backend. Unless the request carries token ids, tokenises it in a thread."""
        prompt = request.prompt_token_ids
        if prompt is None:
            prompt = await asyncio.to_thread(self._encode, request)
        self._check(prompt, request.sampling.max_tokens)
        box = await self._client.submit(
            prompt,
            request.sampling,
            self._seeds(request),
            salt=self._salt(request),
            echo=request.echo,
            priority=request.priority,
        )
        answer = _Answer(request, self._name, prompt, box.seqs)
        self._open[request.id] = box
        try:
            while answer.choices_left:
                for output in await box.take():
                    for event in answer.events(output):
                        yield event
            yield answer.usage()
        finally:
            if self._open.get(request.id) is box:
                del self._open[request.id]
            self._client.abort(box)

    # Steering, and what the client reports for it.

    @property
    def step_limits(self) -> tuple[int, int]:
        return self._config.max_step_tokens, self._config.max_running

    @property
    def on_cpu(self) -> bool:
        info = self._client.info
        return (self._config.device if info is None else info.device) != "cuda"

    def listen(self, on_step: Callable[[StepReport], None]) -> None:
        self._listeners.append(on_step)

    def set_targets(self, *, max_step_tokens: int, max_running: int) -> None:
        """Kept for an engine that is not ready, or that takes this one's place."""
        self._targets = (max_step_tokens, max_running)
        if self.health().state is State.READY:
            self._client.set_targets(max_step_tokens=max_step_tokens, max_running=max_running)

    def preempt(self, request_id: str) -> None:
        box = self._open.get(request_id)
        if box is not None:
            self._client.preempt(box)

    def cached_tokens(self, request: Request) -> int:
        info = self._client.info
        prompt = request.prompt_token_ids
        if info is None or prompt is None or request.echo or not self._prefixes:
            return 0
        return self._prefixes.cached_tokens(prompt, self._salt(request), info.block_size)

    def on_ready(self) -> None:
        self._prefixes.clear()
        if self._targets is not None:
            self.set_targets(max_step_tokens=self._targets[0], max_running=self._targets[1])

    def on_step(self, step: Step) -> None:
        self._prefixes.update(step.blocks_added, step.blocks_evicted)
        stats = step.stats
        if stats.seconds <= 0:
            return
        report = StepReport(
            seconds=stats.seconds,
            prefill_tokens=stats.prefill_tokens,
            decode_tokens=stats.decode_tokens,
            decode_context=stats.decode_context,
            prefill_context=stats.prefill_context,
        )
        for listener in self._listeners:
            listener(report)

    def _salt(self, request: Request) -> bytes:
        return cache_salt(self._secret, request.tenant, request.cache_salt)

    def _encode(self, request: Request) -> tuple[int, ...]:
        codec = self.codec
        if isinstance(request.prompt, tuple):
            return request.prompt
        if codec is None:
            return ()
        if request.prompt is not None:
            return tuple(codec.encode(request.prompt))
        return tuple(codec.encode_chat(request.messages or ()))

    def _seeds(self, request: Request) -> list[int]:
        seed = request.sampling.seed
        if seed is None:
            return [self._entropy.seed() for _ in range(request.n)]
        return [choice_seed(seed, choice) for choice in range(request.n)]

    def _check(self, prompt: tuple[int, ...], max_tokens: int | None) -> None:
        """What the engine would refuse too, without the way there."""
        info = self._client.info
        if info is None:
            return
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        if len(prompt) + (0 if max_tokens == 0 else 1) > info.context_length:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {info.context_length} tokens; the prompt "
                f"has {len(prompt)}, which leaves no room for an answer.",
            )


class _Answer:
    """One request's outputs as its events."""

    def __init__(
        self, request: Request, backend: str, prompt: tuple[int, ...], seqs: range
    ) -> None:
        self.choices_left = request.n
        self._model = request.model
        self._backend = backend
        self._prompt = prompt
        self._first_seq = seqs.start
        self._started = False
        self._cached = 0
        self._completion = 0

    def events(self, output: Output) -> Iterator[Event]:
        """Raises what the output reports, after the events that came before it."""
        index = output.seq - self._first_seq
        if output.started:
            if index == 0:
                self._cached = output.cached_tokens
            if not self._started:
                self._started = True
                yield Start(self._model, self._backend, len(self._prompt), output.cached_tokens)
        if output.prompt_text is not None:
            scores = _frozen(output.prompt_logprobs)
            yield Delta(index, output.prompt_text, self._prompt, scores, prompt=True)
        if output.text or output.token_ids:
            self._completion += len(output.token_ids)
            ids = tuple(output.token_ids)
            yield Delta(index, output.text, ids, _frozen(output.logprobs))
        if output.error is not None:
            raise (InvalidRequest if output.invalid else BackendFailed)(output.error)
        if output.finish is not None:
            self.choices_left -= 1
            yield Finish(index, output.finish, output.stop)

    def usage(self) -> Usage:
        return Usage(len(self._prompt), self._completion, self._cached)


def _frozen(scores: list[TokenLogprob] | None) -> tuple[TokenLogprob, ...] | None:
    return None if scores is None else tuple(scores)
