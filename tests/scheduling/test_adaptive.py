"""The tickets: the heart's decisions as waits that end, whatever the event loop does meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.errors import DeadlineExceeded, Overloaded
from headrace.core.request import PriorityClass
from headrace.gateway.lifeline import Lifeline
from headrace.scheduling import (
    AdaptiveScheduler,
    Claim,
    Cost,
    QueueStats,
    Revoked,
    Scheduler,
    SchedulingPolicy,
    StepSample,
)
from headrace.scheduling.scheduler import AdaptiveTicket
from support.backend import request

pytestmark = pytest.mark.anyio

SYSTEM, INTERACTIVE, STANDARD, BATCH = PriorityClass
COST = Cost(1, 100, 100, exact=True)
POLICY = replace(SchedulingPolicy(), auto_targets=False, look_ahead=0)


@dataclass
class Alarm:
    """Stands in for the loop's timers."""

    at: float
    ring: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


def ignore(error: Exception) -> None:
    del error


class Bench:
    def __init__(self, policy: SchedulingPolicy = POLICY, capacity: int = 1) -> None:
        self.clock = VirtualClock()
        self.alarms: list[Alarm] = []
        self.capacity = capacity
        self.preempted: list[str] = []
        self.scheduler = AdaptiveScheduler(
            policy,
            lambda: self.capacity,
            clock=self.clock,
            rng=random.Random(1),
            preempt=self.preempted.append,
            later=self._later,
        )

    def _later(self, delay: float, ring: Callable[[], None]) -> Alarm:
        alarm = Alarm(self.clock.monotonic() + delay, ring)
        self.alarms.append(alarm)
        return alarm

    def go_to(self, at: float) -> None:
        """Time passes, with its alarms."""
        while due := [a for a in self.alarms if not a.cancelled and a.at <= at]:
            alarm = min(due, key=lambda a: a.at)
            self.alarms.remove(alarm)
            self.clock.advance(max(0.0, alarm.at - self.clock.monotonic()))
            alarm.ring()
        self.clock.advance(max(0.0, at - self.clock.monotonic()))

    @property
    def pending(self) -> list[Alarm]:
        return [alarm for alarm in self.alarms if not alarm.cancelled]


class Client:
    """One request's wait for its turn, as the gateway does it."""

    def __init__(
        self,
        bench: Bench,
        priority_class: PriorityClass = STANDARD,
        deadline: float | None = None,
        flow: str = "a",
    ) -> None:
        self.life = Lifeline()
        claim = Claim(flow, priority_class=priority_class, deadline=deadline)
        self.ticket: AdaptiveTicket = bench.scheduler.admit(
            request(), COST, claim, self.life.interrupt
        )
        self.turns = 0
        self.task = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        try:
            await self.life.wait(lambda: self.ticket.turn(COST))
            self.turns += 1
        except BaseException:
            self.ticket.release()
            raise


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_is_a_scheduler() -> None:
    scheduler: Scheduler = Bench().scheduler
    assert scheduler.stats() == QueueStats(0, 0)


async def test_turns_come_as_room_does_and_most_urgent_first() -> None:
    bench = Bench()
    first, batch, chat = Client(bench), Client(bench, BATCH), Client(bench, INTERACTIVE)
    await settle()
    assert [c.turns for c in (first, batch, chat)] == [1, 0, 0]
    assert bench.scheduler.stats() == QueueStats(1, 2)
    first.ticket.started()
    first.ticket.generated(3)
    first.ticket.choice_finished()
    await settle()
    assert [c.turns for c in (batch, chat)] == [0, 1]
    first.ticket.release()
    chat.ticket.release()
    await batch.task
    batch.ticket.release()
    assert bench.scheduler.stats() == QueueStats(0, 0)


async def test_a_second_turn_of_the_same_ticket_is_the_first() -> None:
    bench = Bench()
    client = Client(bench)
    await client.task
    await client.ticket.turn(COST)
    assert bench.scheduler.stats() == QueueStats(1, 0)
    client.ticket.release()


async def test_a_client_that_leaves_the_queue_is_gone_at_once() -> None:
    bench = Bench()
    first, leaver, last = Client(bench), Client(bench), Client(bench)
    await settle()
    leaver.task.cancel()
    await settle()
    assert bench.scheduler.stats() == QueueStats(1, 1)
    first.ticket.release()
    await last.task
    assert leaver.turns == 0
    last.ticket.release()


async def test_a_turn_given_in_the_moment_of_leaving_passes_to_the_next() -> None:
    bench = Bench()
    first, leaver, last = Client(bench), Client(bench), Client(bench)
    await settle()
    first.ticket.release()
    leaver.task.cancel()
    await last.task
    assert leaver.task.cancelled()
    last.ticket.release()
    assert bench.scheduler.stats() == QueueStats(0, 0)


async def test_more_room_is_used_when_told() -> None:
    bench = Bench()
    clients = [Client(bench) for _ in range(3)]
    await settle()
    bench.capacity = 3
    bench.scheduler.capacity_changed()
    await asyncio.gather(*(client.task for client in clients))
    for client in clients:
        client.ticket.release()


async def test_who_is_pushed_out_learns_it_while_waiting() -> None:
    bench = Bench(replace(POLICY, max_queue=2))
    running = Client(bench)
    flood = [Client(bench, flow="flood") for _ in range(2)]
    await settle()
    other = Client(bench, flow="other")
    await settle()
    assert isinstance(flood[1].task.exception(), Overloaded)
    assert bench.scheduler.stats() == QueueStats(1, 2)
    with pytest.raises(Overloaded):
        Client(bench, flow="flood")
    for client in (running, flood[0], other):
        client.ticket.release()
    await asyncio.gather(flood[0].task, other.task)


async def test_a_revoked_turn_is_waited_for_again_at_its_place() -> None:
    bench = Bench(replace(POLICY, look_ahead=1))
    running, ahead = Client(bench, BATCH), Client(bench, BATCH)
    await settle()
    running.ticket.started()
    serving = asyncio.create_task(ahead.life.wait(asyncio.Event().wait))
    await settle()
    urgent = Client(bench, SYSTEM)
    await urgent.task
    with pytest.raises(Revoked):
        await serving
    again = asyncio.create_task(ahead.ticket.turn(COST))
    await settle()
    assert not again.done()
    running.ticket.release()
    urgent.ticket.release()
    await again
    ahead.ticket.release()
    assert bench.scheduler.stats() == QueueStats(0, 0)


async def test_deadlines_ring_in_the_queue_and_while_running() -> None:
    bench = Bench()
    running = Client(bench, deadline=9.0)
    waiting = Client(bench, deadline=5.0)
    await settle()
    running.ticket.started()
    serving = asyncio.create_task(running.life.wait(asyncio.Event().wait))
    await settle()
    bench.go_to(4.9)
    await settle()
    assert not waiting.task.done()
    bench.go_to(5.0)
    await settle()
    assert isinstance(waiting.task.exception(), DeadlineExceeded)
    assert not serving.done()
    bench.go_to(9.0)
    with pytest.raises(DeadlineExceeded):
        await serving
    running.ticket.release()
    assert bench.pending == []
    assert bench.scheduler.stats() == QueueStats(0, 0)


async def test_no_alarm_stays_for_who_is_done() -> None:
    bench = Bench()
    client = Client(bench, deadline=100.0)
    await client.task
    assert len(bench.pending) == 1
    client.ticket.release()
    assert bench.pending == []


async def test_the_real_loop_keeps_deadlines_too() -> None:
    clock = VirtualClock()
    scheduler = AdaptiveScheduler(POLICY, lambda: 1, clock=clock, rng=random.Random(1))
    life = Lifeline()
    ticket = scheduler.admit(request(), COST, Claim(deadline=0.0005), life.interrupt)
    await ticket.turn(COST)
    clock.advance(1.0)
    with pytest.raises(DeadlineExceeded):
        await life.wait(asyncio.Event().wait)
    ticket.release()


async def test_the_backend_preempts_by_request() -> None:
    bench = Bench()
    running = Client(bench, BATCH)
    await settle()
    running.ticket.started()
    running.ticket.generated(1)
    urgent = Client(bench, SYSTEM)
    await settle()
    bench.clock.advance(0.9)
    bench.scheduler.observe_step(StepSample(0.1, 0, 1))
    await urgent.task
    assert bench.preempted == ["req-1"]
    for client in (urgent, running):
        client.ticket.release()
    assert bench.scheduler.stats() == QueueStats(0, 0)


async def test_a_new_policy_is_in_force_at_once() -> None:
    bench = Bench()
    first, second = Client(bench), Client(bench)
    await settle()
    assert not second.task.done()
    bench.scheduler.configure(replace(POLICY, look_ahead=1))
    assert bench.scheduler.policy.look_ahead == 1
    await second.task
    first.ticket.release()
    second.ticket.release()


async def test_the_snapshot_shows_classes_and_flows() -> None:
    bench = Bench()
    running = Client(bench, flow="b")
    waiting = [Client(bench, BATCH, flow="b"), Client(bench, BATCH, flow="c")]
    await settle()
    bench.clock.advance(2.0)
    waiting.append(Client(bench, BATCH, flow="c"))
    await settle()
    rows = {row.priority_class: row for row in bench.scheduler.snapshot()}
    assert list(rows) == list(PriorityClass)
    batch = rows[BATCH]
    assert (batch.depth, batch.running, batch.tokens) == (3, 0, 300)
    assert batch.oldest_wait_s == 2.0
    assert batch.predicted_wait_s is None
    assert batch.target_s == POLICY.classes[BATCH].ttft_s
    assert [(f.flow, f.depth, f.tokens, f.running) for f in batch.flows] == [
        ("b", 1, 100, 0),
        ("c", 2, 200, 0),
    ]
    assert [f.oldest_wait_s for f in batch.flows] == [2.0, 2.0]
    (flow,) = rows[STANDARD].flows
    assert (flow.flow, flow.depth, flow.running, flow.oldest_wait_s) == ("b", 0, 1, 0.0)
    assert flow.virtual_s > 0
    for client in (running, *waiting):
        client.ticket.release()
        await settle()
    assert all(row.flows == () for row in bench.scheduler.snapshot())


async def test_it_counts_what_it_does() -> None:
    ticks = iter(range(1000))
    clock = VirtualClock()
    scheduler = AdaptiveScheduler(
        replace(POLICY, max_queue=0),
        lambda: 1,
        clock=clock,
        rng=random.Random(1),
        timer=lambda: float(next(ticks)),
    )
    ticket = scheduler.admit(request(), COST, Claim("a"), ignore)
    await ticket.turn(COST)
    with pytest.raises(Overloaded):
        scheduler.admit(request(), COST, Claim("b", priority_class=BATCH), ignore)
    counters = scheduler.counters
    assert counters.admitted == [0, 0, 1, 0]
    assert counters.turns == [0, 0, 1, 0]
    assert counters.sheds == {("queue_full", BATCH): 1}
    assert counters.decisions == counters.decision_seconds == 1
    assert scheduler.jain() == 1.0
    ticket.release()
