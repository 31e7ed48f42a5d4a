"""A remote server as a plant to be controlled: slots, a queue before them, and speeds."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from headrace.core.clock import VirtualClock
from headrace.scheduling.limiter import AdaptiveLimiter, Failure, Permit


@dataclass(slots=True)
class Job:
    permit: Permit
    prompt: int
    tokens: int


@dataclass
class Plant:
    """`slots` answers at once, the rest queues in there, first come, first served.

    A token takes `base_itl + itl_each * running` seconds, a prompt `ttft + per_token * prompt`.
    With `max_queue` set, what finds the queue full is refused with 429 and `retry_after`.
    """

    clock: VirtualClock
    limiter: AdaptiveLimiter
    slots: int
    rng: random.Random
    ttft: float = 0.1
    per_token: float = 2e-4
    base_itl: float = 0.02
    itl_each: float = 0.0
    noise: float = 0.1
    mean_tokens: int = 100
    max_queue: int | None = None
    retry_after: float | None = None
    history: list[tuple[float, int]] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    completed: int = 0

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._queue: deque[Job] = deque()
        self.running = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def run(self, seconds: float, *, rate: float | None = None) -> None:
        """For so long, with more to do than fits, or `rate` requests a second."""
        end = self.clock.monotonic() + seconds
        offered = self.clock.monotonic()
        next_record = self.clock.monotonic()
        while True:
            now = self.clock.monotonic()
            if rate is None:
                while self.limiter.has_room(prompt := self.rng.randint(50, 1000)):
                    self._send(prompt)
            else:
                while offered <= now:
                    offered += self.rng.expovariate(rate)
                    prompt = self.rng.randint(50, 1000)
                    if self.limiter.has_room(prompt):
                        self._send(prompt)
            if now >= next_record:
                self.history.append((now, self.limiter.limit))
                next_record += 0.1
            upcoming = min(now + 0.1, self._events[0][0] if self._events else end)
            if min(upcoming, end) >= end:
                self.clock.advance(end - now)
                return
            self.clock.advance(max(0.0, upcoming - now))
            while self._events and self._events[0][0] <= self.clock.monotonic():
                heapq.heappop(self._events)[2]()

    def limits(self, last_s: float) -> list[int]:
        since = self.clock.monotonic() - last_s
        return [limit for when, limit in self.history if when >= since]

    def _noisy(self, seconds: float) -> float:
        return seconds * self.rng.lognormvariate(0.0, self.noise)

    def _send(self, prompt: int) -> None:
        permit = self.limiter.start(prompt)
        self.started.append(self.clock.monotonic())
        tokens = 1 + round(self.rng.expovariate(1 / self.mean_tokens))
        full = self.running >= self.slots
        if self.max_queue is not None and full and len(self._queue) >= self.max_queue:
            self.refused.append(self.clock.monotonic())
            self.at(
                self.clock.monotonic() + 0.01,
                lambda: permit.fail(Failure.PUSHBACK, self.retry_after),
            )
            return
        self._queue.append(Job(permit, prompt, tokens))
        self._fill()

    def _fill(self) -> None:
        while self._queue and self.running < self.slots:
            job = self._queue.popleft()
            self.running += 1
            prefill = self._noisy(self.ttft + self.per_token * job.prompt)
            self.at(self.clock.monotonic() + prefill, partial(self._token, job, 1))

    def _token(self, job: Job, count: int) -> None:
        job.permit.tokens(count, self.clock.monotonic())
        job.tokens -= count
        if job.tokens <= 0:
            job.permit.finish()
            self.completed += 1
            self.running -= 1
            self._fill()
            return
        chunk = min(10, job.tokens)
        seconds = self._noisy(chunk * (self.base_itl + self.itl_each * self.running))
        self.at(self.clock.monotonic() + seconds, lambda: self._token(job, chunk))
