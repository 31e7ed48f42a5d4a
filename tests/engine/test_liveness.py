"""Silence, measured on a clock that only the test moves."""

from __future__ import annotations

from headrace.core.clock import VirtualClock
from headrace.engine.liveness import Liveness


def silence_until_hung(liveness: Liveness, clock: VirtualClock, limit: float = 1000.0) -> float:
    start = clock.monotonic()
    while clock.monotonic() - start < limit:
        clock.advance(liveness.interval)
        if liveness.tick(clock.monotonic()):
            break
    return clock.monotonic() - start


def test_silence_beyond_the_timeout_is_a_hang() -> None:
    clock = VirtualClock()
    liveness = Liveness(10.0, 300.0, clock.monotonic())
    liveness.ready()
    assert 10.0 <= silence_until_hung(liveness, clock) <= 10.0 + liveness.interval


def test_a_word_a_second_keeps_it_alive() -> None:
    clock = VirtualClock()
    liveness = Liveness(2.0, 300.0, clock.monotonic())
    liveness.ready()
    for _ in range(100):
        clock.advance(liveness.interval)
        assert not liveness.tick(clock.monotonic())
        liveness.heard()


def test_loading_has_a_limit_of_its_own() -> None:
    clock = VirtualClock()
    liveness = Liveness(1.0, 60.0, clock.monotonic())
    assert 60.0 <= silence_until_hung(liveness, clock) <= 61.0


def test_long_steps_stretch_the_limit_up_to_a_ceiling() -> None:
    liveness = Liveness(10.0, 300.0, 0.0)
    liveness.ready()
    assert liveness.limit == 10.0
    liveness.heard(0.5)
    assert liveness.limit == 10.0
    liveness.heard(3.0)
    liveness.heard(0.1)
    assert liveness.limit == 30.0
    liveness.heard(100.0)
    assert liveness.limit == 60.0
    for _ in range(64):
        liveness.heard(0.1)
    assert liveness.limit == 10.0


def test_time_that_the_front_did_not_watch_does_not_count() -> None:
    clock = VirtualClock()
    liveness = Liveness(10.0, 300.0, clock.monotonic())
    liveness.ready()
    clock.advance(3600.0)  # the front's own loop stood still; messages wait unread
    assert not liveness.tick(clock.monotonic())
    assert silence_until_hung(liveness, clock) >= 10.0 - 2 * liveness.interval
