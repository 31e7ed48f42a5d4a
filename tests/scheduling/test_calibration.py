"""How much longer than predicted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.calibration import WaitCalibration


@pytest.mark.parametrize("bias", [0.95, 1.0, 1.05])
def test_nine_in_ten_are_within_the_factor(bias: float) -> None:
    rng, waits = random.Random(1), WaitCalibration()
    within = 0
    for n in range(6000):
        predicted = rng.uniform(1.0, 10.0)
        actual = predicted * bias * rng.uniform(0.8, 1.2)
        if n >= 1000:
            within += actual <= waits.factor * predicted
        waits.observe(predicted, actual)
    assert 0.87 < within / 5000 < 0.93


def test_what_is_predicted_too_long_admits_no_more() -> None:
    waits = WaitCalibration()
    for _ in range(100):
        waits.observe(10.0, 1.0)
    assert waits.factor == 1.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=300))
def test_the_factor_is_bounded(seen: list[tuple[float, float]]) -> None:
    waits = WaitCalibration()
    for predicted, actual in seen:
        waits.observe(predicted, actual)
        assert 1.0 <= waits.factor <= 1.25
