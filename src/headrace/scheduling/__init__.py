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
from headrace.scheduling.fifo import FifoScheduler

__all__ = [
    "Claim",
    "Cost",
    "FifoScheduler",
    "Interrupt",
    "QueueStats",
    "Revoked",
    "Scheduler",
    "StepSample",
    "Ticket",
]
