"""Whose turn it is in single situations; the bounds are in test_order_properties."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.request import PriorityClass
from headrace.scheduling import Claim, Cost, Revoked, SchedulingPolicy, StepSample
from headrace.scheduling.entry import Entry, Lane, State
from headrace.scheduling.heart import Heart
from support.backend import request
from support.heart_plant import ANSWER, FixedSpeed, heart_of

SYSTEM, INTERACTIVE, STANDARD, BATCH = PriorityClass
POLICY = SchedulingPolicy(auto_targets=False, shed=False)


class Front:
    """Requests in the order they came, and what became of them."""

    def __init__(self, policy: SchedulingPolicy = POLICY, capacity: int = 2) -> None:
        self.clock = VirtualClock()
        self.capacity = capacity
        self.turns: list[Entry] = []
        self.revoked: list[Entry] = []
        self.preempted: list[Entry] = []
        self.heart: Heart = heart_of(
            policy,
            self.clock,
            lambda: self.capacity,
            FixedSpeed(),
            preempt=self.preempted.append,
        )

    def come(
        self,
        priority_class: PriorityClass = STANDARD,
        flow: str = "a",
        prompt: int = 100,
        choices: int = 1,
    ) -> Entry:
        cost = Cost(choices, prompt, None, exact=True)
        known: list[Entry] = []

        def interrupt(error: Exception) -> None:
            assert isinstance(error, Revoked)
            self.revoked.append(known[0])

        entry = self.heart.admit(
            request(),
            cost,
            Claim(flow, priority_class=priority_class),
            interrupt,
            lambda: self.turns.append(known[0]),
        )
        known.append(entry)
        self.heart.ask(entry, cost)
        return entry

    def run(self, entry: Entry, tokens: int = 1) -> None:
        self.heart.started(entry)
        self.heart.generated(entry, tokens)

    def waits(self, entry: Entry) -> bool:
        return entry.state is State.WAITING


def test_urgency_goes_first_then_age_then_the_smaller() -> None:
    front = Front(replace(POLICY, look_ahead=0, revoke_margin_s=-1.0), capacity=1)
    first = front.come()
    batch = front.come(BATCH)
    large = front.come(prompt=20_000)
    small = front.come(prompt=10)
    system = front.come(SYSTEM)
    for entry in (first, system, small, large, batch):
        assert front.turns[-1] is entry
        front.heart.release(entry)


def test_a_turn_is_taken_back_from_one_not_begun_for_one_clearly_more_urgent() -> None:
    front = Front(capacity=1)
    running, ahead, also_ahead = (front.come(BATCH) for _ in range(3))
    front.run(running)
    urgent = front.come(SYSTEM)
    assert front.revoked == [also_ahead]
    flow = front.heart.books.queues[BATCH].flows["a"]
    assert flow.virtual == pytest.approx(running.work + ahead.work), "its charge is given back"
    assert not front.waits(urgent)
    assert also_ahead.state is State.ADMITTED
    front.heart.ask(also_ahead, also_ahead.cost)
    assert front.waits(also_ahead)
    later = front.come(BATCH)
    for entry in (running, urgent, ahead):
        front.heart.release(entry)
    assert front.turns[-1] is also_ahead, "at its old place"
    assert front.waits(later)


def test_a_turn_is_not_taken_back_from_what_has_begun_or_for_nearly_equals() -> None:
    front = Front(capacity=1)
    begun = [front.come(BATCH) for _ in range(3)]
    for entry in begun:
        front.run(entry)
    assert front.waits(front.come(SYSTEM))
    front = Front(capacity=1)
    for _ in range(3):
        front.come(STANDARD, prompt=300)
    assert front.waits(front.come(STANDARD, prompt=100))
    assert front.revoked == []


def test_the_backend_is_asked_to_preempt_only_when_a_target_would_be_missed() -> None:
    front = Front(replace(POLICY, look_ahead=0), capacity=2)
    older, younger = front.come(BATCH), front.come(BATCH)
    front.run(older, 50)
    front.run(younger, 20)
    urgent = front.come(SYSTEM)
    step = StepSample(0.1, 0, 2)
    front.heart.observe_step(step)
    assert front.preempted == [], "half of its target is left"
    front.clock.advance(0.6)
    front.heart.observe_step(step)
    assert front.preempted == [younger], "which loses least"
    assert not front.waits(urgent)
    assert front.heart.stats().dispatched == 3
    assert front.heart.books.slots.occupied == 2
    front.heart.release(older)
    assert front.heart.books.slots.occupied == 2, "the preempted one goes on"
    front.heart.release(younger)
    assert front.heart.books.slots.occupied == front.heart.stats().dispatched == 1


def test_a_preempted_request_that_leaves_is_in_nobodys_way() -> None:
    front = Front(replace(POLICY, look_ahead=0), capacity=1)
    victim = front.come(BATCH)
    front.run(victim, 10)
    urgent = front.come(SYSTEM)
    front.clock.advance(0.7)
    front.heart.observe_step(StepSample(0.1, 0, 1))
    assert front.preempted == [victim]
    front.heart.release(victim)
    assert front.heart.books.slots.occupied == front.heart.stats().dispatched == 1
    front.heart.release(urgent)
    assert front.heart.books.slots.occupied == 0


@pytest.mark.parametrize("reason", ["nearly done", "preempted twice", "none"])
def test_some_are_not_preempted(reason: str) -> None:
    front = Front(replace(POLICY, look_ahead=0), capacity=1)
    victim = front.come(BATCH)
    front.run(victim, 10)
    if reason == "nearly done":
        front.heart.generated(victim, ANSWER - 40)
    elif reason == "preempted twice":
        victim.preemptions = 2
    front.come(SYSTEM)
    front.clock.advance(0.7)
    front.heart.observe_step(StepSample(0.1, 0, 2))
    assert (front.preempted == [victim]) is (reason == "none")


def test_equals_are_not_preempted_for_each_other() -> None:
    front = Front(replace(POLICY, look_ahead=0), capacity=1)
    front.run(front.come(INTERACTIVE), 10)
    front.come(INTERACTIVE)
    front.clock.advance(1.5)
    front.heart.observe_step(StepSample(0.1, 0, 1))
    assert front.preempted == []


def test_slots_are_kept_for_more_urgent_classes_seen_lately() -> None:
    front = Front(capacity=8)
    front.heart.release(front.come(SYSTEM))
    batch = [front.come(BATCH) for _ in range(9)]
    assert sum(not front.waits(entry) for entry in batch) == 6
    front.clock.advance(100)
    front.heart.capacity_changed()
    assert sum(not front.waits(entry) for entry in batch) == 9


def test_a_class_beside_a_busy_more_urgent_one_gets_its_floor_once_it_has_waited() -> None:
    front = Front(capacity=8)
    busy = [front.come(INTERACTIVE) for _ in range(8)]
    batch = front.come(BATCH)
    for entry in busy[:2]:
        front.heart.release(entry)
        front.come(INTERACTIVE)
    assert front.waits(batch)
    front.clock.advance(POLICY.classes[BATCH].slack_s)
    front.heart.release(busy[2])
    front.heart.release(busy[3])
    assert not front.waits(batch)


def test_who_cannot_be_in_time_waits_behind_who_can_but_keeps_a_share() -> None:
    policy = replace(POLICY, look_ahead=0, late_share=0.5, kappa=0.0, guard_every=0)
    front = Front(policy, capacity=1)
    running = front.come()
    late = [front.come() for _ in range(3)]
    front.clock.advance(POLICY.classes[STANDARD].ttft_s + 1)
    fresh = [front.come() for _ in range(6)]
    order = []
    for _ in range(9):
        front.heart.release(running)
        running = front.turns[-1]
        order.append("late" if running in late else "fresh")
    assert order == ["fresh", "fresh", "late", "fresh", "fresh", "late", "fresh", "fresh", "late"]
    assert all(entry.lane is Lane.LATE for entry in late)
    assert all(entry.lane is Lane.ON_TIME for entry in fresh)


def test_a_wide_request_is_not_passed_by_its_equals_and_runs_alone_if_it_must() -> None:
    front = Front(replace(POLICY, revoke_margin_s=-1.0, late_lane=False), capacity=2)
    first = front.come()
    wide = front.come(choices=9)
    front.clock.advance(20)
    small = front.come()
    urgent = front.come(INTERACTIVE)
    assert front.waits(wide)
    assert front.waits(small)
    assert not front.waits(urgent), "a more urgent class may pass"
    front.heart.release(urgent)
    front.heart.release(first)
    assert front.turns[-1] is wide
    for _ in range(8):
        assert front.waits(small)
        front.heart.choice_finished(wide)
    assert not front.waits(small)


def test_prompts_are_handed_over_just_ahead_of_their_computation() -> None:
    front = Front(capacity=64)
    front.heart.books.speed.reports_steps = True
    long = [front.come(prompt=20_000) for _ in range(5)]
    assert [not front.waits(entry) for entry in long] == [True, True, False, False, False]
    short, system = front.come(prompt=50), front.come(SYSTEM, prompt=20_000)
    assert not front.waits(short), "it is computed before the long ones"
    assert not front.waits(system)
    for entry in (system, short, long[0]):
        assert front.waits(long[2])
        front.run(entry)
    assert not front.waits(long[2])
    assert front.waits(long[3])


def test_a_new_policy_holds_from_now_on_and_keeps_places() -> None:
    front = Front(replace(POLICY, look_ahead=0), capacity=1)
    running = front.come()
    first, second = front.come(prompt=5000), front.come(prompt=10)
    front.heart.configure(replace(POLICY, look_ahead=0, kappa=0.0))
    front.heart.release(running)
    assert front.turns[-1] is second, "the key it came with"
    third = front.come(prompt=1)
    front.heart.release(second)
    assert front.turns[-1] is third, "with no weight on size its key is its arrival"
    assert front.waits(first)


def test_what_was_predicted_too_high_is_given_back() -> None:
    front = Front()
    entry = front.come(prompt=1000)
    flow = front.heart.books.queues[STANDARD].flows["a"]
    charged = flow.virtual
    assert charged == pytest.approx(entry.work)
    front.run(entry, 10)
    front.heart.choice_finished(entry)
    assert flow.virtual == pytest.approx(front.heart.books.speed.work(1000, 10))
    cancelled = front.come(prompt=1000)
    before = flow.virtual - cancelled.work
    front.heart.release(cancelled)
    assert flow.virtual == pytest.approx(before)


def test_flows_that_are_gone_are_forgotten() -> None:
    front = Front(capacity=1)
    for number in range(2000):
        front.heart.release(front.come(flow=f"flow{number}"))
    assert len(front.heart.books.queues[STANDARD].flows) < 600


def flooded(policy: SchedulingPolicy, capacity: int = 16) -> tuple[Front, list[Entry]]:
    """`steady` has filled six slots, then `flood` has taken whatever it gets and wants more."""
    front = Front(policy, capacity)
    own = [front.come(flow="steady", prompt=10) for _ in range(6)]
    for _ in range(3 * capacity):
        front.come(flow="flood", prompt=10)
    for entry in front.turns:
        front.run(entry)
    front.clock.advance(10 * policy.reach_s)
    return front, own


SHARED = replace(
    POLICY, look_ahead=0, revoke_margin_s=-1.0, partials=1000, guard_every=0, memory_s=1e6
)


def test_a_flow_finds_the_slots_free_that_it_left_a_moment_ago() -> None:
    front, own = flooded(SHARED)
    for entry in own:
        front.heart.release(entry)
    front.clock.advance(0.1)
    again = [front.come(flow="steady", prompt=10) for _ in range(6)]
    assert not any(front.waits(entry) for entry in again)


def test_what_a_flow_does_not_come_back_for_is_given_away() -> None:
    front, own = flooded(SHARED)
    before = len(front.turns)
    for entry in own:
        front.heart.release(entry)
    at_once = len(front.turns) - before
    front.clock.advance(5 * SHARED.reach_s)
    front.heart.capacity_changed()
    assert at_once < 6
    assert front.heart.books.slots.total == 15, (
        "all but one, which is kept for anybody below its share"
    )


def test_no_more_is_kept_than_the_weighted_share() -> None:
    front = Front(SHARED, 16)
    own = [front.come(flow="steady", prompt=10) for _ in range(16)]
    for _ in range(16):
        front.come(flow="flood", prompt=10)
    front.clock.advance(10 * SHARED.reach_s)
    for entry in own:
        front.heart.release(entry)
    flood = [entry for entry in front.turns if entry.flow == "flood"]
    assert len(flood) == 8


def test_who_fills_less_than_its_share_goes_before_the_older_requests_of_who_fills_more() -> None:
    front, own = flooded(replace(SHARED, reach_s=0.0), capacity=8)
    front.clock.advance(1.0)
    late = front.come(flow="third", prompt=10)
    front.heart.release(own[0])
    assert front.turns[-1] is late


def test_prompts_are_handed_over_in_order_where_the_backend_computes_them_so() -> None:
    for shortest_first in (True, False):
        policy = replace(POLICY, partials=1, prefill_ahead_s=0.1, shortest_first=shortest_first)
        front = Front(policy, capacity=8)
        front.heart.books.speed.reports_steps = True
        front.come(prompt=20_000)
        short = front.come(prompt=10)
        assert front.waits(short) is not shortest_first
