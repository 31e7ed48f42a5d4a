"""Who runs next, and who is refused. Pure decisions: no I/O, clock injected."""

from __future__ import annotations

from headrace.scheduling.base import Cost, Interrupt, QueueStats, Revoked, Scheduler, Ticket
from headrace.scheduling.fifo import FifoScheduler

__all__ = ["Cost", "FifoScheduler", "Interrupt", "QueueStats", "Revoked", "Scheduler", "Ticket"]
