"""The false-hit rate, and what follows from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.caching.semantic.estimate import FalseHits


def judged(right: int, wrong: int, delta: float = 0.01) -> FalseHits:
    estimate = FalseHits(delta)
    for _ in range(wrong):
        estimate.add(wrong=True)
    for _ in range(right):
        estimate.add(wrong=False)
    return estimate


def test_without_labels_the_bound_is_the_operators() -> None:
    estimate = FalseHits(0.02)
    assert estimate.stance == "normal"
    assert estimate.allowed() == 0.02
    assert estimate.interval() == (0.0, 1.0)


def test_a_rate_above_the_bound_makes_it_strict_before_it_is_certain() -> None:
    estimate = judged(150, 3)
    assert estimate.interval()[0] < 0.01 < 3 / 153
    assert estimate.stance == "strict"
    assert estimate.allowed() == 0.005


def test_one_error_among_few_does_not_close_it() -> None:
    assert judged(0, 1).stance == "strict"
    assert judged(10, 2).stance == "strict"


def test_a_rate_surely_above_the_bound_closes_it() -> None:
    estimate = judged(20, 5)
    assert estimate.stance == "off"
    assert estimate.allowed() is None


def test_it_opens_again_by_what_is_sampled_while_it_is_closed() -> None:
    estimate = judged(20, 5)
    for _ in range(2000):
        estimate.add(wrong=False)
    assert estimate.stance == "normal"


def test_old_labels_leave_the_window() -> None:
    estimate = FalseHits(0.5, window=10)
    for _ in range(10):
        estimate.add(wrong=True)
    for _ in range(10):
        estimate.add(wrong=False)
    assert (estimate.judged, estimate.wrong) == (10, 0)


@given(st.lists(st.booleans(), max_size=300), st.floats(0.005, 0.2))
def test_the_bound_is_never_above_the_operators(labels: list[bool], delta: float) -> None:
    estimate = FalseHits(delta, window=100)
    for wrong in labels:
        estimate.add(wrong=wrong)
        assert estimate.wrong == sum(labels_in(estimate))
        allowed = estimate.allowed()
        assert allowed is None or 0 < allowed <= delta
        low, high = estimate.interval()
        assert low <= estimate.wrong / estimate.judged <= high


def labels_in(estimate: FalseHits) -> list[bool]:
    return list(estimate._labels)
