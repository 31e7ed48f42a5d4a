"""What the limiter of a remote backend is told, and what it shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Circuit", "Failure", "LimiterPolicy", "LimiterStats"]


class Failure(StrEnum):
    """How an attempt failed. `PUSHBACK` (429) says that it is busy, the rest that it is ill."""

    PUSHBACK = "pushback"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    ERROR = "error"


class Circuit(StrEnum):
    """`OPEN` takes nothing, `PROBING` has one request out to see whether it is back."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


@dataclass(frozen=True, slots=True)
class LimiterPolicy:
    """Targets in seconds. `ttft_target` bounds the prompt tokens in flight; ITL is watched against
    `itl_target` where that is set."""

    initial: float = 4.0
    most: float = 512.0
    ttft_target: float = 2.0
    itl_target: float | None = None
    failures_to_open: int = 5
    open_s: float = 5.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.initial <= self.most or self.ttft_target <= 0 or self.open_s <= 0:
            raise ValueError("limits start between 1 and the most, and times are positive")
        if self.failures_to_open < 1 or (self.itl_target is not None and self.itl_target <= 0):
            raise ValueError("a circuit opens after a failure at least; a target is positive")


@dataclass(frozen=True, slots=True)
class LimiterStats:
    """`prefill_limit` is None until the backend's prefill speed is known."""

    limit: float
    prefill_limit: float | None
    inflight: int
    inflight_prefill: int
    gradient: float
    circuit: Circuit
