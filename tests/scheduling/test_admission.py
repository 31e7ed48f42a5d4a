"""Who is refused: nobody without need, by fair rules, with a time to come back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.clock import VirtualClock
from headrace.core.errors import DeadlineExceeded, HeadraceError, Overloaded
from headrace.core.request import PriorityClass
from headrace.scheduling import Claim, Cost, SchedulingPolicy
from headrace.scheduling.admission import retry_after_s
from headrace.scheduling.entry import Entry, State
from headrace.scheduling.speed import BackendSpeed
from support.backend import request
from support.heart_plant import FixedSpeed, heart_of

INTERACTIVE, STANDARD, BATCH = (
    PriorityClass.INTERACTIVE,
    PriorityClass.STANDARD,
    PriorityClass.BATCH,
)
ABSOLUTE = SchedulingPolicy(auto_targets=False, size_bias=0.0, share_bias=0.0)


@dataclass
class Front:
    """Requests that all wait behind one that runs."""

    policy: SchedulingPolicy = ABSOLUTE
    speed: BackendSpeed = field(default_factory=lambda: FixedSpeed(residence_s=0.001))
    clock: VirtualClock = field(default_factory=VirtualClock)
    refused: list[tuple[str, HeadraceError]] = field(default_factory=list)

    capacity: int = 1

    def __post_init__(self) -> None:
        self.heart = heart_of(self.policy, self.clock, lambda: self.capacity, self.speed)

    def come(
        self,
        flow: str = "a",
        prompt: int = 100,
        priority_class: PriorityClass = STANDARD,
        weight: float = 1.0,
        deadline: float | None = None,
    ) -> Entry:
        claim = Claim(flow, weight, priority_class, deadline)
        cost = Cost(1, prompt, 100, exact=True)

        def interrupt(error: Exception) -> None:
            assert isinstance(error, HeadraceError)
            self.refused.append((flow, error))

        entry = self.heart.admit(request(), cost, claim, interrupt, lambda: None)
        self.heart.ask(entry, cost)
        return entry

    def fill(self) -> None:
        """With as much as runs and is handed over ahead."""
        while True:
            if self.come().state is State.WAITING:
                return


def test_what_would_wait_beyond_the_target_is_refused_with_a_time_to_come_back() -> None:
    front = Front()
    front.fill()
    for _ in range(4):
        front.come(prompt=10_000)  # a second each
    with pytest.raises(Overloaded) as refusal:
        front.come(prompt=10_000)
    error = refusal.value
    assert (error.status, error.reason, error.code) == (503, "predicted_wait", "overloaded")
    assert error.queue_position is not None
    assert error.queue_position >= 4
    assert error.retry_after_s is not None
    assert 1.0 <= error.retry_after_s <= 60.0
    assert front.refused == []


def test_a_request_alone_is_taken_whatever_its_size() -> None:
    assert Front().come(prompt=10_000_000).state is State.DISPATCHED


def test_nobody_is_refused_by_prediction_before_the_machine_is_known() -> None:
    front = Front(speed=FixedSpeed(prefill_rate=None))
    for _ in range(300):
        front.come(prompt=50_000)
    assert front.heart.stats().waiting == 297


def test_less_urgent_work_does_not_count_against_more_urgent() -> None:
    front = Front()
    front.fill()
    for _ in range(50):
        front.come("batch", 10_000, BATCH)
    front.come("chat", 12_000, INTERACTIVE)
    assert front.refused == []
    with pytest.raises(Overloaded):
        front.come("chat", 12_000, INTERACTIVE)


def test_the_flow_with_most_queued_work_is_pushed_out_not_the_newcomer() -> None:
    front = Front()
    front.fill()
    flood = []
    for _ in range(7):
        front.clock.advance(0.001)
        flood.append(front.come("flood", 6_000))
    front.come("small", 9_000)
    assert [flow for flow, _ in front.refused] == ["flood"]
    assert flood[-1].state is State.GONE
    error = front.refused[0][1]
    assert isinstance(error, Overloaded)
    assert error.reason == "predicted_wait"
    with pytest.raises(Overloaded):
        front.come("flood", 6_000)
    assert len(front.refused) == 1


def test_weights_count_in_who_is_pushed_out() -> None:
    front = Front()
    front.fill()
    for _ in range(3):
        front.come("light", 6_000, weight=1.0)
    for _ in range(4):
        front.come("heavy", 6_000, weight=10.0)
    front.come("heavy", 9_000, weight=10.0)
    assert {flow for flow, _ in front.refused} == {"light"}


def test_without_push_out_the_newcomer_is_refused() -> None:
    front = Front(replace(ABSOLUTE, push_out=False))
    front.fill()
    for _ in range(7):
        front.come("flood", 6_000)
    with pytest.raises(Overloaded):
        front.come("small", 9_000)
    assert front.refused == []


@pytest.mark.parametrize(("bias", "refused"), [(0.0, False), (1.0, True)])
def test_the_larger_are_refused_first(bias: float, refused: bool) -> None:
    front = Front()
    front.fill()
    for _ in range(3):
        front.come("others", 8_000)
    front.heart.configure(replace(ABSOLUTE, size_bias=bias))
    front.come("small", 100)
    if refused:
        with pytest.raises(Overloaded):
            front.come("large", 25_000)
    else:
        front.come("large", 25_000)
    assert front.refused == [], "others do not make room for what is too much for one"


@pytest.mark.parametrize(("bias", "refused"), [(0.0, False), (1.0, True)])
def test_who_takes_most_is_refused_first(bias: float, refused: bool) -> None:
    policy = replace(ABSOLUTE, share_bias=bias, express=0.0, look_ahead=0)
    front = Front(policy, capacity=10)
    front.come("light")
    for _ in range(9):
        front.come("taker")
    for _ in range(3):
        front.come("queued", 9_000)
    front.come("light", 9_000)
    if refused:
        with pytest.raises(Overloaded):
            front.come("taker", 9_000)
    else:
        front.come("taker", 9_000)
    assert front.refused == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(tuple(PriorityClass))),
        min_size=10,
        max_size=40,
    ),
    st.integers(0, 8),
)
def test_at_the_hard_limit_no_class_is_refused_while_a_less_urgent_one_waits(
    coming: list[tuple[str, PriorityClass]], max_queue: int
) -> None:
    policy = replace(ABSOLUTE, max_queue=max_queue, shed=False, revoke_margin_s=-1.0)
    front = Front(policy)
    waiting: list[Entry] = []
    for flow, priority_class in coming:
        try:
            waiting.append(front.come(flow, 100, priority_class))
            refused = [e.priority_class for e in waiting if e.state is State.GONE]
        except Overloaded:
            refused = [priority_class]
        waiting = [e for e in waiting if e.state is State.WAITING]
        for victim in refused:
            assert all(e.priority_class <= victim for e in waiting)
        stats = front.heart.stats()
        assert stats.dispatched + stats.waiting <= 1 + max_queue


def test_the_queue_is_bounded_in_choices_and_in_prompt_tokens() -> None:
    front = Front(replace(ABSOLUTE, shed=False, max_queue=3))
    for _ in range(4):
        front.come()
    with pytest.raises(Overloaded) as refusal:
        front.come()
    assert refusal.value.reason == "queue_full"
    front = Front(replace(ABSOLUTE, shed=False, max_queued_tokens=5_000))
    front.fill()
    front.come(prompt=4_000)
    with pytest.raises(Overloaded):
        front.come(prompt=4_000)


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    front = Front()
    front.fill()
    for _ in range(4):
        front.come(prompt=10_000)
    with pytest.raises(DeadlineExceeded) as refusal:
        front.come(deadline=3.0)
    assert (refusal.value.status, refusal.value.reason) == (504, "deadline")
    assert front.come(deadline=6.0).state is State.WAITING
    with pytest.raises(DeadlineExceeded, match="has passed"):
        front.come(deadline=-1.0)


def test_a_deadline_ends_what_waits_when_it_cannot_be_met_any_more() -> None:
    front = Front()
    front.fill()
    entry = front.come(prompt=10_000, deadline=5.0)  # needs a second
    timer = front.heart.next_timer()
    assert timer == pytest.approx(4.0)
    front.clock.advance(3.9)
    front.heart.expire(3.9)
    assert front.refused == []
    front.clock.advance(0.2)
    front.heart.expire(4.1)
    assert entry.state is State.GONE
    ((_, error),) = front.refused
    assert isinstance(error, DeadlineExceeded)
    assert front.heart.next_timer() is None


def test_a_deadline_ends_what_runs_and_not_before() -> None:
    front = Front()
    entry = front.come(deadline=5.0)
    front.heart.started(entry)
    front.heart.generated(entry, 3)
    front.heart.expire(4.99)
    assert front.refused == []
    front.heart.expire(5.0)
    assert [type(error) for _, error in front.refused] == [DeadlineExceeded]
    assert entry.state is State.RUNNING, "whoever holds it must still release it"
    front.heart.release(entry)
    assert front.heart.stats().dispatched == 0


@given(st.floats(0, 1e6), st.floats(0.1, 100), st.integers())
def test_retry_after_follows_the_predicted_drain_with_jitter(
    wait: float, target: float, seed: int
) -> None:
    seconds = retry_after_s(ABSOLUTE, wait, target, random.Random(seed))
    excess = min(max(wait - target, 1.0), 60.0)
    assert 1.0 <= seconds <= 60.0
    assert 0.8 * excess - 1e-9 <= seconds <= max(1.2 * excess, 1.0) + 1e-9


def test_those_refused_together_come_back_apart() -> None:
    rng = random.Random(1)
    assert len({retry_after_s(ABSOLUTE, 25.0, 5.0, rng) for _ in range(20)}) == 20
