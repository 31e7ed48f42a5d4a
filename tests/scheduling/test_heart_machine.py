"""Whatever happens to requests in whatever order, the books stay exact and everyone has one end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.clock import VirtualClock
from headrace.core.errors import DeadlineExceeded, HeadraceError, Overloaded
from headrace.core.request import PriorityClass
from headrace.scheduling import Claim, Cost, QueueStats, Revoked, SchedulingPolicy, StepSample
from headrace.scheduling.entry import Entry, State
from support.backend import request
from support.heart_plant import heart_of

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


@dataclass(eq=False)
class Life:
    choices: int
    cost: Cost
    entry: Entry | None = None
    ends: list[HeadraceError] = field(default_factory=list)
    left: bool = False

    @property
    def state(self) -> State:
        assert self.entry is not None
        return self.entry.state

    @staticmethod
    def refused_with(error: Overloaded | DeadlineExceeded) -> None:
        assert error.queue_position is not None or "passed" in error.message
        if isinstance(error, Overloaded):
            assert error.reason in {"queue_full", "predicted_wait"}
            assert error.retry_after_s is not None
            assert 1.0 <= error.retry_after_s <= 60.0
        else:
            assert error.reason == "deadline"


class Books(RuleBasedStateMachine):
    """Drives the heart as the gateway does; what the gateway would still have to do after an
    interrupt may happen at any later time."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 3
        self.clock = VirtualClock()
        self.policy = replace(
            SchedulingPolicy(), auto_targets=False, max_queue=6, revoke_margin_s=1.0, memory_s=20.0
        )
        self.preempted: list[Entry] = []
        self.heart = heart_of(
            self.policy, self.clock, lambda: self.capacity, preempt=self.preempted.append
        )
        self.lives: list[Life] = []

    def those(self, *states: State) -> list[Life]:
        return [life for life in self.lives if not life.left and life.state in states]

    @rule(
        flow=st.sampled_from(sorted(WEIGHTS)),
        priority_class=st.sampled_from(tuple(PriorityClass)),
        choices=st.integers(1, 5),
        prompt=st.integers(1, 20_000),
        deadline=st.one_of(st.none(), st.floats(-1, 30)),
    )
    def admit(
        self,
        flow: str,
        priority_class: PriorityClass,
        choices: int,
        prompt: int,
        deadline: float | None,
    ) -> None:
        now = self.clock.monotonic()
        due = None if deadline is None else now + deadline
        cost = Cost(choices, prompt, 300)
        life = Life(choices, cost)

        def interrupt(error: Exception) -> None:
            if isinstance(error, Revoked):
                assert life.state is State.ADMITTED
                return
            assert isinstance(error, (Overloaded, DeadlineExceeded))
            life.ends.append(error)

        claim = Claim(flow, WEIGHTS[flow], priority_class, due)
        try:
            life.entry = self.heart.admit(request(), cost, claim, interrupt, lambda: None)
        except (Overloaded, DeadlineExceeded) as refusal:
            life.refused_with(refusal)
        else:
            self.lives.append(life)

    @precondition(lambda self: self.those(State.ADMITTED))
    @rule(data=st.data(), tokens=st.integers(1, 20_000))
    def ask(self, data: st.DataObject, tokens: int) -> None:
        life = data.draw(st.sampled_from(self.those(State.ADMITTED)))
        assert life.entry is not None
        exact = (
            life.cost if life.cost.exact else replace(life.cost, prompt_tokens=tokens, exact=True)
        )
        life.cost = exact
        self.heart.ask(life.entry, exact)

    @precondition(lambda self: self.those(State.DISPATCHED))
    @rule(data=st.data(), cached=st.integers(0, 30_000))
    def start(self, data: st.DataObject, cached: int) -> None:
        life = data.draw(st.sampled_from(self.those(State.DISPATCHED)))
        assert life.entry is not None
        self.heart.started(life.entry, cached)
        assert life.state is State.RUNNING

    @precondition(lambda self: self.those(State.RUNNING))
    @rule(data=st.data(), tokens=st.integers(0, 50))
    def generate(self, data: st.DataObject, tokens: int) -> None:
        life = data.draw(st.sampled_from(self.those(State.RUNNING)))
        assert life.entry is not None
        self.heart.generated(life.entry, tokens)

    @precondition(lambda self: self.those(State.DISPATCHED, State.RUNNING))
    @rule(data=st.data(), natural=st.booleans())
    def finish_a_choice(self, data: st.DataObject, natural: bool) -> None:
        life = data.draw(st.sampled_from(self.those(State.DISPATCHED, State.RUNNING)))
        assert life.entry is not None
        self.heart.choice_finished(life.entry, natural=natural)
        life.choices -= 1
        if not life.choices:
            assert life.state is State.GONE
            life.left = True

    @precondition(lambda self: any(not life.left for life in self.lives))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from([life for life in self.lives if not life.left]))
        assert life.entry is not None
        self.heart.release(life.entry)
        self.heart.release(life.entry)
        life.left = True

    @rule(
        seconds=st.floats(0.001, 1),
        prefill=st.integers(0, 2000),
        decodes=st.integers(0, 8),
    )
    def step(self, seconds: float, prefill: int, decodes: int) -> None:
        self.clock.advance(seconds)
        before = len(self.preempted)
        self.heart.observe_step(StepSample(seconds, prefill, decodes, decodes * 100))
        assert len(self.preempted) <= before + 1
        for entry in self.preempted[before:]:
            assert entry.state is State.RUNNING
            assert self.preempted.count(entry) <= self.policy.preempt_limit

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        until = self.clock.monotonic() + seconds
        while (at := self.heart.next_timer()) is not None and at <= until:
            self.clock.advance(max(0.0, at - self.clock.monotonic()))
            self.heart.expire(self.clock.monotonic())
        self.clock.advance(max(0.0, until - self.clock.monotonic()))

    @rule(capacity=st.integers(0, 6))
    def the_backend_changes_its_cap(self, capacity: int) -> None:
        self.capacity = capacity
        self.heart.capacity_changed()

    @rule(kappa=st.floats(0, 20), late=st.booleans(), look_ahead=st.integers(0, 3))
    def the_operator_changes_the_policy(self, kappa: float, late: bool, look_ahead: int) -> None:
        self.policy = replace(
            self.policy, kappa=kappa, late_lane=late, look_ahead=look_ahead, window_s=kappa
        )
        self.heart.configure(self.policy)

    @invariant()
    def books_are_exact(self) -> None:
        running = sum(life.choices for life in self.those(State.DISPATCHED, State.RUNNING))
        waiting = sum(life.choices for life in self.those(State.ADMITTED, State.WAITING))
        assert self.heart.stats() == QueueStats(running, waiting)
        books = self.heart.books
        assert books.prefills.remaining >= 0
        for priority_class, queue in zip(PriorityClass, books.queues, strict=True):
            queued = [
                life.entry
                for life in self.those(State.WAITING)
                if life.entry is not None and life.entry.priority_class is priority_class
            ]
            assert queue.count == len(queued)
            assert queue.best() == queue._find_best(), "what is remembered is what would be found"
            assert sorted(e.number for e in queue.waiting()) == sorted(e.number for e in queued)
            held = [
                life.entry
                for life in self.those(State.WAITING, State.ADMITTED)
                if life.entry is not None and life.entry.priority_class is priority_class
            ]
            assert books.backlog.tokens[priority_class] == sum(e.tokens for e in held)
            assert sum(flow.held for flow in queue.flows.values()) == len(held)
            assert sum(flow.load for flow in queue.flows.values()) == pytest.approx(
                sum(e.work for e in held), abs=1e-6
            )

    @invariant()
    def somebody_runs_if_anybody_waits(self) -> None:
        assert self.heart.stats().dispatched or not self.those(State.WAITING)

    @invariant()
    def nobody_ends_twice(self) -> None:
        for life in self.lives:
            assert len(life.ends) <= 1
            if life.ends and isinstance(life.ends[0], Overloaded):
                assert life.state is State.GONE

    def teardown(self) -> None:
        for life in self.lives:
            if life.entry is not None:
                self.heart.release(life.entry)
        assert self.heart.stats() == QueueStats(0, 0)
        books = self.heart.books
        assert books.backlog.tokens == [0] * 4
        assert books.slots.by_class == [0] * 4
        assert books.slots.occupied == 0
        assert books.slots.by_class_and_flow() == {}
        assert len(books.prefills) == 0
        assert books.prefills.remaining == 0
        assert not books.running
        assert not books.unstarted
        assert self.heart.next_timer() is None
        for queue in books.queues:
            for flow in queue.flows.values():
                assert (flow.held, flow.count, flow.tokens, flow.load) == (0, 0, 0, 0.0)


TestBooks: Any = Books.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
