"""What callers may see of the queues."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["QueueRow"]


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One flow's waiting work in one class of one model. `depth` counts choices, `tokens` uncached
    prompt tokens; times are seconds, `predicted_wait_s` None before the backend was measured."""

    model: str
    priority_class: str
    flow: str
    depth: int
    running: int
    tokens: int
    oldest_wait_s: float
    predicted_wait_s: float | None
