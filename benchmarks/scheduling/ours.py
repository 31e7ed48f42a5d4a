"""The production scheduler's heart, driven by the simulated engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from benchmarks.scheduling.engine import (
    Budget,
    Engine,
    HalfToTheShortest,
    Job,
    Order,
    Step,
    inverse_budget,
)

from headrace.core.clock import VirtualClock
from headrace.core.errors import HeadraceError
from headrace.core.request import Endpoint, PriorityClass, Request, SamplingParams
from headrace.scheduling.base import Claim, Cost, Revoked, StepSample
from headrace.scheduling.entry import Entry
from headrace.scheduling.forecast import Forecaster
from headrace.scheduling.heart import Heart
from headrace.scheduling.lengths import LengthEstimator
from headrace.scheduling.policy import SchedulingPolicy

CLASSES = (PriorityClass.SYSTEM, PriorityClass.INTERACTIVE, PriorityClass.BATCH)
LIMIT = 4096


def absolute(policy: SchedulingPolicy, ttft_s: tuple[float, ...]) -> SchedulingPolicy:
    """The workload's targets, in force from the start."""
    for priority_class, target in zip(CLASSES, ttft_s, strict=True):
        own = policy.classes[priority_class]
        policy = policy.with_class(priority_class, replace(own, ttft_s=target))
    return replace(policy, auto_targets=False)


POLICY = absolute(SchedulingPolicy(), (1.0, 2.0, 60.0))


class Ours:
    """One driver for the heart. `classes` are what the workload's classes mean here."""

    classes = CLASSES

    def __init__(
        self,
        engine: Engine,
        policy: SchedulingPolicy = POLICY,
        *,
        budget: Budget | None = None,
        forecaster: Callable[[VirtualClock], Forecaster] | None = None,
        weights: dict[str, float] | None = None,
    ) -> None:
        self.order: Order = HalfToTheShortest()
        self.budget: Budget = budget or inverse_budget(0.1, 0.95)
        self._engine = engine
        self._weights = weights or {}
        self.clock = VirtualClock()
        make = LengthEstimator if forecaster is None else forecaster
        self.heart = Heart(
            policy,
            capacity=lambda: engine.slots,
            clock=self.clock,
            rng=random.Random(0),
            forecaster=make(self.clock),
            preempt=self._preempt if policy.preemption else None,
        )
        self.listeners: list[Callable[[StepSample], None]] = []
        self._entries: dict[Job, Entry] = {}
        self._jobs: dict[Entry, Job] = {}
        self._again: list[tuple[Entry, Cost]] = []

    def arrive(self, job: Job, now: float) -> None:
        self._at(now)
        request = Request(
            id=str(job.number),
            endpoint=Endpoint.CHAT,
            model="m",
            sampling=SamplingParams(max_tokens=LIMIT),
            arrival=now,
            tenant=job.tenant,
        )
        job.priority = job.cls
        claim = Claim(job.tenant, self._weights.get(job.tenant, 1.0), self.classes[job.cls])
        cost = Cost(1, job.prompt, LIMIT, exact=True, cached_tokens=job.shared)
        entry: Entry | None = None

        def wake() -> None:
            job.handed_at = self.clock.monotonic()
            self._engine.hand_over(job)

        def interrupt(error: Exception) -> None:
            assert entry is not None
            self._engine.withdraw(job)
            if isinstance(error, Revoked):
                job.handed_at = None
                self._again.append((entry, cost))
            else:
                job.refused = True

        try:
            entry = self.heart.admit(request, cost, claim, interrupt, wake)
        except HeadraceError:
            job.refused = True
            return
        self._entries[job] = entry
        self._jobs[entry] = job
        self.heart.ask(entry, cost)
        self._ask_again()

    def before_step(self, now: float) -> None:
        self._at(now)

    def after_step(self, step: Step, now: float) -> None:
        self._at(now)
        heart = self.heart
        for job in step.began:
            heart.started(self._entries[job], job.shared)
        for job in step.first:
            heart.generated(self._entries[job], 1)
        for job in step.grown:
            heart.generated(self._entries[job], 1)
        for job in step.done:
            entry = self._entries.pop(job)
            heart.choice_finished(entry)
            heart.release(entry)
            del self._jobs[entry]
        heart.observe_step(step.sample)
        for listener in self.listeners:
            listener(step.sample)
        self._ask_again()

    def _ask_again(self) -> None:
        while self._again:
            self.heart.ask(*self._again.pop())

    def _preempt(self, entry: Entry) -> None:
        self._engine.preempt(self._jobs[entry])

    def _at(self, now: float) -> None:
        if now > self.clock.monotonic():
            self.clock.advance(now - self.clock.monotonic())
