"""The estimator of answer lengths."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.clock import VirtualClock
from headrace.core.request import Endpoint, Request, SamplingParams
from headrace.scheduling.base import Claim
from headrace.scheduling.lengths import LengthEstimator


def asks(
    max_tokens: int | None = None, model: str = "m", extra: Mapping[str, Any] | None = None
) -> Request:
    return Request(
        id="r",
        endpoint=Endpoint.CHAT,
        model=model,
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival=0.0,
        extra_fields=extra or {},
    )


def learn(
    estimator: LengthEstimator,
    lengths: list[int],
    *,
    flow: str = "a",
    prompt: int = 100,
    request: Request | None = None,
) -> None:
    for length in lengths:
        estimator.observe(request or asks(), Claim(flow=flow), prompt, length, natural=True)


def fresh() -> LengthEstimator:
    return LengthEstimator(VirtualClock())


def test_a_cold_estimator_has_a_guess() -> None:
    forecast = fresh().forecast(asks(), Claim(), 100, None)
    assert 256 < forecast.mean < 1500
    assert 500 < forecast.q80 < 900 < forecast.q90 < 1500


def test_nothing_is_forecast_beyond_the_limit() -> None:
    estimator = fresh()
    learn(estimator, [900] * 200)
    forecast = estimator.forecast(asks(), Claim(flow="a"), 100, 50)
    assert (forecast.q80, forecast.q90) == (50, 50)
    assert forecast.mean == pytest.approx(50.0, rel=1e-3)
    assert forecast.mean <= 50.0
    assert estimator.residual(asks(), Claim(flow="a"), 100, 50, 40) == pytest.approx(10, rel=0.01)


def test_each_flow_has_its_own_lengths_and_a_new_one_gets_everybodys() -> None:
    estimator = fresh()
    for _ in range(10):
        learn(estimator, [20] * 20, flow="short")
        learn(estimator, [2000] * 20, flow="long")
    at = {
        flow: estimator.forecast(asks(), Claim(flow=flow), 100, None)
        for flow in ("short", "long", "new")
    }
    assert at["short"].mean < 100
    assert at["long"].mean > 1500
    assert at["short"].mean < at["new"].mean < at["long"].mean
    cold = fresh().forecast(asks(), Claim(), 100, None)
    elsewhere = estimator.forecast(asks(model="other"), Claim(flow="short"), 100, None)
    assert elsewhere.mean == cold.mean


@pytest.mark.parametrize(
    ("request_a", "prompt_a", "request_b", "prompt_b"),
    [
        (asks(), 50, asks(), 3000),
        (asks(max_tokens=4000), 100, asks(max_tokens=4000, extra={"tools": [{}]}), 100),
        (asks(), 100, asks(extra={"response_format": {"type": "json_object"}}), 100),
        (asks(max_tokens=2000), 100, asks(max_tokens=30_000), 100),
    ],
    ids=["prompt", "tools", "json", "max_tokens"],
)
def test_a_flow_with_two_kinds_of_requests_has_two_lengths(
    request_a: Request, prompt_a: int, request_b: Request, prompt_b: int
) -> None:
    estimator = fresh()
    for _ in range(20):
        learn(estimator, [1000] * 10, prompt=prompt_a, request=request_a)
        learn(estimator, [10] * 10, prompt=prompt_b, request=request_b)
    a = estimator.forecast(request_a, Claim(flow="a"), prompt_a, None)
    b = estimator.forecast(request_b, Claim(flow="a"), prompt_b, None)
    assert a.mean > 5 * b.mean
    assert a.q80 > 800
    assert b.q80 < 40


def test_what_happens_now_outweighs_what_was() -> None:
    estimator = fresh()
    learn(estimator, [1000] * 3000)
    learn(estimator, [100] * 3000)
    assert estimator.forecast(asks(), Claim(flow="a"), 100, None).q80 <= 120


@settings(max_examples=40, deadline=None)
@given(
    answers=st.lists(
        st.tuples(st.integers(0, 9000), st.booleans(), st.integers(1, 9000)), max_size=80
    ),
    limit=st.integers(1, 9000),
    generated=st.integers(0, 9000),
)
def test_forecasts_are_in_order_and_within_bounds(
    answers: list[tuple[int, bool, int]], limit: int, generated: int
) -> None:
    estimator = fresh()
    for length, natural, prompt in answers:
        estimator.observe(asks(), Claim(), prompt, length, natural=natural)
    for cap in (limit, None):
        forecast = estimator.forecast(asks(), Claim(), 100, cap)
        assert 1 <= forecast.q80 <= forecast.q90 <= (cap or 1 << 30)
        assert 0 < forecast.mean <= (cap or 1 << 30)
    left = estimator.residual(asks(), Claim(), 100, limit, generated)
    assert 0 <= left <= max(0, limit - generated) + 1e-6


def test_memory_is_bounded_whatever_flows_come() -> None:
    estimator = LengthEstimator(VirtualClock(), max_keys=64)
    learn(estimator, [7] * 100, flow="regular")
    for i in range(1000):
        learn(estimator, [500], flow=f"passer-by {i}", prompt=1 << (i % 12))
        estimator.forecast(asks(), Claim(flow=f"visitor {i}"), 100, None)
        learn(estimator, [7], flow="regular")
    assert len(estimator) <= 64
    assert len(estimator._learnt) <= 64
    assert estimator.forecast(asks(), Claim(flow="regular"), 100, None).q80 <= 10


# Property 11: calibrated on mixed traffic, and cut answers do not bias it down.

FLOWS = {"a": (4.0, 0.5), "b": (5.5, 0.8), "c": (3.0, 1.2), "d": (6.5, 0.3)}


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1 << 30), drift=st.floats(0.5, 2.0))
def test_quantiles_are_calibrated_and_ranks_are_useful(seed: int, drift: float) -> None:
    """On log-normal flows of which one drifts, each answer forecast before it is learnt."""
    rng = random.Random(seed)
    clock = VirtualClock()
    estimator = LengthEstimator(clock)
    within80 = within90 = 0
    total = 3000
    for i in range(total):
        flow = rng.choice(list(FLOWS))
        mu, sigma = FLOWS[flow]
        length = max(1, round(rng.lognormvariate(mu, sigma) * (drift if i > total / 2 else 1.0)))
        forecast = estimator.forecast(asks(), Claim(flow=flow), 100, None)
        within80 += length <= forecast.q80
        within90 += length <= forecast.q90
        estimator.observe(asks(), Claim(flow=flow), 100, length, natural=True)
        clock.advance(0.1)
    # Answers that suddenly halve are all within what was learnt before, for a while.
    assert 0.74 <= within80 / total <= 0.88
    assert 0.84 <= within90 / total <= 0.96
    stats = estimator.stats()
    assert stats.answers == total
    assert stats.rank_accuracy is not None
    assert stats.rank_accuracy >= 0.75
    assert stats.q80_coverage == pytest.approx(within80 / total, abs=0.05)
    assert stats.q90_coverage == pytest.approx(within90 / total, abs=0.05)


def cancelled_traffic(seed: int, *, honest: bool) -> LengthEstimator:
    """Callers leave after a while that has nothing to do with the answer's length.

    `honest` false passes their answers off as complete.
    """
    rng = random.Random(seed)
    estimator = fresh()
    for _ in range(3000):
        length = max(1, round(rng.lognormvariate(5.0, 0.8)))
        patience = round(rng.expovariate(1 / 300))
        natural = length <= patience
        seen = min(length, patience)
        estimator.observe(asks(), Claim(), 100, seen, natural=natural or not honest)
    return estimator


@pytest.mark.parametrize("seed", range(5))
def test_cancelled_answers_do_not_bias_forecasts_down(seed: int) -> None:
    rng = random.Random(seed + 1)
    truth = sorted(rng.lognormvariate(5.0, 0.8) for _ in range(20_000))
    q80, q90, mean = truth[16_000], truth[18_000], sum(truth) / len(truth)
    known = cancelled_traffic(seed, honest=True)
    forecast = known.forecast(asks(), Claim(), 100, None)
    assert forecast.q80 == pytest.approx(q80, rel=0.18)
    assert forecast.q90 == pytest.approx(q90, rel=0.2)
    assert known.residual(asks(), Claim(), 100, None, 0) == pytest.approx(mean, rel=0.15)
    fooled = cancelled_traffic(seed, honest=False).forecast(asks(), Claim(), 100, None)
    assert fooled.q90 < 0.75 * q90  # the test can tell


def test_answers_cut_at_their_limit_count_as_longer_than_that() -> None:
    estimator = fresh()
    for i in range(600):
        length = 20 if i % 4 == 0 else 256
        estimator.observe(asks(256), Claim(), 100, length, natural=length < 256)
    assert estimator.forecast(asks(256), Claim(), 100, 256).q80 == 256
    assert estimator.forecast(asks(256), Claim(), 100, 4096).q80 > 300
    stats = estimator.stats()
    assert stats.answers == 600
    assert stats.q80_coverage == 1.0


def test_an_answer_that_was_never_asked_for_teaches_nothing() -> None:
    estimator = fresh()
    estimator.observe(asks(max_tokens=0), Claim(), 100, 0, natural=True)
    assert len(estimator) == 0


def test_the_longer_an_answer_already_is_the_longer_it_will_be() -> None:
    """With a heavy tail; the total never falls below what is there."""
    rng = random.Random(5)
    estimator = fresh()
    learn(estimator, [max(1, round(rng.lognormvariate(4, 1.5))) for _ in range(2000)])
    left = [estimator.residual(asks(), Claim(flow="a"), 100, None, g) for g in (0, 64, 512, 4096)]
    assert left == sorted(left)


def test_no_forecasts_no_score() -> None:
    stats = fresh().stats()
    assert (stats.answers, stats.rank_accuracy, stats.q80_coverage) == (0, None, None)
