"""A continuous-batching engine as a model of step times. Decodes first, then prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.scheduling.base import StepSample

Order = Callable[[Sequence["Job"], int], list[tuple["Job", int]]]
"""Shares a step's prompt tokens out among the prompts being computed."""

Budget = Callable[[int, int, int], int]
"""Prompt tokens of a step, given decodes, their context, and the prompts' computed context."""


@dataclass(slots=True, eq=False)
class Job:
    """One request. `priority` orders it in the engine; `left` prompt tokens are to be computed."""

    number: int
    tenant: str
    cls: int
    arrival: float
    prompt: int
    output: int
    shared: int = 0
    priority: int = 0
    left: int = 0
    context: int = 0
    generated: int = 0
    handed_at: float | None = None
    started: bool = False
    first_at: float | None = None
    done_at: float | None = None
    refused: bool = False
    segments: list[tuple[int, int]] = field(default_factory=list)
    breaks: list[float] = field(default_factory=list)
    last_at: float = 0.0


def a100_step(prefill: int, decodes: int, kv: int, context: int) -> float:
    """Llama-3-8B on an A100: coefficients published with Niyama (Apache-2.0)."""
    n = prefill + decodes
    c = context if prefill else 0
    if n <= 512:
        return (
            0.014936
            + 5.882475e-5 * n
            + 2.247956e-5 * prefill
            + 3.634519e-5 * decodes
            + 1.111258e-7 * kv
            + 7.554773e-7 * c
        )
    return (
        0.005004
        + 2.71905e-5 * n
        + 6.863043e-5 * prefill
        - 4.143993e-5 * decodes
        + 1.663409e-7 * kv
        + 2.727223e-6 * c
    )


@dataclass(slots=True)
class Step:
    """What happened in one. `first`: jobs with their first token; `done`: with their last."""

    sample: StepSample
    began: list[Job]
    first: list[Job]
    grown: list[Job]
    done: list[Job]


class Engine:
    """`slots` sequences run. Those handed over beyond that wait here, by (priority, arrival)."""

    def __init__(self, slots: int, step_time: Callable[[int, int, int, int], float]) -> None:
        self.slots = slots
        self._step_time = step_time
        self.waiting: list[Job] = []
        self.prompts: list[Job] = []
        self.decoding: list[Job] = []
        self.steps: list[float] = []
        self._kv = 0
        self._handed = 0

    @property
    def running(self) -> int:
        return len(self.prompts) + len(self.decoding)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prompts or self.decoding)

    def hand_over(self, job: Job) -> None:
        job.left = job.prompt - job.shared
        job.context = job.shared
        self.waiting.append(job)

    def withdraw(self, job: Job) -> None:
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self.prompts:
            self.prompts.remove(job)
        elif job in self.decoding:
            self.decoding.remove(job)
            self._kv -= job.context

    def preempt(self, job: Job) -> None:
        """Puts a running job back; it computes again what it knew."""
        if job in self.decoding:
            self.decoding.remove(job)
            self._kv -= job.context
            self._close_segment(job)
        elif job in self.prompts:
            self.prompts.remove(job)
        else:
            return
        job.left = job.prompt + max(0, job.generated - 1)
        job.context = 0
        self.waiting.insert(0, job)

    def step(self, now: float, order: Order, budget: Budget) -> Step:
        """Computes one and returns what came of it; the clock is the caller's."""
        began = self._admit()
        decodes, kv = len(self.decoding), self._kv
        room = budget(decodes, kv, sum(job.context for job in self.prompts))
        shares = [(job, share) for job, share in order(self.prompts, max(1, room)) if share]
        prefill = sum(share for _, share in shares)
        context = sum(job.context for job, _ in shares)
        seconds = self._step_time(prefill, decodes, kv, context)
        self.steps.append(seconds)
        number = len(self.steps) - 1
        grown = list(self.decoding)
        done = []
        for job in grown:
            job.generated += 1
            job.context += 1
            if job.generated >= job.output:
                done.append(job)
        self._kv += decodes
        first: list[Job] = []
        for job, share in shares:
            job.left -= share
            job.context += share
            if job.left:
                continue
            self.prompts.remove(job)
            job.generated += 1
            if job.first_at is None:
                first.append(job)
            else:
                job.breaks.append(now + seconds - job.last_at)
                grown.append(job)
            job.segments.append((number + 1, -1))
            if job.generated >= job.output:
                job.segments.pop()
                done.append(job)
            else:
                self.decoding.append(job)
                self._kv += job.context
        for job in done:
            if job in self.decoding:
                self.decoding.remove(job)
                self._kv -= job.context
                self._close_segment(job)
        return Step(StepSample(seconds, prefill, decodes, kv, context), began, first, grown, done)

    def gaps(self, job: Job) -> list[float]:
        gaps = list(job.breaks)
        for start, end in job.segments:
            gaps += self.steps[start:end]
        return gaps

    def _close_segment(self, job: Job) -> None:
        start, _ = job.segments[-1]
        job.segments[-1] = start, len(self.steps)

    def _admit(self) -> list[Job]:
        began: list[Job] = []
        self.waiting.sort(key=lambda job: job.priority)
        while self.waiting and self.running < self.slots:
            job = self.waiting.pop(0)
            self.prompts.append(job)
            if not job.started:
                job.started = True
                began.append(job)
        return began


def in_place(prompts: Sequence[Job], budget: int) -> list[tuple[Job, int]]:
    """Strictly in the order given."""
    shares = []
    for job in prompts:
        share = min(job.left, budget)
        shares.append((job, share))
        budget -= share
    return shares


class HalfToTheShortest:
    """As the engine's planner does: half of the budget to the first in place, half to the most
    urgent and shortest."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, prompts: Sequence[Job], budget: int) -> list[tuple[Job, int]]:
        if not prompts:
            return []
        self._turn ^= 1
        placed = sorted(prompts, key=lambda job: job.priority)
        shares = dict.fromkeys(placed, 0)
        head = placed[0]
        shares[head] = min(head.left, (budget + self._turn) // 2)
        left = budget - shares[head]
        for job in sorted(placed, key=lambda job: (job.priority, job.left)):
            extra = min(job.left - shares[job], left)
            shares[job] += extra
            left -= extra
        return list(shares.items())


def fixed_budget(tokens: int) -> Budget:
    return lambda decodes, *_: tokens - decodes


def inverse_budget(target_s: float, eta: float, idle: int = 2048) -> Budget:
    """What the step model leaves beside the decodes, with a safety factor."""

    def budget(decodes: int, kv: int, context: int) -> int:
        if not decodes:
            return idle
        fixed = 0.005004 - 1.42e-5 * decodes + 1.663409e-7 * kv + 2.727223e-6 * context
        tokens = math.floor((eta * target_s - fixed) / 9.582093e-5)
        return min(max(tokens, 64), 2048)

    return budget


def quantile(values: Sequence[float], level: float) -> float:
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, math.ceil(level * len(ordered)) - 1)]
