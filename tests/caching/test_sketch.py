"""The frequency sketch never counts too low, and forgets."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.caching.sketch import FrequencySketch
from support.keys import key


@given(st.lists(st.integers(0, 40), max_size=300))
def test_it_counts_at_least_what_there_was(asked: list[int]) -> None:
    sketch = FrequencySketch(256)
    for number in asked:
        sketch.add(key(number))
    for number, count in Counter(asked).items():
        assert min(count, 15) <= sketch.count(key(number)) <= 15


def test_what_is_over_is_forgotten() -> None:
    sketch = FrequencySketch(256)
    for _ in range(15):
        sketch.add(key(1))
    for number in range(2, 15_000):
        sketch.add(key(number % 1000 + 2))
    assert sketch.count(key(1)) < 12
