"""What an operator may tune about order and admission. Times are seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from headrace.core.request import PriorityClass

__all__ = ["ClassPolicy", "SchedulingPolicy"]


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """One priority class.

    `ttft_s`: target for the time to the first token; later than that a request is late, and one
    that would be is refused. `slack_s`: the head start that every more urgent class has over this
    one. `guard_s`: nobody waits longer while others are served out of turn. `slots`: the share of
    the backend's running slots that may be taken before this class gets no more of them.
    `patience`: with automatic targets, how many times the time to turn over a full batch a request
    may be predicted to wait before it is refused.
    """

    ttft_s: float
    slack_s: float
    guard_s: float
    slots: float
    patience: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.slack_s >= 0 and self.guard_s > 0 and self.patience > 0):
            raise ValueError("targets, guards and patience are above zero, slack is not below")
        if not 0 < self.slots <= 1:
            raise ValueError("a class fills a share of the slots above 0 and up to 1")


_CLASSES = MappingProxyType(
    {
        PriorityClass.SYSTEM: ClassPolicy(1.0, 0.0, 10.0, 1.0, 0.25),
        PriorityClass.INTERACTIVE: ClassPolicy(2.0, 5.0, 60.0, 0.97, 0.5),
        PriorityClass.STANDARD: ClassPolicy(5.0, 15.0, 90.0, 0.97, 4.0),
        PriorityClass.BATCH: ClassPolicy(60.0, 60.0, 90.0, 0.75, 32.0),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """All tunables of order and admission; swapped as a whole.

    Order: `kappa` seconds of queue per second of predicted cost, up to `cost_cap_s`; `window_s`
    seconds of predicted work that a flow may be ahead of the least served one; `late_share` of
    the work served on time is the credit of late work; every `guard_every`-th turn may go to
    whoever waits longer than its guard (0: never).

    Dispatch: `look_ahead` choices beyond what the backend runs; prompts are handed over while
    fewer than `partials` of them are being computed or less than `prefill_ahead_s` of prompts would
    be served before this one. `shortest_first` tells whether the backend computes short prompts
    before long ones; if not, none is handed over past the `partials`. `express` is the share of
    the slots kept for small requests and for flows below their weighted share; 0 makes shares of
    slots no matter at all. What a flow has lately filled of slots at once, within its share, is
    kept for it and falls by half every `reach_s`. Slots are kept for classes and flows seen within
    `memory_s`.
    A turn is taken back for a request whose key is better by `revoke_margin_s`; negative: never.
    `preemption` spares requests within `preempt_spares_tokens` of their predicted end, and those
    preempted `preempt_limit` times.

    Admission: refused when the predicted time to the first token exceeds `tolerance` times the
    target, sooner for a large request (`size_bias`) and for a flow that fills more than its share
    of the slots (`share_bias`): exponents, 0 is off. `auto_targets` raises targets to what the
    machine needs (see `headrace.scheduling.targets`). `push_out` refuses from the flow with the
    most queued work per weight, else always the newcomer; `shed` false refuses nobody by
    prediction. Hard limits: `max_queue` choices beyond what runs, and `max_queued_tokens` of
    prompts. Retry-After lies between `retry_least_s` and `retry_most_s`.
    """

    classes: Mapping[PriorityClass, ClassPolicy] = field(default_factory=lambda: _CLASSES)
    auto_targets: bool = True
    kappa: float = 10.0
    cost_cap_s: float = 20.0
    window_s: float = 2.0
    late_lane: bool = True
    late_share: float = 0.2
    guard_every: int = 4
    look_ahead: int = 2
    partials: int = 2
    prefill_ahead_s: float = 0.2
    shortest_first: bool = True
    express: float = 0.045
    reach_s: float = 30.0
    memory_s: float = 60.0
    revoke_margin_s: float = 5.0
    preemption: bool = True
    preempt_spares_tokens: int = 32
    preempt_limit: int = 2
    tolerance: float = 1.0
    size_bias: float = 0.7
    share_bias: float = 1.0
    shed: bool = True
    push_out: bool = True
    max_queue: int = 10_000
    max_queued_tokens: int = 16_000_000
    retry_least_s: float = 1.0
    retry_most_s: float = 60.0

    def __post_init__(self) -> None:
        if set(self.classes) != set(PriorityClass):
            raise ValueError("a policy describes every priority class")
        object.__setattr__(self, "classes", MappingProxyType(dict(self.classes)))
        slots = [self.classes[c].slots for c in PriorityClass]
        if slots != sorted(slots, reverse=True):
            raise ValueError("a less urgent class fills no more slots than a more urgent one")
        not_negative = {
            "kappa": self.kappa,
            "size_bias": self.size_bias,
            "share_bias": self.share_bias,
            "cost_cap_s": self.cost_cap_s,
            "window_s": self.window_s,
            "late_share": self.late_share,
            "guard_every": self.guard_every,
            "look_ahead": self.look_ahead,
            "prefill_ahead_s": self.prefill_ahead_s,
            "memory_s": self.memory_s,
            "reach_s": self.reach_s,
            "max_queue": self.max_queue,
            "retry_least_s": self.retry_least_s,
        }
        for name, value in not_negative.items():
            if not value >= 0 or math.isnan(value):
                raise ValueError(f"{name} may not be below zero")
        if self.partials < 1 or self.max_queued_tokens < 1 or not self.tolerance > 0:
            raise ValueError("partials, max_queued_tokens and tolerance are above zero")
        if not 0 <= self.express < 1:
            raise ValueError("express is a share below 1")
        if self.retry_most_s < self.retry_least_s:
            raise ValueError("retry_most_s is not below retry_least_s")

    def with_class(self, priority_class: PriorityClass, new: ClassPolicy) -> SchedulingPolicy:
        return replace(self, classes={**self.classes, priority_class: new})

    @property
    def key_span_s(self) -> float:
        """How far a key can lie after its arrival; what bounds overtaking."""
        return max(c.slack_s for c in self.classes.values()) + self.cost_cap_s
