"""Exact bounds of a rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.caching.semantic.bounds import beta_quantile, rate_interval, rate_lower


@pytest.mark.parametrize(
    ("wrong", "right", "low", "high"),
    [
        # From tables of the Clopper-Pearson interval.
        (0, 10, 0.0, 0.3085),
        (1, 9, 0.0025, 0.4450),
        (5, 5, 0.1871, 0.8129),
        (10, 0, 0.6915, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_interval_is_the_textbooks(wrong: int, right: int, low: float, high: float) -> None:
    assert rate_interval(wrong, right) == pytest.approx((low, high), abs=1e-4)


def test_no_error_among_n() -> None:
    for n in (1, 10, 300, 100_000):
        assert rate_lower(n, 0) == pytest.approx(0.05 ** (1 / n), abs=1e-9)
    assert rate_lower(0, 5) == 0.0


COUNTS = st.just(0.0) | st.floats(0.01, 1e4)


@given(COUNTS, COUNTS)
def test_the_rate_is_within_its_interval(right: float, wrong: float) -> None:
    low, high = rate_interval(right, wrong)
    assert 0.0 <= low <= high <= 1.0
    if right + wrong > 0:
        assert low - 1e-9 <= right / (right + wrong) <= high + 1e-9


@given(st.floats(0.01, 0.99), st.floats(0.5, 50), st.floats(0.5, 50))
def test_the_quantile_mirrors(p: float, a: float, b: float) -> None:
    assert beta_quantile(p, a, b) == pytest.approx(1 - beta_quantile(1 - p, b, a), abs=1e-9)
