"""First come, first served, with a bounded queue."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from headrace.core.clock import Clock
from headrace.core.errors import Overloaded
from headrace.core.request import Request
from headrace.scheduling.base import Claim, Cost, Interrupt, QueueStats

__all__ = ["LOOK_AHEAD", "FifoScheduler", "FifoTicket"]

LOOK_AHEAD = 2
"""Choices handed over beyond the backend's running cap, so that a slot never idles for a round
trip. They count as waiting for admission."""

_SHORTEST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_SMOOTHING = 0.1
_PRIOR_SERVICE_S = 1.0


class FifoScheduler:
    """Counts in choices. `capacity` tells how many the backend runs at once, and may change.

    At most `capacity() + max_queue` choices are held, whether tokenising, waiting or with the
    backend; the next request is refused. An idle scheduler takes any request, so that more choices
    than the limits allow run alone. Turns are given strictly in the order in which requests asked
    for them: the head waits until all its choices fit, and nobody passes it.
    """

    def __init__(self, capacity: Callable[[], int], *, max_queue: int, clock: Clock) -> None:
        self._capacity = capacity
        self._max_queue = max_queue
        self._clock = clock
        self._queue: OrderedDict[FifoTicket, None] = OrderedDict()
        self._held = 0
        self._dispatched = 0
        self._service_s: float | None = None

    def admit(
        self,
        request: Request,  # noqa: ARG002 - first come, first served whoever asks
        cost: Cost,
        claim: Claim,  # noqa: ARG002 - likewise
        interrupt: Interrupt,  # noqa: ARG002 - a place once given is never taken back
    ) -> FifoTicket:
        limit = max(1, self._capacity()) + self._max_queue
        if self._held and self._held + cost.choices > limit:
            raise Overloaded(
                f"The server is full: it holds {self._held} of at most {limit} choices and this "
                f"request asks for {cost.choices} more. Please retry later.",
                retry_after_s=self.predicted_wait_s(cost.choices),
            )
        self._held += cost.choices
        return FifoTicket(self, cost.choices)

    def stats(self) -> QueueStats:
        return QueueStats(self._dispatched, self._held - self._dispatched)

    def predicted_wait_s(self, choices: int) -> float:
        """Seconds until those waiting now and `choices` more have had their turn, 1 to 60.

        By Little's law: the backend completes as many a second as it holds, over the mean time
        it takes for one.
        """
        service_s = _PRIOR_SERVICE_S if self._service_s is None else self._service_s
        waiting = self._held - self._dispatched
        predicted = (waiting + choices) * service_s / max(1, self._dispatched)
        return min(max(predicted, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)

    def ask(self, ticket: FifoTicket) -> None:
        """Puts the ticket at the end of the queue, and gives the turns that are due."""
        self._queue[ticket] = None
        self._give_turns()

    def leave(self, ticket: FifoTicket, choices: int) -> None:
        """Takes `choices` of the ticket out of the books, wherever they stand."""
        if not ticket.choices:
            self._queue.pop(ticket, None)
        self._held -= choices
        if ticket.dispatched_at is not None:
            self._dispatched -= choices
            self._learn(self._clock.monotonic() - ticket.dispatched_at)
        self._give_turns()

    def _give_turns(self) -> None:
        room = max(1, self._capacity()) + LOOK_AHEAD
        while self._queue:
            head = next(iter(self._queue))
            if self._dispatched and self._dispatched + head.choices > room:
                return
            del self._queue[head]
            self._dispatched += head.choices
            head.dispatched_at = self._clock.monotonic()
            head.wake()

    def _learn(self, seconds: float) -> None:
        if self._service_s is None:
            self._service_s = seconds
        else:
            self._service_s += _SMOOTHING * (seconds - self._service_s)


class FifoTicket:
    """`choices` are those not yet finished; `dispatched_at` is set once its turn has come."""

    __slots__ = ("_scheduler", "_turn", "choices", "dispatched_at")

    def __init__(self, scheduler: FifoScheduler, choices: int) -> None:
        self._scheduler = scheduler
        self._turn: asyncio.Future[None] | None = None
        self.choices = choices
        self.dispatched_at: float | None = None

    async def turn(self, cost: Cost) -> None:  # noqa: ARG002 - order does not depend on cost
        if self.dispatched_at is None:
            self._scheduler.ask(self)
        if self.dispatched_at is None:
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn

    def wake(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def started(self, cached_tokens: int = 0) -> None:
        pass

    def generated(self, tokens: int) -> None:
        pass

    def choice_finished(self, *, natural: bool = True) -> None:  # noqa: ARG002 - room is room
        if self.choices:
            self.choices -= 1
            self._scheduler.leave(self, 1)

    def release(self) -> None:
        choices, self.choices = self.choices, 0
        if choices:
            self._scheduler.leave(self, choices)
