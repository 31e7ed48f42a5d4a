"""The seam between the life of a request and the decision of whose turn it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.core.request import Request

__all__ = ["Cost", "Interrupt", "QueueStats", "Revoked", "Scheduler", "Ticket"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request asks for. Tokens are estimated from bytes at admission, `exact` at its turn.

    `max_tokens` None means that nobody bounded the answer yet.
    """

    choices: int
    prompt_tokens: int
    max_tokens: int | None
    exact: bool = False


class Revoked(Exception):
    """The turn was taken back before the backend said Start: cancel there and wait again."""


Interrupt = Callable[[Exception], None]
"""Ends whatever the holder of a ticket is waiting for with this exception: `Revoked`, or a
HeadraceError that becomes the answer (pushed out, deadline passed). Does not re-enter."""


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Choices with the backend, and choices admitted that are not there yet."""

    dispatched: int
    waiting: int


class Ticket(Protocol):
    """One request's hold on its scheduler, from admission to release. Owned by the event loop."""

    async def turn(self, cost: Cost) -> None:
        """Returns when the request may go to the backend. Called again after `Revoked`, it waits
        at its old place."""
        ...

    def started(self) -> None:
        """The backend computes it: from now on it is not revoked."""
        ...

    def choice_finished(self) -> None:
        """One of its choices is complete, and makes room before the rest."""
        ...

    def release(self) -> None:
        """The request has left, in whatever state. Idempotent."""
        ...


class Scheduler(Protocol):
    """The queue in front of one backend. All methods run on one event loop and never block it."""

    def admit(self, request: Request, cost: Cost, interrupt: Interrupt) -> Ticket:
        """Takes the request in, or raises Overloaded, QuotaExceeded or DeadlineExceeded.

        Called before tokenising. Whoever gets a ticket must release it.
        """
        ...

    def stats(self) -> QueueStats: ...
