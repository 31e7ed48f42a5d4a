"""What a caller asks for beside its request: how urgent it is, on whose behalf, until when."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Terms"]


@dataclass(frozen=True, slots=True)
class Terms:
    """As sent, and not yet clamped to what the tenant may ask for.

    `priority` is the body's field, in vLLM's direction. `x_priority`, `objective` and
    `fairness_id` are the headers X-Priority, x-gateway-inference-objective and
    x-gateway-inference-fairness-id. `timeout_s` counts from arrival.
    """

    priority: int = 0
    x_priority: str | None = None
    objective: str | None = None
    fairness_id: str | None = None
    timeout_s: float | None = None
