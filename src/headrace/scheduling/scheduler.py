"""The scheduler of one backend, for an event loop: tickets around `headrace.scheduling.heart`."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Protocol

from headrace.core.clock import Clock
from headrace.core.request import PriorityClass, Request
from headrace.scheduling.base import Claim, Cost, Interrupt, QueueStats, StepSample
from headrace.scheduling.counters import Counters
from headrace.scheduling.entry import Entry, State
from headrace.scheduling.forecast import FixedForecaster, Forecaster
from headrace.scheduling.heart import Heart
from headrace.scheduling.policy import SchedulingPolicy
from headrace.scheduling.snapshot import ClassSnapshot, snapshot

__all__ = ["AdaptiveScheduler", "AdaptiveTicket", "Later"]


class _Handle(Protocol):
    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], _Handle]
"""Calls back once after so many seconds, unless cancelled."""


def _call_later(delay: float, callback: Callable[[], None]) -> _Handle:
    return asyncio.get_running_loop().call_later(delay, callback)


class AdaptiveScheduler:
    """Implements `scheduling.base.Scheduler`.

    `capacity` is how many choices the backend runs at once, and may change; tell it by
    `capacity_changed` to have it used before the next event. `preempt` is given the id of a
    running request that the backend shall put back into its own queue. `rng` is for jitter only,
    `timer` measures decisions.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        capacity: Callable[[], int],
        *,
        clock: Clock,
        rng: random.Random,
        forecaster: Forecaster | None = None,
        preempt: Callable[[str], None] | None = None,
        timer: Callable[[], float] | None = None,
        later: Later = _call_later,
    ) -> None:
        self._clock = clock
        self._later = later
        self._heart = Heart(
            policy,
            capacity=capacity,
            clock=clock,
            rng=rng,
            forecaster=FixedForecaster() if forecaster is None else forecaster,
            preempt=None if preempt is None else lambda entry: preempt(entry.request.id),
            timer=timer,
        )
        self._alarm: _Handle | None = None
        self._alarm_at: float | None = None

    def admit(
        self, request: Request, cost: Cost, claim: Claim, interrupt: Interrupt
    ) -> AdaptiveTicket:
        ticket = AdaptiveTicket(self, self._heart)
        ticket.entry = self._heart.admit(request, cost, claim, interrupt, ticket.wake)
        self.arm()
        return ticket

    def stats(self) -> QueueStats:
        return self._heart.stats()

    def observe_step(self, sample: StepSample) -> None:
        """The backend has computed a step."""
        self._heart.observe_step(sample)

    def capacity_changed(self) -> None:
        self._heart.capacity_changed()

    def configure(self, policy: SchedulingPolicy) -> None:
        """Swaps all tunables at once. Who waits keeps its place."""
        self._heart.configure(policy)

    @property
    def policy(self) -> SchedulingPolicy:
        return self._heart.books.policy

    @property
    def counters(self) -> Counters:
        return self._heart.books.counters

    def jain(self) -> float | None:
        """How evenly flows were served lately, by weight: 1 is even, 1/flows is one has all."""
        return self.counters.jain(self._clock.monotonic())

    def ttft_targets_s(self) -> list[float | None]:
        """By class, what is in force now; None before it is known."""
        targets = (self._heart.books.target_s(c) for c in PriorityClass)
        return [target if math.isfinite(target) else None for target in targets]

    def snapshot(self) -> tuple[ClassSnapshot, ...]:
        """What waits and runs, by class and flow. Linear in the number of requests."""
        return snapshot(self._heart.books)

    def arm(self) -> None:
        """Sees to it that deadlines are noticed when they come."""
        due = self._heart.next_timer()
        if due is None:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._alarm_at = None
            return
        if self._alarm is not None and self._alarm_at is not None:
            if self._alarm_at <= due:
                return  # It will look again then.
            self._alarm.cancel()
        self._alarm_at = due
        self._alarm = self._later(max(0.0, due - self._clock.monotonic()), self._ring)

    def _ring(self) -> None:
        self._alarm = self._alarm_at = None
        self._heart.expire(self._clock.monotonic())
        self.arm()


class AdaptiveTicket:
    """Implements `scheduling.base.Ticket`."""

    __slots__ = ("_heart", "_scheduler", "_turn", "entry")

    entry: Entry

    def __init__(self, scheduler: AdaptiveScheduler, heart: Heart) -> None:
        self._scheduler = scheduler
        self._heart = heart
        self._turn: asyncio.Future[None] | None = None

    async def turn(self, cost: Cost) -> None:
        self._heart.ask(self.entry, cost)
        self._scheduler.arm()
        if self.entry.state in (State.ADMITTED, State.WAITING, State.GONE):
            # One that is gone was refused, or has finished: the interrupt ends this wait.
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn

    def wake(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def started(self, cached_tokens: int = 0) -> None:
        self._heart.started(self.entry, cached_tokens)

    def generated(self, tokens: int) -> None:
        self._heart.generated(self.entry, tokens)

    def choice_finished(self, *, natural: bool = True) -> None:
        self._heart.choice_finished(self.entry, natural=natural)

    def release(self) -> None:
        self._heart.release(self.entry)
        self._scheduler.arm()
