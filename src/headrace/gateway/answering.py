"""How an answer comes about: stored, shared with a twin, or computed."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import replace

import msgspec

from headrace.caching import Found, Question, ResponseCache
from headrace.core.clock import Clock
from headrace.core.errors import DeadlineExceeded
from headrace.core.events import CacheNote, Event, Start, Usage
from headrace.core.request import PriorityClass
from headrace.gateway.computing import Job, Turned, computed
from headrace.gateway.flights import Flight, FlightLostError, Flights
from headrace.gateway.lifeline import Lifeline
from headrace.gateway.tokenising import Tokeniser
from headrace.scheduling.quotas import Quotas
from headrace.telemetry import RequestRecord

__all__ = ["Answers", "replayed"]


class Answers:
    """Event loop only. `enter` and `leave` are told of every generation that is nobody's alone."""

    def __init__(
        self,
        cache: ResponseCache | None,
        quotas: Quotas,
        tokeniser: Tokeniser,
        clock: Clock,
        *,
        enter: Callable[[Lifeline], None],
        leave: Callable[[Lifeline], None],
    ) -> None:
        self._cache = cache
        self._quotas = quotas
        self._tokeniser = tokeniser
        self._clock = clock
        self._flights = Flights()
        self._enter = enter
        self._leave = leave

    @property
    def flights(self) -> int:
        """Generations under way that twins may join."""
        return len(self._flights)

    async def computed(
        self, job: Job, question: Question | None, life: Lifeline, turned: Turned
    ) -> AsyncGenerator[Event, None]:
        """Computed, and kept if it comes to its end."""
        cache, recorder = self._cache, None
        if cache is not None and question is not None:
            cache.missed(question)
            recorder = cache.record(question)
        reason = None if question is None else question.bypassed
        told = CacheNote("miss") if reason is None else CacheNote("bypass", reason=reason)
        events = computed(job, life, turned, quotas=self._quotas, tokeniser=self._tokeniser)
        async with aclosing(events):
            async for event in events:
                if recorder is not None:
                    recorder.add(event)
                    if isinstance(event, Usage):
                        recorder.commit()
                if cache is not None and isinstance(event, Start):
                    yield _noted(event, told)
                else:
                    yield event

    async def shared(
        self, job: Job, question: Question, life: Lifeline, record: RequestRecord
    ) -> AsyncGenerator[Event, None]:
        """One generation for this request and its twins. Should it break before it has begun, one
        of them tries again, once."""
        own_class = job.claim.priority_class
        attempts = 0
        with self._deadline(job, life):
            while True:
                flight = self._flights.joinable(question.key, own_class)
                if joined := flight is not None:
                    self._quotas.count(job.tenant.name, job.tenant.limits)
                else:
                    flight = self._flights.begin(
                        question.key, own_class, self._flown(job, question)
                    )
                try:
                    async with aclosing(flight.follow()) as events:
                        async for event in _waited(events, life):
                            if isinstance(event, Start):
                                record.turn(flight.priority_class, flight.turned_at)
                                yield _joined(event) if joined else event
                                continue
                            if joined and isinstance(event, Usage):
                                self._spared(event, flight)
                            yield event
                except FlightLostError as lost:
                    attempts += 1
                    if attempts > 1:
                        raise copy.copy(lost.cause) from None
                else:
                    return

    def _spared(self, usage: Usage, flight: Flight) -> None:
        now = self._clock.monotonic()
        turned = now if flight.turned_at is None else flight.turned_at
        if self._cache is not None:
            self._cache.shared(usage, now - turned)

    def _flown(
        self, job: Job, question: Question
    ) -> Callable[[Flight], AsyncGenerator[Event, None]]:
        """What a flight runs. Whoever follows it has a deadline of its own."""
        job = replace(job, claim=replace(job.claim, deadline=None))

        async def fly(flight: Flight) -> AsyncGenerator[Event, None]:
            life = Lifeline()

            def turned(priority_class: PriorityClass) -> None:
                flight.priority_class = priority_class
                flight.turned_at = self._clock.monotonic()

            self._enter(life)
            try:
                async with AsyncExitStack() as stack:
                    events = self.computed(job, question, life, turned)
                    if self._cache is not None:
                        elsewhere = await stack.enter_async_context(self._cache.lead(question))
                        events = events if elsewhere is None else replayed(elsewhere)
                    await stack.enter_async_context(aclosing(events))
                    async for event in events:
                        yield event
            finally:
                self._leave(life)

        return fly

    @contextmanager
    def _deadline(self, job: Job, life: Lifeline) -> Iterator[None]:
        deadline = job.claim.deadline
        if deadline is None:
            yield
            return
        error = DeadlineExceeded("The deadline of the request has passed.", reason="deadline")
        left = deadline - self._clock.monotonic()
        timer = asyncio.get_running_loop().call_later(max(0.0, left), life.interrupt, error)
        try:
            yield
        finally:
            timer.cancel()


async def replayed(found: Found) -> AsyncGenerator[Event, None]:
    """A stored answer as a stream."""
    for event in found.events:
        yield _noted(event, found.note) if isinstance(event, Start) else event


async def _waited(
    events: AsyncGenerator[Event, None], life: Lifeline
) -> AsyncGenerator[Event, None]:
    """The events, each wait for one ended by the lifeline."""
    while True:
        try:
            event = await life.wait(events.__anext__)
        except StopAsyncIteration:
            return
        yield event


def _noted(start: Start, note: CacheNote) -> Start:
    return msgspec.structs.replace(start, cache=note)


def _joined(start: Start) -> Start:
    """As whoever joined is told it, unless nothing was computed at all."""
    if start.cache is not None and start.cache.status == "hit":
        return start
    return _noted(start, CacheNote("coalesced"))
