"""The seam between the life of a request and the decision of whose turn it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.core.request import PriorityClass, Request

__all__ = [
    "Claim",
    "Cost",
    "Interrupt",
    "QueueStats",
    "Revoked",
    "Scheduler",
    "StepSample",
    "Ticket",
]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request asks for. Tokens are estimated from bytes at admission, `exact` at its turn.

    `max_tokens` None means that nobody bounded the answer yet. `cached_tokens` are those of the
    prompt that the backend is thought to hold already.
    """

    choices: int
    prompt_tokens: int
    max_tokens: int | None
    exact: bool = False
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """On whose behalf a request asks, and how urgently.

    `flow` is the tenant, or the sub-tenant that a trusted one named; work is shared between flows
    in proportion to their `weight`. `deadline` is monotonic seconds.
    """

    flow: str = "default"
    weight: float = 1.0
    priority_class: PriorityClass = PriorityClass.STANDARD
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step of an engine: what it computed and how long that took.

    `decode_context` is the sum of the decoding sequences' known tokens, `prefill_context` that of
    the tokens already computed of the sequences whose prompts it advanced.
    """

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    decode_context: int = 0
    prefill_context: int = 0


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

    def started(self, cached_tokens: int = 0) -> None:
        """The backend computes it: from now on it is not revoked."""
        ...

    def generated(self, tokens: int) -> None:
        """So many more tokens of the answer are there, over all choices."""
        ...

    def choice_finished(self, *, natural: bool = True) -> None:
        """One of its choices is complete, and makes room before the rest. `natural` is false
        where a limit cut it off."""
        ...

    def release(self) -> None:
        """The request has left, in whatever state. Idempotent."""
        ...


class Scheduler(Protocol):
    """The queue in front of one backend. All methods run on one event loop and never block it."""

    def admit(self, request: Request, cost: Cost, claim: Claim, interrupt: Interrupt) -> Ticket:
        """Takes the request in, or raises Overloaded, QuotaExceeded or DeadlineExceeded.

        Called before tokenising. Whoever gets a ticket must release it.
        """
        ...

    def stats(self) -> QueueStats: ...
