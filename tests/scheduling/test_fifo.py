"""First come, first served: exact books, strict order, no idle slot, whatever happens when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.clock import VirtualClock
from headrace.core.errors import Overloaded
from headrace.scheduling import Claim, Cost, FifoScheduler, QueueStats
from headrace.scheduling.fifo import LOOK_AHEAD, FifoTicket
from support.backend import request

ASKED = request()


def cost(choices: int = 1) -> Cost:
    return Cost(choices, prompt_tokens=10, max_tokens=10)


def never(error: Exception) -> None:
    raise AssertionError(f"first come, first served interrupts nobody: {error}")


class Books(RuleBasedStateMachine):
    """Drives the scheduler as the gateway does, beside a model that is obviously right."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity, self.max_queue = 2, 4
        self.clock = VirtualClock()
        self.scheduler = FifoScheduler(
            lambda: self.capacity, max_queue=self.max_queue, clock=self.clock
        )
        self.tokenising: list[FifoTicket] = []
        self.queue: list[FifoTicket] = []
        self.running: list[FifoTicket] = []
        self.left_early: list[FifoTicket] = []

    @property
    def held(self) -> int:
        return sum(t.choices for t in (*self.tokenising, *self.queue, *self.running))

    def settle(self) -> None:
        """What the model says must run by now, in order."""
        while self.queue:
            head = self.queue[0]
            busy = sum(ticket.choices for ticket in self.running)
            if busy and busy + head.choices > self.capacity + LOOK_AHEAD:
                return
            self.running.append(self.queue.pop(0))

    @rule(choices=st.integers(1, 9))
    def admit(self, choices: int) -> None:
        fits = not self.held or self.held + choices <= self.capacity + self.max_queue
        if fits:
            self.tokenising.append(self.scheduler.admit(ASKED, cost(choices), Claim(), never))
            return
        with pytest.raises(Overloaded) as refusal:
            self.scheduler.admit(ASKED, cost(choices), Claim(), never)
        retry_after_s = refusal.value.retry_after_s
        assert retry_after_s is not None
        assert 1 <= retry_after_s <= 60

    @precondition(lambda self: self.tokenising)
    @rule(data=st.data())
    def ask_for_its_turn(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tokenising))
        self.tokenising.remove(ticket)
        self.queue.append(ticket)
        self.scheduler.ask(ticket)
        self.settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_a_choice(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        ticket.choice_finished()
        if not ticket.choices:
            self.running.remove(ticket)
        self.settle()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from([*self.tokenising, *self.queue, *self.running]))
        ticket.release()
        ticket.release()
        ticket.choice_finished()
        if ticket not in self.running:
            self.left_early.append(ticket)
        for place in (self.tokenising, self.queue, self.running):
            if ticket in place:
                place.remove(ticket)
        self.settle()

    @rule(capacity=st.integers(0, 8))
    def the_backend_changes_its_cap(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        if self.running:
            # A new cap is noticed at the next departure.
            self.running.pop(0).release()
            self.settle()

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def books_are_exact(self) -> None:
        busy = sum(ticket.choices for ticket in self.running)
        assert self.scheduler.stats() == QueueStats(busy, self.held - busy)

    @invariant()
    def turns_are_given_in_order_and_to_nobody_else(self) -> None:
        assert all(ticket.dispatched_at is not None for ticket in self.running)
        others = (*self.queue, *self.tokenising, *self.left_early)
        assert all(ticket.dispatched_at is None for ticket in others)

    def teardown(self) -> None:
        for ticket in (*self.tokenising, *self.queue, *self.running):
            ticket.release()
        assert self.scheduler.stats() == QueueStats(0, 0)


TestBooks: Any = Books.TestCase
TestBooks.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@pytest.fixture
def scheduler() -> FifoScheduler:
    return FifoScheduler(lambda: 1, max_queue=10, clock=VirtualClock())


async def take(scheduler: FifoScheduler, number: int, order: list[int]) -> FifoTicket:
    ticket = scheduler.admit(ASKED, cost(), Claim(), never)
    try:
        await ticket.turn(cost())
    except asyncio.CancelledError:
        ticket.release()
        raise
    order.append(number)
    return ticket


@pytest.mark.anyio
async def test_wake_ups_keep_the_order(scheduler: FifoScheduler) -> None:
    order: list[int] = []
    tasks = [asyncio.create_task(take(scheduler, i, order)) for i in range(8)]
    for task in tasks:
        (await task).release()
    assert order == list(range(8))


@pytest.mark.anyio
async def test_a_turn_given_in_the_moment_of_leaving_passes_to_the_next(
    scheduler: FifoScheduler,
) -> None:
    order: list[int] = []
    tasks = [asyncio.create_task(take(scheduler, i, order)) for i in range(5)]
    running = [await task for task in tasks[:3]]
    assert scheduler.stats() == QueueStats(3, 2)
    running[0].release()
    tasks[3].cancel()
    running.append(await tasks[4])
    assert order == [0, 1, 2, 4]
    assert tasks[3].cancelled()
    for ticket in running:
        ticket.release()
    assert scheduler.stats() == QueueStats(0, 0)


@pytest.mark.anyio
async def test_a_second_turn_of_the_same_ticket_is_the_first(scheduler: FifoScheduler) -> None:
    ticket = scheduler.admit(ASKED, cost(), Claim(), never)
    await ticket.turn(cost())
    await ticket.turn(cost())
    ticket.started()
    assert scheduler.stats() == QueueStats(1, 0)
    ticket.release()
    assert scheduler.stats() == QueueStats(0, 0)


@pytest.mark.anyio
async def test_a_wide_request_at_the_head_is_not_passed_and_runs_alone() -> None:
    scheduler = FifoScheduler(lambda: 2, max_queue=100, clock=VirtualClock())
    first, wide, small = (scheduler.admit(ASKED, cost(n), Claim(), never) for n in (1, 9, 1))
    await first.turn(cost())
    turns = [asyncio.create_task(t.turn(cost())) for t in (wide, small)]
    await asyncio.sleep(0)
    assert scheduler.stats() == QueueStats(1, 10)
    first.release()
    await turns[0]
    assert scheduler.stats() == QueueStats(9, 1)
    for _ in range(6):
        wide.choice_finished()
    await turns[1]
    assert scheduler.stats() == QueueStats(4, 0)
    wide.release()
    small.release()


def test_the_predicted_wait_follows_the_observed_rate() -> None:
    clock = VirtualClock()
    scheduler = FifoScheduler(lambda: 2, max_queue=1000, clock=clock)
    assert scheduler.predicted_wait_s(1) == 1.0

    tickets = [scheduler.admit(ASKED, cost(), Claim(), never) for _ in range(100)]
    for ticket in tickets:
        scheduler.ask(ticket)
    # Four are with the backend, for two seconds each: two a second come out.
    for first in range(0, 60, 4):
        clock.advance(2.0)
        for ticket in tickets[first : first + 4]:
            ticket.release()
    assert scheduler.stats() == QueueStats(4, 36)
    assert scheduler.predicted_wait_s(4) == pytest.approx(40 / 2)

    # It gets slower, and the estimate follows.
    for ticket in tickets[60:80]:
        clock.advance(4.0)
        ticket.release()
    assert scheduler.predicted_wait_s(1) > 17 * 2 / 2
    for ticket in tickets[80:]:
        ticket.release()


def test_the_predicted_wait_stays_within_reason() -> None:
    clock = VirtualClock()
    scheduler = FifoScheduler(lambda: 1, max_queue=1000, clock=clock)
    ticket = scheduler.admit(ASKED, cost(), Claim(), never)
    scheduler.ask(ticket)
    clock.advance(100_000)
    ticket.release()
    assert scheduler.predicted_wait_s(1) == 60.0


def test_without_a_queue_only_what_runs_is_taken() -> None:
    scheduler = FifoScheduler(lambda: 1, max_queue=0, clock=VirtualClock())
    ticket = scheduler.admit(ASKED, cost(), Claim(), never)
    with pytest.raises(Overloaded):
        scheduler.admit(ASKED, cost(), Claim(), never)
    ticket.release()
    scheduler.admit(ASKED, cost(3), Claim(), never).release()
