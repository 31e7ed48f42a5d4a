"""Runs jobs through an engine under a scheduler: the simple ones here, ours in `ours`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from benchmarks.scheduling.engine import (
    Budget,
    Engine,
    Job,
    Order,
    Step,
    a100_step,
    fixed_budget,
    in_place,
)

SLOTS = 64
FIXED = 512

StepTime = Callable[[int, int, int, int], float]


class Driver(Protocol):
    order: Order
    budget: Budget

    def arrive(self, job: Job, now: float) -> None: ...

    def before_step(self, now: float) -> None: ...

    def after_step(self, step: Step, now: float) -> None: ...


def run(
    jobs: list[Job],
    make: Callable[[Engine], Driver],
    *,
    slots: int = SLOTS,
    step_time: StepTime = a100_step,
) -> Engine:
    """To the end of the last job. Arrivals during a step are seen when they come."""
    engine = Engine(slots, step_time)
    driver = make(engine)
    now = 0.0
    index = 0
    while index < len(jobs) or not engine.idle:
        if engine.idle:
            now = max(now, jobs[index].arrival)
        while index < len(jobs) and jobs[index].arrival <= now:
            driver.arrive(jobs[index], jobs[index].arrival)
            index += 1
        driver.before_step(now)
        if engine.idle:
            continue
        step = engine.step(now, driver.order, driver.budget)
        end = now + step.sample.seconds
        while index < len(jobs) and jobs[index].arrival <= end:
            driver.arrive(jobs[index], jobs[index].arrival)
            index += 1
        now = end
        for job in step.first:
            job.first_at = now
        for job in (*step.first, *step.grown):
            job.last_at = now
        for job in step.done:
            job.done_at = now
        driver.after_step(step, now)
    return engine


class Simple:
    """A queue by a fixed key, and hand-over whenever a slot and step budget are free. `cap`
    refuses newcomers while more prompt tokens than that are queued or unfinished."""

    def __init__(
        self,
        engine: Engine,
        key: Callable[[Job], tuple[float, ...]],
        *,
        cap: int | None = None,
    ) -> None:
        self.order: Order = in_place
        self.budget: Budget = fixed_budget(FIXED)
        self._engine = engine
        self._key = key
        self._cap = cap
        self._queue: list[Job] = []

    def arrive(self, job: Job, now: float) -> None:  # noqa: ARG002 - decides at steps
        if self._cap is not None:
            queued = sum(j.prompt for j in self._queue)
            queued += sum(j.left for j in (*self._engine.prompts, *self._engine.waiting))
            if queued and queued + job.prompt > self._cap:
                job.refused = True
                return
        self._queue.append(job)
        self._queue.sort(key=self._key)

    def before_step(self, now: float) -> None:
        engine = self._engine
        room = FIXED - len(engine.decoding) - sum(job.left for job in engine.prompts)
        while self._queue and room > 0 and engine.running + len(engine.waiting) < engine.slots:
            job = self._queue.pop(0)
            job.handed_at = now
            engine.hand_over(job)
            room -= job.left

    def after_step(self, step: Step, now: float) -> None:
        pass


def fcfs(engine: Engine) -> Driver:
    return Simple(engine, lambda job: (job.arrival,))


def strict_priority(engine: Engine) -> Driver:
    return Simple(engine, lambda job: (job.cls, job.arrival))


def shortest_job(engine: Engine) -> Driver:
    """By the true cost."""
    return Simple(engine, lambda job: (9.6e-5 * job.prompt + 3.3e-4 * job.output,))


def priority_and_cap(engine: Engine) -> Driver:
    return Simple(engine, lambda job: (job.cls, job.arrival), cap=20_000)


BASELINES: dict[str, Callable[[Engine], Driver]] = {
    "fcfs": fcfs,
    "strict priority": strict_priority,
    "shortest job": shortest_job,
    "priority + cap": priority_and_cap,
}
