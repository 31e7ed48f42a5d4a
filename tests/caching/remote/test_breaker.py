"""When a server is left alone."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.caching.remote.breaker import Breaker
from headrace.core.clock import VirtualClock


def breaker(clock: VirtualClock) -> Breaker:
    return Breaker(clock, random.Random(1), failures=3, first_s=1.0, most_s=8.0)


def test_it_opens_after_some_failures_in_a_row() -> None:
    made = breaker(VirtualClock())
    for _ in range(2):
        made.failed()
    made.succeeded()
    for _ in range(2):
        made.failed()
        assert made.allows()
    made.failed()
    assert made.state == "open"
    assert not made.allows()
    assert 0.8 <= made.wait_s() <= 1.2


def test_one_may_try_and_the_others_wait_for_it() -> None:
    clock = VirtualClock()
    made = breaker(clock)
    for _ in range(3):
        made.failed()
    clock.advance(1.3)
    assert made.allows()
    assert not made.allows()
    made.succeeded()
    assert made.allows()
    assert made.state == "closed"


def test_pauses_double_up_to_the_longest() -> None:
    clock = VirtualClock()
    made = breaker(clock)
    for _ in range(3):
        made.failed()
    pauses = []
    for _ in range(6):
        pauses.append(made.wait_s())
        clock.advance(made.wait_s())
        assert made.allows()
        made.failed()
    for pause, expected in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.8 * expected <= pause <= 1.2 * expected


def test_failures_of_calls_that_were_under_way_change_nothing() -> None:
    clock = VirtualClock()
    made = breaker(clock)
    for _ in range(3):
        made.failed()
    before = made.wait_s()
    for _ in range(50):
        made.failed()
    assert made.wait_s() == before


@given(st.lists(st.sampled_from(["call", "ok", "fail", "wait"]), max_size=80))
def test_never_more_than_one_call_at_a_server_that_fails(steps: list[str]) -> None:
    clock = VirtualClock()
    made = breaker(clock)
    probing = False
    for step in steps:
        if step == "call":
            closed = made.state == "closed"
            allowed = made.allows()
            assert not (allowed and probing)
            probing = probing or (allowed and not closed)
        elif step == "ok":
            made.succeeded()
            probing = False
            assert made.allows()
        elif step == "fail":
            made.failed()
            if made.state == "open":
                probing = False
        else:
            clock.advance(3.0)
        assert made.wait_s() <= 8.0 * 1.2
