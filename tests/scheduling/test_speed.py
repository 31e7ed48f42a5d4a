"""What the scheduler believes about the backend's speed, and the targets that follow."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from headrace.core.request import PriorityClass
from headrace.scheduling import SchedulingPolicy, StepSample
from headrace.scheduling.speed import BackendSpeed
from headrace.scheduling.targets import target_s, turnover_s
from support.heart_plant import FixedSpeed

PREFILL_S, DECODE_S, BASE_S = 1e-3, 2e-3, 0.02


def step(prefill: int, decodes: int, factor: float = 1.0) -> StepSample:
    seconds = BASE_S + PREFILL_S * prefill + DECODE_S * decodes
    return StepSample(seconds * factor, prefill, decodes)


def learnt(factor: float = 1.0, speed: BackendSpeed | None = None) -> BackendSpeed:
    speed = speed or BackendSpeed()
    rng = random.Random(1)
    for _ in range(400):
        sample = step(rng.choice((0, 64, 256, 512)), rng.randint(8, 32), factor)
        speed.observe_step(sample, backlogged=sample.prefill_tokens == 512)
    return speed


@pytest.mark.parametrize("factor", [1.0, 0.01, 7.0])
def test_costs_are_those_of_the_steps(factor: float) -> None:
    speed = learnt(factor)
    assert speed.prefill_token_s == pytest.approx(factor * PREFILL_S, rel=0.1)
    share = factor * (DECODE_S + BASE_S / 20)
    assert speed.decode_token_s == pytest.approx(share, rel=0.2)
    assert speed.work(100, 10) == pytest.approx(
        100 * speed.prefill_token_s + 10 * speed.decode_token_s
    )
    full = step(512, 20, factor)
    assert speed.prefill_rate == pytest.approx(512 / full.seconds, rel=0.1)


def test_a_machine_that_gets_slower_is_noticed() -> None:
    speed = learnt(3.0, learnt())
    assert speed.prefill_token_s == pytest.approx(3 * PREFILL_S, rel=0.2)
    assert speed.prefill_rate == pytest.approx(512 / step(512, 20, 3.0).seconds, rel=0.15)


def test_only_steps_with_more_prompts_than_fit_tell_the_rate() -> None:
    speed = BackendSpeed()
    for _ in range(50):
        speed.observe_step(step(16, 4), backlogged=False)
    assert speed.prefill_rate is None
    assert speed.prefill_token_s > 0
    speed.observe_step(step(0, 4), backlogged=True)
    assert speed.prefill_rate is None


def test_equal_steps_and_steps_without_time_do_no_harm() -> None:
    speed = BackendSpeed()
    for _ in range(300):
        speed.observe_step(step(512, 8), backlogged=True)
        speed.observe_step(StepSample(0.0, 512, 8), backlogged=True)
    assert speed.prefill_token_s == pytest.approx(step(512, 8).seconds / 512)
    assert math.isfinite(speed.decode_token_s)
    for _ in range(3000):
        speed.observe_step(step(0, 8), backlogged=False)
    assert speed.prefill_token_s == pytest.approx(step(512, 8).seconds / 512)
    assert speed.decode_token_s == pytest.approx(step(0, 8).seconds / 8, rel=0.01)


def test_without_step_reports_the_tokens_tell() -> None:
    speed = BackendSpeed()
    for _ in range(200):
        speed.first_token(1000, 0.5)
        speed.next_tokens(1, 0.04, running=8)
    assert speed.prefill_rate == pytest.approx(2000)
    assert speed.decode_token_s == pytest.approx(0.005)
    speed.observe_step(step(512, 8), backlogged=True)
    before = speed.prefill_rate
    speed.first_token(10, 5.0)
    assert speed.prefill_rate == before, "steps know better"


def test_automatic_targets_are_what_the_machine_needs() -> None:
    policy = SchedulingPolicy()
    unknown = BackendSpeed()
    for priority_class in PriorityClass:
        assert target_s(policy, priority_class, unknown, 64) == math.inf
    slow = FixedSpeed(prefill_rate=500.0, residence_s=30.0)
    slow.prompt_tokens = 128.0
    assert turnover_s(slow, 64) == 30.0
    assert turnover_s(slow, 256) == pytest.approx(256 * 128 / 500)
    targets = [target_s(policy, c, slow, 64) for c in PriorityClass]
    assert targets == sorted(targets)
    assert targets == [30.0 * policy.classes[c].patience for c in PriorityClass]
    fast = FixedSpeed(prefill_rate=1e6, residence_s=0.1)
    assert [target_s(policy, c, fast, 64) for c in PriorityClass][:3] == [1.0, 2.0, 5.0]


def test_absolute_targets_are_the_operators() -> None:
    policy = replace(SchedulingPolicy(), auto_targets=False)
    slow = FixedSpeed(prefill_rate=5.0, residence_s=300.0)
    for speed in (BackendSpeed(), slow):
        for priority_class in PriorityClass:
            own = policy.classes[priority_class].ttft_s
            assert target_s(policy, priority_class, speed, 64) == own
