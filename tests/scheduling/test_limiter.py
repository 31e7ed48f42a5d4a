"""The learnt limits of a remote backend, against a server as a plant."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.clock import VirtualClock
from headrace.scheduling.limiter import (
    AdaptiveLimiter,
    Circuit,
    Failure,
    LimiterPolicy,
    Permit,
)
from support.plant import Plant


def plant(slots: int, seed: int = 1, policy: LimiterPolicy | None = None, **server: float) -> Plant:
    clock = VirtualClock()
    limiter = AdaptiveLimiter(clock, policy)
    return Plant(clock, limiter, slots, random.Random(seed), **server)  # type: ignore[arg-type]  # each by its own type


def near(server: Plant, optimum: float, last_s: float = 10.0) -> bool:
    """Within a fifth, or the two that wait there so that no slot idles."""
    limits = server.limits(last_s)
    mean = sum(limits) / len(limits)
    return abs(mean - optimum) <= max(0.2 * optimum, 2.0)


# Property 9.


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 30), slots=st.sampled_from([16, 32, 64]))
def test_it_finds_the_slots_of_a_server_and_follows_them(seed: int, slots: int) -> None:
    server = plant(slots, seed)
    server.run(30)
    server.run(30)
    assert near(server, slots)
    server.slots = slots // 2
    server.run(30)
    assert near(server, slots // 2, 5.0)
    server.slots = slots
    server.run(30)
    assert near(server, slots, 5.0)


@pytest.mark.parametrize("slots", [16, 64])
def test_it_does_not_swing(slots: int) -> None:
    """Past the start, what is learnt stays within a quarter of its mean; the dips are apart."""
    server = plant(slots)
    server.run(40)
    learnt = []
    for _ in range(300):
        server.run(0.2)
        learnt.append(server.limiter.stats().limit)
    mean = sum(learnt) / len(learnt)
    assert max(learnt) - mean <= 0.25 * mean
    assert mean - min(learnt) <= 0.25 * mean


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 1 << 30), optimum=st.sampled_from([24, 48]))
def test_it_keeps_the_itl_where_slots_are_no_bound(seed: int, optimum: int) -> None:
    """p90 of the gaps is 1.137 times their mean, at this noise."""
    each = 1e-3
    target = 1.137 * (0.01 + each * optimum)
    server = plant(1000, seed, LimiterPolicy(itl_target=target), base_itl=0.01, itl_each=each)
    server.run(60)
    assert near(server, optimum)
    server.itl_each *= 2
    server.run(30)
    assert near(server, optimum / 2, 5.0)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_it_finds_a_small_server_too(slots: int) -> None:
    """With a second or two per answer there is little to learn from."""
    server = plant(slots)
    server.run(120)
    limits = server.limits(30.0)
    assert slots <= sum(limits) / len(limits) <= slots + 3


def test_long_congestion_does_not_pass_for_normal() -> None:
    server = plant(16)
    for _ in range(10):
        server.run(60)
        assert near(server, 16)


def test_answers_get_no_slower_for_being_long() -> None:
    """End-to-end time is no signal: four times longer answers do not lower the limit."""
    server = plant(32)
    server.run(40)
    server.mean_tokens *= 4
    server.run(60)
    assert near(server, 32)


def test_light_load_neither_grows_nor_starves_the_limit() -> None:
    server = plant(64)
    server.run(60, rate=1.0)
    assert 4 <= server.limiter.limit <= 16
    assert server.limiter.stats().inflight <= 8


def test_refusals_back_it_off_and_retry_after_is_kept() -> None:
    server = plant(8, max_queue=2, retry_after=3.0)
    server.run(120)
    assert server.refused
    assert server.completed > 120 * 8 / 2.4 * 0.5
    for when in server.refused:
        told = when + 0.01
        assert not any(told + 0.1 < start < told + 2.9 for start in server.started)


def fresh(policy: LimiterPolicy | None = None) -> tuple[VirtualClock, AdaptiveLimiter]:
    clock = VirtualClock()
    return clock, AdaptiveLimiter(clock, policy)


def circuit(limiter: AdaptiveLimiter) -> Circuit:
    return limiter.circuit


def answer(clock: VirtualClock, permit: Permit, seconds: float = 0.2) -> None:
    clock.advance(seconds)
    permit.tokens(1, clock.monotonic())
    permit.finish()


def test_counts_return_to_nothing_however_a_request_ends() -> None:
    clock, limiter = fresh()
    ends: list[Callable[[Permit], None]] = [
        Permit.finish,
        Permit.cancel,
        lambda p: p.fail(Failure.ERROR),
        lambda p: answer(clock, p),
    ]
    for end in ends:
        permit = limiter.start(100)
        assert (limiter.stats().inflight, limiter.stats().inflight_prefill) == (1, 100)
        end(permit)
        end(permit)
        permit.tokens(3, clock.monotonic())
        assert (limiter.stats().inflight, limiter.stats().inflight_prefill) == (0, 0)


def test_one_burst_of_refusals_is_one_back_off() -> None:
    clock, limiter = fresh(LimiterPolicy(initial=20))
    permits = [limiter.start(10) for _ in range(20)]
    clock.advance(0.1)
    for permit in permits:
        permit.fail(Failure.PUSHBACK)
    assert limiter.stats().limit == pytest.approx(14)


def test_retry_after_closes_it_until_then() -> None:
    clock, limiter = fresh()
    limiter.start(10).fail(Failure.PUSHBACK, 7.5)
    assert limiter.wait_s() == 7.5
    assert not limiter.has_room(1)
    clock.advance(7.4)
    assert not limiter.has_room(1)
    clock.advance(0.11)
    assert limiter.has_room(1)
    assert circuit(limiter) is Circuit.CLOSED


def test_five_failures_open_the_circuit_and_one_probe_closes_it() -> None:
    clock, limiter = fresh()
    for _ in range(4):
        limiter.start(10).fail(Failure.UNAVAILABLE)
    assert limiter.has_room(1)
    limiter.start(10).fail(Failure.ERROR)
    assert circuit(limiter) is Circuit.OPEN
    assert not limiter.has_room(1)
    assert limiter.wait_s() == 5.0
    clock.advance(5.0)
    probe = limiter.start(10)
    assert circuit(limiter) is Circuit.PROBING
    assert not limiter.has_room(1)
    probe.fail(Failure.TIMEOUT)
    assert limiter.wait_s() == 5.0
    clock.advance(5.0)
    cancelled = limiter.start(10)
    cancelled.cancel()
    assert circuit(limiter) is Circuit.OPEN
    assert limiter.has_room(1)
    answer(clock, limiter.start(10))
    assert circuit(limiter) is Circuit.CLOSED
    for _ in range(4):
        limiter.start(10).fail(Failure.ERROR)
    assert circuit(limiter) is Circuit.CLOSED


@pytest.mark.parametrize("between", ["success", "pushback"])
def test_failures_count_in_a_row(between: str) -> None:
    clock, limiter = fresh()
    for _ in range(3):
        for _ in range(4):
            limiter.start(10).fail(Failure.ERROR)
        if between == "success":
            answer(clock, limiter.start(10))
        else:
            limiter.start(10).fail(Failure.PUSHBACK)
    assert circuit(limiter) is Circuit.CLOSED


def test_prompts_in_flight_are_bounded_by_the_prefill_speed() -> None:
    clock, limiter = fresh(LimiterPolicy(initial=8, ttft_target=1.0))
    assert limiter.prefill_limit is None
    for i in range(40):
        uncached = 100 * (1 + i % 10)
        permit = limiter.start(uncached)
        answer(clock, permit, 0.05 + uncached / 2000)
    assert limiter.prefill_limit == pytest.approx(2000, rel=0.05)
    assert limiter.has_room(50_000)  # alone, any may go
    first = limiter.start(1500)
    assert limiter.has_room(400)
    assert not limiter.has_room(600)
    first.tokens(1, clock.monotonic())
    assert limiter.has_room(600)


def test_the_backends_own_word_counts() -> None:
    server = plant(1000)
    server.run(5)
    before = server.limiter.stats().limit
    server.limiter.report(waiting=10, kv_usage=0.2)
    server.run(10)
    assert server.limiter.stats().limit < before
    server.limiter.report(waiting=0, kv_usage=0.2)
    low = server.limiter.stats().limit
    server.run(10)
    assert server.limiter.stats().limit > low


@pytest.mark.parametrize(
    "bad",
    [{"initial": 0.5}, {"initial": 9.0, "most": 8.0}, {"failures_to_open": 0}, {"itl_target": 0.0}],
)
def test_policies_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        LimiterPolicy(**bad)  # type: ignore[arg-type]  # the table mixes its fields
