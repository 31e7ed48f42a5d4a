"""The online model of step times."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.base import StepSample
from headrace.scheduling.cost_model import A100_8B, SMALL_CPU, StepCoefficients, StepCostModel
from support.machines import Machine, a100, small_cpu


def step(rng: random.Random, machine: Machine, most: int, *, noise: float) -> StepSample:
    prefill = rng.choice((0, 0, rng.randint(1, most)))
    decodes = rng.randint(0 if prefill else 1, 64)
    context = decodes * rng.randint(100, 900)
    prefill_context = rng.randint(0, 2000) if prefill else 0
    seconds = machine(prefill, decodes, context, prefill_context)
    return StepSample(
        seconds * rng.lognormvariate(0.0, noise), prefill, decodes, context, prefill_context
    )


def error(model: StepCostModel, machine: Machine, most: int) -> float:
    """Mean relative error over steps of all kinds, without noise."""
    rng = random.Random(99)
    samples = [step(rng, machine, most, noise=0.0) for _ in range(200)]
    return sum(
        abs(
            model.predict(s.prefill_tokens, s.decode_tokens, s.decode_context, s.prefill_context)
            / s.seconds
            - 1.0
        )
        for s in samples
    ) / len(samples)


# Property 10, first half: within 10 % after 200 steps, and again 200 steps after a drift.


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    machine=st.sampled_from([(a100, 512), (a100, 2048), (small_cpu, 256)]),
    prior=st.sampled_from([A100_8B, SMALL_CPU]),
    noise=st.sampled_from([0.0, 0.05, 0.1, 0.2]),
    drift=st.sampled_from([1.3, 1 / 1.3]),
)
def test_it_learns_a_machine_and_follows_its_drift(
    seed: int,
    machine: tuple[Machine, int],
    prior: StepCoefficients,
    noise: float,
    drift: float,
) -> None:
    truth, most = machine
    bound = 0.10 if noise < 0.2 else 0.13  # steps that noisy determine it no better
    rng = random.Random(seed)
    model = StepCostModel(prior)
    for _ in range(200):
        model.observe(step(rng, truth, most, noise=noise))
    assert error(model, truth, most) < bound

    def drifted(*work: float) -> float:
        return drift * truth(*work)

    for _ in range(200):
        model.observe(step(rng, drifted, most, noise=noise))
    assert error(model, drifted, most) < bound
    stats = model.stats()
    assert stats.steps == 400
    assert stats.error is not None
    assert stats.error < 0.05 + 1.3 * noise
    assert min(vars_of(stats.coefficients)) >= 0.0


def vars_of(coefficients: StepCoefficients) -> list[float]:
    return [getattr(coefficients, name) for name in StepCoefficients.__slots__]


def test_the_first_steps_set_the_scale() -> None:
    model = StepCostModel(A100_8B)
    assert model.predict(0, 0) == pytest.approx(A100_8B.base)
    for seconds in (0.5, 0.5, 30.0, 0.5, 0.5):  # one of them compiled something
        model.observe(StepSample(seconds, 0, 1, 100))
    assert model.predict(0, 1, 100) == pytest.approx(0.5, rel=0.15)


def test_one_hiccup_teaches_nothing_but_a_lasting_change_does() -> None:
    model = StepCostModel(SMALL_CPU)
    for _ in range(100):
        model.observe(StepSample(0.05, 0, 1, 100))
    before = model.predict(0, 1, 100)
    model.observe(StepSample(5.0, 0, 1, 100))
    assert model.predict(0, 1, 100) == before
    assert model.stats().outliers == 1
    for _ in range(6):
        model.observe(StepSample(0.2, 0, 1, 100))
    assert model.predict(0, 1, 100) == pytest.approx(0.2, rel=0.1)


def test_what_recent_steps_do_not_show_is_kept() -> None:
    """Thousands of pure decode steps do not unlearn what a prompt token costs."""
    rng = random.Random(3)
    model = StepCostModel(A100_8B)
    for _ in range(300):
        model.observe(step(rng, small_cpu, 256, noise=0.02))
    before = model.predict(200, 8, 2000)
    for _ in range(3000):
        decodes = rng.randint(6, 10)
        seconds = small_cpu(0, decodes, 250 * decodes, 0) * rng.lognormvariate(0, 0.02)
        model.observe(StepSample(seconds, 0, decodes, 250 * decodes))
    assert model.predict(200, 8, 2000) == pytest.approx(before, rel=0.1)


def test_steps_without_work_or_time_are_passed_over() -> None:
    model = StepCostModel()
    for sample in (StepSample(0.0, 5, 5), StepSample(-1.0, 5, 5), StepSample(1.0, 0, 0)):
        model.observe(sample)
    assert model.stats().steps == 0


def taught(machine: Machine, most: int) -> StepCostModel:
    rng = random.Random(7)
    model = StepCostModel()
    for _ in range(400):
        model.observe(step(rng, machine, most, noise=0.02))
    return model


MODELS: dict[str, Callable[[], StepCostModel]] = {
    "prior": StepCostModel,
    "a100": lambda: taught(a100, 2048),
    "cpu": lambda: taught(small_cpu, 256),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> StepCostModel:
    return MODELS[request.param]()


@settings(max_examples=60, deadline=None)
@given(
    target=st.floats(0.001, 3.0),
    decodes=st.integers(0, 700),
    each=st.integers(0, 4000),
    context=st.integers(0, 8000),
)
def test_budgets_are_the_inverse_of_predictions(
    model: StepCostModel, target: float, decodes: int, each: int, context: int
) -> None:
    budget = model.prefill_budget(target, decodes, decodes * each, context)
    work = (decodes, decodes * each, context)
    assert budget >= 0
    if budget:
        assert model.predict(budget, *work) <= target * (1 + 1e-9)
    if budget < 1 << 20:
        assert model.predict(budget + 1, *work) >= target * (1 - 1e-9)
    running = model.max_running(target, each)
    if running:
        assert model.predict(0, running, running * each) <= target * (1 + 1e-9)
    if running < 1 << 20:
        assert model.predict(0, running + 1, (running + 1) * each) >= target * (1 - 1e-9)


def test_costs_and_rates_are_those_of_the_machine() -> None:
    rng = random.Random(1)
    model = StepCostModel()
    for _ in range(400):
        decodes = rng.randint(24, 40)
        seconds = small_cpu(128, decodes, decodes * 200, 0)
        model.observe(StepSample(seconds, 128, decodes, decodes * 200))
        model.observe(
            StepSample(small_cpu(0, decodes, decodes * 200, 0), 0, decodes, decodes * 200)
        )
        model.observe(StepSample(small_cpu(64, 32, 6400, 0), 64, 32, 6400))
    assert model.prefill_token_s == pytest.approx(0.002, rel=0.1)
    alone = small_cpu(0, 32, 6400, 0) / 32
    assert model.decode_token_s == pytest.approx(alone, rel=0.1)
    assert model.request_cost(1000, 100) == pytest.approx(2.0 + 100 * alone, rel=0.1)
    full = 128 / small_cpu(128, 32, 6400, 0)
    assert model.prefill_tokens_per_s == pytest.approx(full, rel=0.2)


def test_before_any_step_costs_are_those_of_the_prior() -> None:
    model = StepCostModel(A100_8B)
    assert 0.05 < model.request_cost(500, 10) < 0.2
    assert 1000 < model.prefill_tokens_per_s < 10_000
    assert model.stats().error is None


def test_saved_coefficients_start_it_warm() -> None:
    cold = taught(small_cpu, 256)
    warm = StepCostModel(cold.coefficients)
    assert warm.predict(100, 8, 800) == pytest.approx(cold.predict(100, 8, 800), rel=1e-6)


@pytest.mark.parametrize("bad", [replace(A100_8B, base=0.0), replace(A100_8B, decode=-1e-9)])
def test_a_prior_that_no_machine_has_is_refused(bad: StepCoefficients) -> None:
    with pytest.raises(ValueError, match="negative"):
        StepCostModel(bad)
