"""The arithmetic of decayed, partly cut-short lengths."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.survival import EDGES, LengthDistribution, Tally, lognormal, posterior

lengths = st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=60)
PRIOR = lognormal(256, 1.2)


def tally_of(answers: list[tuple[int, bool]], now: float = 0.0) -> Tally:
    tally = Tally(now)
    for length, natural in answers:
        tally.add(now, length, natural=natural)
    return tally


def product_limit(answers: list[tuple[int, bool]], at: int) -> float:
    """The chance to exceed `at`, by Kaplan and Meier's own formula."""
    left = 1.0
    for time in sorted({length for length, natural in answers if natural and length <= at}):
        at_risk = sum(length >= time for length, _ in answers)
        left *= 1.0 - sum(length == time and natural for length, natural in answers) / at_risk
    return left


def test_short_lengths_have_a_bucket_each() -> None:
    assert EDGES[:5] == (1, 2, 3, 4, 5)
    assert list(EDGES) == sorted(set(EDGES))
    assert EDGES[-1] >= 1 << 20


@given(answers=lengths, strength=st.floats(0.5, 50))
def test_a_posterior_is_a_distribution(answers: list[tuple[int, bool]], strength: float) -> None:
    p = posterior(PRIOR, tally_of(answers), strength)
    assert all(x >= -1e-12 for x in p)
    assert math.fsum(p) == pytest.approx(1.0, abs=1e-9)


@given(answers=st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_without_cuts_it_is_the_mixture(answers: list[int]) -> None:
    """Both ways to compute it agree: a cut before the first token carries no information."""
    plain = tally_of([(length, True) for length in answers])
    cut = tally_of([(length, True) for length in answers] + [(0, False)])
    cut._unit = plain._unit  # so that only the cut itself could make a difference
    for a, b in zip(posterior(PRIOR, plain, 20), posterior(PRIOR, cut, 20), strict=True):
        assert b == pytest.approx(a, rel=1e-2, abs=1e-9)


def test_it_is_the_product_limit_estimate_when_the_prior_is_weak() -> None:
    """At bucket edges, where nothing is lost by putting lengths into buckets."""
    answers = [(4, True), (8, False), (16, True), (16, True), (32, False), (64, True), (64, False)]
    known = LengthDistribution(posterior(PRIOR, tally_of(answers), 1e-6))
    for at in (3, 4, 8, 16, 32, 54):
        assert known.survival(at) == pytest.approx(product_limit(answers, at), abs=0.01)


@given(answers=lengths, g=st.integers(0, 3000), more=st.integers(1, 3000))
def test_expectations_agree_with_each_other(
    answers: list[tuple[int, bool]], g: int, more: int
) -> None:
    known = LengthDistribution(posterior(PRIOR, tally_of(answers), 20))
    limit = g + more
    by_hand = math.fsum(known.survival(x) for x in range(limit))
    assert known.mean(limit) == pytest.approx(by_hand, rel=1e-6)
    assert known.residual(0, limit) == pytest.approx(known.mean(limit), rel=1e-6)
    assert 0.0 <= known.residual(g, limit) <= more + 1e-6
    assert known.quantile(0.5) <= known.quantile(0.8) <= known.quantile(0.9)
    for level in (0.5, 0.8, 0.9):
        quantile = known.quantile(level)
        assert known.survival(quantile) <= 1 - level + 1e-6
        assert known.survival(quantile - 1) >= 1 - level - 1e-6


def test_beyond_everything_known_an_answer_goes_on_as_long_again() -> None:
    known = LengthDistribution([1.0] + [0.0] * (len(EDGES) - 1))
    assert known.residual(500) == 500.0
    assert known.residual(500, 700) == 200.0
    assert known.residual(700, 700) == 0.0


def test_counts_survive_being_rescaled() -> None:
    tally = Tally(0.0)
    for i in range(400):
        tally.add(i * 3600.0, 10, natural=bool(i % 2))
    assert tally.seen == 400
    assert 1.0 <= tally.size < 1.5  # two half-lives pass between answers
    assert LengthDistribution(posterior(PRIOR, tally, 1e-3)).survival(10) < 0.9


def test_a_long_silence_fades_what_was_learnt_but_does_not_erase_it() -> None:
    tally = tally_of([(10, True)] * 400)
    before = tally.size
    tally.add(7 * 86_400.0, 10, natural=True)
    assert before / 4 - 1 < tally.size < before / 4 + 2
