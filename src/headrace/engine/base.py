"""The seams of the engine loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from headrace.engine.sequence import StepPlan

__all__ = ["ModelRunner", "RawLogprob", "Sampled"]


@dataclass(frozen=True, slots=True)
class RawLogprob:
    """Log-probability of a token at one position and of the k best there, as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Outcome of one chunk of a plan, in the plan's order.

    `token_id` is None for a chunk that does not sample. `prompt_logprobs` covers the positions
    start+1 .. start+length of the prompt that the chunk computed (the token at position p is
    scored by the logits of p-1); only for sequences that need them. `error` says that this
    sequence alone failed, in words for its client.
    """

    token_id: int | None = None
    logprob: RawLogprob | None = None
    prompt_logprobs: tuple[RawLogprob, ...] = ()
    error: str | None = None


class ModelRunner(Protocol):
    """Computes plans. Owned by the engine loop; `launch` may return before the device is done."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def launch(self, plan: StepPlan) -> Any:
        """Starts the step and returns a handle for `collect`."""
        ...

    def collect(self, handle: Any) -> list[Sampled]:
        """Waits for the step; one entry a chunk. Never raises because of one sequence."""
        ...
