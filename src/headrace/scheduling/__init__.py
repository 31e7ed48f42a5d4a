"""Who runs next, and who is refused. Pure decisions: no I/O, clock injected."""

from __future__ import annotations

from headrace.scheduling.base import (
    Claim,
    Cost,
    Interrupt,
    QueueStats,
    Revoked,
    Scheduler,
    StepSample,
    Ticket,
)
from headrace.scheduling.policy import ClassPolicy, SchedulingPolicy
from headrace.scheduling.scheduler import AdaptiveScheduler

__all__ = [
    "AdaptiveScheduler",
    "Claim",
    "ClassPolicy",
    "Cost",
    "Interrupt",
    "QueueStats",
    "Revoked",
    "Scheduler",
    "SchedulingPolicy",
    "StepSample",
    "Ticket",
]
