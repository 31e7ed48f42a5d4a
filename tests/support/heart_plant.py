"""A backend that serves each request for a given time, under the scheduler's heart."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.core.clock import VirtualClock
from headrace.core.errors import HeadraceError
from headrace.core.request import PriorityClass
from headrace.scheduling.base import Claim, Cost, Revoked, StepSample
from headrace.scheduling.entry import Entry, State
from headrace.scheduling.forecast import FixedForecaster
from headrace.scheduling.heart import Heart
from headrace.scheduling.policy import SchedulingPolicy
from headrace.scheduling.speed import BackendSpeed
from support.backend import request

__all__ = ["ANSWER", "Ask", "FixedSpeed", "Plant", "Served", "heart_of"]

ANSWER = 256


class FixedSpeed(BackendSpeed):
    """Knows from the start and learns nothing, so that predicted work is what is charged."""

    def __init__(self, prefill_rate: float | None = 10_000.0, residence_s: float = 1.0) -> None:
        super().__init__()
        self.prefill_rate = prefill_rate
        self.residence_s = residence_s
        self.prompt_tokens = 100.0

    def observe_step(self, sample: StepSample, *, backlogged: bool) -> None:
        pass

    def first_token(self, tokens: int, seconds: float) -> None:
        pass

    def next_tokens(self, tokens: int, seconds: float, running: int) -> None:
        pass

    def prompt(self, tokens: int) -> None:
        pass

    def resided(self, seconds: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Ask:
    at: float
    flow: str = "a"
    priority_class: PriorityClass = PriorityClass.STANDARD
    weight: float = 1.0
    prompt: int = 100
    service_s: float = 1.0


@dataclass(slots=True, eq=False)
class Served:
    ask: Ask
    entry: Entry | None = None
    turn_at: float | None = None
    refusal: HeadraceError | None = None
    overtaken: list[Served] = field(default_factory=list)

    @property
    def wait(self) -> float:
        assert self.turn_at is not None
        return self.turn_at - self.ask.at


def heart_of(
    policy: SchedulingPolicy,
    clock: VirtualClock,
    capacity: Callable[[], int],
    speed: BackendSpeed | None = None,
    preempt: Callable[[Entry], None] | None = None,
) -> Heart:
    heart = Heart(
        policy,
        capacity=capacity,
        clock=clock,
        rng=random.Random(0),
        forecaster=FixedForecaster(ANSWER),
        preempt=preempt,
    )
    if speed is not None:
        heart.books.speed = speed
    return heart


class Plant:
    """Runs asks to their end. `on_event` is called after every event, with the plant."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        capacity: int,
        speed: BackendSpeed | None = None,
        on_event: Callable[[Plant], None] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.capacity = capacity
        self.heart = heart_of(policy, self.clock, lambda: capacity, speed or FixedSpeed())
        self.order: list[Served] = []
        self.waiting: dict[Served, None] = {}
        self._on_event = on_event
        self._ends: list[tuple[float, int, Served]] = []
        self._woken: list[Served] = []
        self._again: list[Served] = []

    def run(self, asks: Sequence[Ask]) -> list[Served]:
        served = [Served(ask) for ask in sorted(asks, key=lambda ask: ask.at)]
        coming = list(reversed(served))
        while coming or self._ends:
            if coming and (not self._ends or coming[-1].ask.at <= self._ends[0][0]):
                one = coming.pop()
                self._go_to(one.ask.at)
                self._arrive(one)
            else:
                at, _, one = heapq.heappop(self._ends)
                self._go_to(at)
                assert one.entry is not None
                self.heart.choice_finished(one.entry)
                self.heart.release(one.entry)
            self._settle()
            if self._on_event is not None:
                self._on_event(self)
        return served

    def _arrive(self, one: Served) -> None:
        ask = one.ask
        claim = Claim(ask.flow, ask.weight, ask.priority_class)
        cost = Cost(1, ask.prompt, None, exact=True)

        def wake() -> None:
            one.turn_at = self.clock.monotonic()
            self.waiting.pop(one, None)
            one.overtaken = [other for other in self.waiting if other.ask.at < ask.at]
            self.order.append(one)
            self._woken.append(one)

        def interrupt(error: Exception) -> None:
            if isinstance(error, Revoked):
                self._woken = [other for other in self._woken if other is not one]
                self._again.append(one)
                return
            assert isinstance(error, HeadraceError)
            one.refusal = error
            self.waiting.pop(one, None)

        try:
            one.entry = self.heart.admit(request(), cost, claim, interrupt, wake)
        except HeadraceError as error:
            one.refusal = error
            return
        self.waiting[one] = None
        self.heart.ask(one.entry, cost)

    def _settle(self) -> None:
        """The backend begins with what it was given, and computes its first token at once."""
        while self._woken or self._again:
            if self._again:
                one = self._again.pop()
                assert one.entry is not None
                self.waiting[one] = None
                self.heart.ask(one.entry, one.entry.cost)
                continue
            one = self._woken.pop(0)
            entry = one.entry
            assert entry is not None
            if entry.state is not State.DISPATCHED:
                continue
            self.heart.started(entry)
            self.heart.generated(entry, ANSWER)
            end = self.clock.monotonic() + one.ask.service_s
            heapq.heappush(self._ends, (end, entry.number, one))

    def _go_to(self, at: float) -> None:
        self.clock.advance(max(0.0, at - self.clock.monotonic()))
