"""The bounds that the order promises, for any arrivals, sizes, classes and weights."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.request import PriorityClass
from headrace.scheduling.policy import SchedulingPolicy
from support.heart_plant import Ask, Plant, Served


def plain(**changes: object) -> SchedulingPolicy:
    """Order alone: nobody is refused, every slot is for everybody, no look-ahead."""
    policy = SchedulingPolicy(
        auto_targets=False,
        shed=False,
        express=0.0,
        look_ahead=0,
        revoke_margin_s=-1.0,
        preemption=False,
    )
    for priority_class in PriorityClass:
        own = policy.classes[priority_class]
        policy = policy.with_class(priority_class, replace(own, slots=1.0))
    return replace(policy, **changes)  # type: ignore[arg-type]  # names are checked by replace


def by_key_alone() -> SchedulingPolicy:
    """With head starts that are short beside the waits."""
    policy = plain(late_lane=False, guard_every=0, window_s=math.inf, cost_cap_s=3.0)
    for priority_class in PriorityClass:
        own = policy.classes[priority_class]
        policy = policy.with_class(priority_class, replace(own, slack_s=3.0 * priority_class))
    return policy


ORDER_ONLY = by_key_alone()

classes = st.sampled_from(tuple(PriorityClass))
asks = st.lists(
    st.builds(
        Ask,
        at=st.floats(0, 60, allow_subnormal=False),
        flow=st.sampled_from("abc"),
        priority_class=classes,
        weight=st.just(1.0),
        prompt=st.integers(1, 30_000),
        service_s=st.floats(0.05, 8),
    ),
    min_size=1,
    max_size=40,
)
crowded = st.lists(
    st.builds(
        Ask,
        at=st.integers(0, 40).map(float),
        flow=st.sampled_from("abc"),
        priority_class=classes,
        weight=st.just(1.0),
        prompt=st.integers(1, 30_000),
        service_s=st.integers(2, 8).map(float),
    ),
    min_size=20,
    max_size=40,
)
quick = settings(max_examples=30, deadline=None)


@quick
@given(asks, st.integers(1, 5))
def test_no_slot_idles_while_somebody_waits(asked: list[Ask], capacity: int) -> None:
    def check(plant: Plant) -> None:
        stats = plant.heart.stats()
        assert not stats.waiting or stats.dispatched >= plant.capacity

    Plant(plain(), capacity, on_event=check).run(asked)


@quick
@given(asks, st.integers(1, 12))
def test_one_flow_and_class_alone_may_use_every_slot_by_default(
    asked: list[Ask], capacity: int
) -> None:
    def check(plant: Plant) -> None:
        stats = plant.heart.stats()
        assert not stats.waiting or stats.dispatched >= plant.capacity

    same = [replace(ask, flow="a", priority_class=PriorityClass.STANDARD) for ask in asked]
    Plant(SchedulingPolicy(), capacity, on_event=check).run(same)


@quick
@given(crowded, st.integers(1, 4))
def test_overtaking_is_bounded_by_slack_and_cap(asked: list[Ask], capacity: int) -> None:
    policy = ORDER_ONLY
    for one in Plant(policy, capacity).run(asked):
        slack = policy.classes[one.ask.priority_class].slack_s
        for passed in one.overtaken:
            other = policy.classes[passed.ask.priority_class].slack_s
            latest = passed.ask.at + other + policy.cost_cap_s
            assert one.ask.at + slack <= latest + 1e-6


@quick
@given(crowded, st.integers(1, 4))
def test_within_a_flow_on_time_nothing_passes_one_older_by_the_cap(
    asked: list[Ask], capacity: int
) -> None:
    policy = plain(guard_every=0, late_lane=False, cost_cap_s=3.0)
    for one in Plant(policy, capacity).run(asked):
        for passed in one.overtaken:
            if (passed.ask.flow, passed.ask.priority_class) == (
                one.ask.flow,
                one.ask.priority_class,
            ):
                assert one.ask.at <= passed.ask.at + policy.cost_cap_s + 1e-6


def guarded(seconds: float, **changes: object) -> SchedulingPolicy:
    """With head starts and costs so large that only the guard stands against starvation."""
    policy = plain(kappa=1000.0, cost_cap_s=1e4, **changes)
    for priority_class in PriorityClass:
        own = policy.classes[priority_class]
        changed = replace(own, guard_s=seconds, slack_s=1000.0 * priority_class)
        policy = policy.with_class(priority_class, changed)
    return policy


@quick
@given(crowded, st.integers(1, 3), st.integers(1, 5))
def test_nobody_starves_beyond_the_guard(asked: list[Ask], capacity: int, guard_every: int) -> None:
    guard_s = 10.0
    plant = Plant(guarded(guard_s, guard_every=guard_every), capacity)
    served = plant.run(asked)
    for one in served:
        assert one.turn_at is not None
        due = one.ask.at + guard_s
        if one.turn_at <= due:
            continue
        between = [o for o in plant.order if o.turn_at is not None and due < o.turn_at]
        turns = between.index(one)
        older = sum(
            o.ask.at <= one.ask.at and o.turn_at is not None and o.turn_at > due for o in served
        )
        assert turns <= guard_every * older


def test_the_guard_breaks_into_an_endless_stream_of_the_more_urgent() -> None:
    stream = [Ask(float(at), "stream", PriorityClass.SYSTEM) for at in range(120)]
    lone = Ask(0.5, "lone", PriorityClass.BATCH, prompt=20_000)

    def wait(guard_every: int) -> float:
        served = Plant(guarded(10.0, guard_every=guard_every), 1).run([*stream, lone])
        return waits(served, "lone")[0]

    assert wait(4) <= 10.0 + 4 + 1
    assert wait(0) > 100.0


@quick
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 30_000), st.floats(0.05, 2)),
        min_size=30,
        max_size=90,
    ),
    st.tuples(*[st.sampled_from([0.5, 1.0, 4.0])] * 3),
    st.integers(1, 4),
    st.floats(0.0, 4.0),
)
def test_flows_that_wait_are_served_by_weight_within_the_window(
    sizes: list[tuple[str, int, float]],
    weights: tuple[float, float, float],
    capacity: int,
    window_s: float,
) -> None:
    weight = dict(zip("abc", weights, strict=True))
    asked = [
        Ask(0.0, flow, PriorityClass.BATCH, weight[flow], prompt, service)
        for flow, prompt, service in sizes
    ]
    plant = Plant(plain(guard_every=0, late_lane=False, window_s=window_s), capacity)
    served = plant.run(asked)
    largest = max(one.entry.work for one in served if one.entry is not None) / min(weights)
    left = dict.fromkeys("abc", 0)
    for one in served:
        left[one.ask.flow] += 1
    taken = dict.fromkeys("abc", 0.0)
    for one in plant.order:
        assert one.entry is not None
        taken[one.ask.flow] += one.entry.work / one.ask.weight
        left[one.ask.flow] -= 1
        waiting = [taken[flow] for flow in "abc" if left[flow]]
        if waiting:
            # All came at once, so the first few had their turn before the others were there.
            start = capacity * largest
            assert max(waiting) - min(waiting) <= window_s + largest + start + 1e-6


def test_idle_time_earns_no_credit() -> None:
    """A flow that comes back after a while shares from then on, and does not catch up."""
    before = Ask(0.0, "back", PriorityClass.BATCH, prompt=10)
    busy = [Ask(0.0, "busy", PriorityClass.BATCH, prompt=1000) for _ in range(60)]
    back = [Ask(30.0, "back", PriorityClass.BATCH, prompt=1000) for _ in range(60)]
    plant = Plant(plain(window_s=0.0, guard_every=0, late_lane=False), 1)
    plant.run([before, *busy, *back])
    after = [one.ask.flow for one in plant.order if one.turn_at and one.turn_at > 31][:20]
    assert 9 <= after.count("back") <= 11


@quick
@given(asks, st.integers(1, 4), st.data())
def test_a_more_urgent_class_never_waits_longer(
    asked: list[Ask], capacity: int, data: st.DataObject
) -> None:
    asked = [replace(ask, flow="a") for ask in sorted(asked, key=lambda ask: ask.at)]
    index = data.draw(st.integers(0, len(asked) - 1))
    chosen = asked[index]
    if chosen.priority_class is PriorityClass.SYSTEM:
        return
    raised = [*asked]
    raised[index] = replace(chosen, priority_class=PriorityClass(chosen.priority_class - 1))

    def wait(asks: list[Ask]) -> float:
        return Plant(ORDER_ONLY, capacity).run(asks)[index].wait

    assert wait(raised) <= wait(asked) + 1e-9


def waits(served: list[Served], flow: str) -> list[float]:
    return sorted(one.wait for one in served if one.ask.flow == flow and one.turn_at is not None)


@quick
@given(
    st.lists(st.floats(0.5, 3.0), min_size=10, max_size=20),
    st.floats(0.2, 1.0),
    st.integers(8, 32),
    st.integers(1, 4000),
)
def test_a_flood_leaves_others_a_slot_within_reach(
    pauses: list[float], service_s: float, capacity: int, flood_prompt: int
) -> None:
    """A client that was there before and sends one request at a time does not wait for a flood,
    whatever it consists of."""
    at = 0.0
    calm = []
    for pause in pauses:
        at += pause + service_s
        calm.append(Ask(at, "calm", prompt=200, service_s=service_s))
    flood = [
        Ask(calm[0].at + i * 0.001, "flood", prompt=flood_prompt, service_s=2.0 + (i % 7))
        for i in range(capacity * 8)
    ]
    policy = SchedulingPolicy(shed=False, auto_targets=False)
    alone = waits(Plant(policy, capacity).run(calm), "calm")
    beside = waits(Plant(policy, capacity).run([*calm, *flood]), "calm")
    assert len(beside) == len(alone)
    assert max(alone) < 1e-9
    assert max(beside) < 1e-9
