"""A small noisy-neighbour workload with made-up lengths: thresholds, and each part's worth.

benchmarks/scheduling has the full one with the lengths of public traces.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any

import pytest
from benchmarks.scheduling.drivers import Driver, priority_and_cap, run, strict_priority
from benchmarks.scheduling.engine import Engine, Job
from benchmarks.scheduling.measures import measures
from benchmarks.scheduling.ours import POLICY, Ours
from benchmarks.scheduling.variants import DEEP, ours, with_slots_for_all

from headrace.core.request import PriorityClass
from headrace.scheduling import SchedulingPolicy

SEEDS = (1, 2)
DURATION_S = 150.0
STANDARD = PriorityClass.STANDARD
Make = Callable[[Engine], Driver]


@dataclass(frozen=True)
class Sender:
    tenant: str
    cls: int
    rate: float
    prompt: float
    output: float
    spread: float
    start: float = 0.0
    end: float = DURATION_S


SENDERS = (
    Sender("vip", 0, 0.25, 900, 150, 0.7),
    Sender("chat0", 1, 0.7, 700, 150, 0.9),
    Sender("chat1", 1, 0.7, 700, 150, 0.9),
    Sender("code", 1, 0.8, 1600, 20, 0.8),
    Sender("noisy", 1, 2.0, 1800, 380, 0.7, 40.0, 110.0),
    Sender("batch", 2, 0.4, 2500, 200, 0.4),
)


def workload(seed: int) -> list[Job]:
    rng = random.Random(seed)
    jobs = []
    for s in SENDERS:
        at = s.start
        while (at := at + rng.expovariate(s.rate)) < s.end:
            prompt = min(8000, round(rng.lognormvariate(math.log(s.prompt), s.spread)))
            output = min(1500, round(rng.lognormvariate(math.log(s.output), s.spread)))
            jobs.append(Job(0, s.tenant, s.cls, at, max(1, prompt), max(1, output)))
    jobs.sort(key=lambda job: job.arrival)
    for number, job in enumerate(jobs):
        job.number = number
    return jobs


def averaged(make: Make) -> dict[str, float]:
    found = []
    for seed in SEEDS:
        jobs = workload(seed)
        found.append(measures(jobs, run(jobs, make)))
    return {name: mean(one[name] for one in found) for name in found[0]}


@cache
def whole() -> dict[str, float]:
    return averaged(ours())


@cache
def deep() -> dict[str, float]:
    return averaged(ours(DEEP))


def test_the_whole_meets_its_thresholds() -> None:
    found = whole()
    assert found["goodput"] >= 0.90
    assert found["vip_p99"] <= 0.60
    assert found["short_p99"] <= 1.3
    assert found["chat_p99"] <= 2.5
    assert found["shed_others"] <= 0.02
    assert found["batch_max_wait"] <= 80.0
    assert found["itl_p99"] <= 0.1


def test_it_is_better_than_simple_rules() -> None:
    found = whole()
    for make in (strict_priority, priority_and_cap):
        simple = averaged(make)
        assert found["goodput"] >= simple["goodput"] + 0.04
        assert found["vip_p99"] <= 0.7 * simple["vip_p99"]
        assert found["short_p99"] <= 0.6 * simple["short_p99"]


def test_the_same_seed_gives_the_same_figures() -> None:
    assert averaged(ours()) == whole()


@pytest.mark.parametrize(
    ("policy", "figure", "worse"),
    [
        (replace(POLICY, shed=False), "short_p99", 4.0),
        (replace(POLICY, kappa=0.0), "short_p99", 1.2),
        (replace(POLICY, size_bias=0.0), "short_p99", 1.15),
        (replace(POLICY, share_bias=0.0), "shed_others", 1.5),
        (with_slots_for_all(POLICY), "vip_p99", 1.3),
    ],
    ids=["admission", "shortest cost", "size bias", "share bias", "slot reservation"],
)
def test_each_part_is_worth_something(policy: SchedulingPolicy, figure: str, worse: float) -> None:
    found = averaged(ours(policy))
    assert found[figure] >= worse * whole()[figure]
    assert found["goodput"] <= whole()["goodput"] + 0.002  # what two seeds of such runs differ by


@pytest.mark.parametrize(
    "change",
    [{"window_s": math.inf}, {"late_lane": False}],
    ids=["service window", "late lane"],
)
def test_each_part_is_worth_something_behind_a_deep_backlog(change: dict[str, Any]) -> None:
    """Admission prevents that, so without it."""
    assert averaged(ours(replace(DEEP, **change)))["goodput"] <= deep()["goodput"] - 0.01


def test_the_service_window_keeps_a_flood_from_the_others() -> None:
    found = averaged(ours(replace(DEEP, window_s=math.inf)))
    assert found["chat_p99"] >= 1.5 * deep()["chat_p99"]


# A small machine, all of whose clients come at once and wait for their answers.


def small_machine(prefill: int, decodes: int, kv: int, context: int) -> float:
    """500 prompt tokens a second, and a quarter of a second to decode 64."""
    del kv, context
    return 0.03 + prefill / 500 + decodes * 0.0034


class OneTenant(Ours):
    """With everything as it is by default."""

    classes = (PriorityClass.STANDARD,) * 3


def asked(client: int, at: float, rng: random.Random) -> Job:
    return Job(client, "default", 2, at, 128, rng.randint(20, 120))


@pytest.mark.parametrize(("slots", "clients"), [(8, 30), (16, 60), (64, 64), (64, 240)])
def test_a_small_machine_refuses_nobody_it_can_serve(slots: int, clients: int) -> None:
    engine = Engine(slots, small_machine)
    driver = OneTenant(engine, SchedulingPolicy(), budget=lambda *_: 256)
    rng = random.Random(1)
    now = 0.0
    coming = [asked(client, now, rng) for client in range(clients)]
    done = 0
    while done < 4 * clients:
        for job in coming:
            driver.arrive(job, now)
            assert not job.refused, f"after {done} answers"
        driver.before_step(now)
        step = engine.step(now, driver.order, driver.budget)
        now += step.sample.seconds
        driver.after_step(step, now)
        done += len(step.done)
        coming = [asked(job.number, now, rng) for job in step.done]
    books = driver.heart.books
    assert books.counters.sheds == {}
    if slots < clients:
        base = SchedulingPolicy().classes[STANDARD].ttft_s
        assert max(books.counters.longest_wait_s) > base, "by which some would have been refused"


def test_absolute_targets_hold_on_a_small_machine_too() -> None:
    """An operator who asks for two seconds gets them, by refusals."""
    standard = replace(SchedulingPolicy().classes[STANDARD], ttft_s=2.0)
    policy = replace(SchedulingPolicy().with_class(STANDARD, standard), auto_targets=False)
    rng = random.Random(1)
    jobs = [asked(i, 0.25 * i, rng) for i in range(400)]

    def make(engine: Engine) -> OneTenant:
        return OneTenant(engine, policy, budget=lambda *_: 256)

    run(jobs, make, slots=16, step_time=small_machine)
    settled = [job for job in jobs if job.arrival > 20.0]
    assert sum(job.refused for job in settled) > 0.3 * len(settled)
    waits = [job.first_at - job.arrival for job in settled if job.first_at is not None]
    assert sum(wait <= 4.0 for wait in waits) >= 0.9 * len(waits)
