"""What every backend is to the gateway: the own engine, a remote server, or a script in a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headrace.core.codec import TextCodec
from headrace.core.events import Event
from headrace.core.health import Health
from headrace.core.request import Endpoint, Request

__all__ = ["Backend", "Capabilities", "Load", "ModelCard", "SteerableBackend", "StepReport"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Endpoints and optional request fields a backend honours.

    A request that sets an optional field outside `fields` is refused by name with 400. Optional
    are: echo, logprobs, n, top_k, min_p, repetition_penalty, logit_bias, min_tokens, ignore_eos,
    stop_token_ids, include_stop_str_in_output, and the keys of `Request.extra_fields`
    (tools, tool_choice, response_format, ...).
    """

    endpoints: frozenset[Endpoint]
    fields: frozenset[str]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as /v1/models lists it. `created` is Unix time in whole seconds.

    `revision` changes whenever equal requests may be answered differently.
    """

    id: str
    created: int
    context_length: int
    owned_by: str = "headrace"
    vocab_size: int | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A backend's work right now. Counts are sequences; `as_of` is monotonic seconds.

    `kv_blocks` is 0 where the backend does not say.
    """

    running: int
    waiting: int
    max_running: int
    as_of: float
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    block_size: int = 0
    recent_step_s: tuple[float, ...] = ()

    @property
    def kv_usage(self) -> float:
        return self.kv_blocks_used / self.kv_blocks if self.kv_blocks else 0.0


class Backend(Protocol):
    """All methods are called on the event loop that called `start`."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def models(self) -> tuple[ModelCard, ...]: ...

    @property
    def codec(self) -> TextCodec | None:
        """The tokenizer, or None where only the remote server knows it."""
        ...

    async def start(self) -> None:
        """Returns once READY. Raises HeadraceError if it can never be."""
        ...

    def generate(self, request: Request) -> AsyncIterator[Event]:
        """The answer, as Start, Deltas and Finishes, Usage.

        Closing the iterator cancels the work. Raises HeadraceError before Start or after it.
        """
        ...

    def load(self) -> Load: ...

    def health(self) -> Health: ...

    async def close(self, grace: float) -> None:
        """Lets running requests finish for `grace` seconds, then ends them. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of a backend that computes in steps. Counts are tokens; the contexts are sums over
    the sequences of what they attended to."""

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    decode_context: int
    prefill_context: int


@runtime_checkable
class SteerableBackend(Backend, Protocol):
    """A backend whose steps the scheduler watches and shapes."""

    @property
    def step_limits(self) -> tuple[int, int]:
        """The operator's bounds: most tokens in a step, most sequences computed together."""
        ...

    @property
    def on_cpu(self) -> bool:
        """Whether it computes on a CPU, as far as is known: what to expect of the first steps."""
        ...

    def listen(self, on_step: Callable[[StepReport], None]) -> None:
        """Has `on_step` called after every step, on the event loop; it must be quick."""
        ...

    def set_targets(self, *, max_step_tokens: int, max_running: int) -> None:
        """From the next step on; forgotten by a backend that restarts, or is not ready."""
        ...

    def preempt(self, request_id: str) -> None:
        """Takes a request's slots from it; it goes on, from where it was, when it is its turn by
        `Request.priority` again. Unknown requests are passed over."""
        ...

    def cached_tokens(self, request: Request) -> int:
        """Tokens at the beginning of a tokenised prompt that need not be computed, as far as is
        known now."""
        ...
