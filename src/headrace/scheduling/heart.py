"""The scheduler without an event loop: every event of a request's life, and what follows from it.

Production wraps it in tickets (`headrace.scheduling.scheduler`), simulations call it directly. Each
method is one event at `clock.monotonic()`; turns, revocations and refusals that follow are given
within it by `Entry.wake` and `Entry.interrupt`, which must not call back.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

from headrace.core.clock import Clock
from headrace.core.errors import DeadlineExceeded
from headrace.core.request import Request
from headrace.scheduling.admission import Admission
from headrace.scheduling.base import Claim, Cost, Interrupt, QueueStats, StepSample
from headrace.scheduling.books import Books
from headrace.scheduling.entry import Entry, State
from headrace.scheduling.forecast import Forecaster
from headrace.scheduling.lengths import Forecast
from headrace.scheduling.policy import SchedulingPolicy
from headrace.scheduling.turns import Turns

__all__ = ["Heart"]

_PASSED = "The deadline of the request has passed."
_NO_FORECAST = Forecast(0.0, 0, 0)
_WORTH_LEARNING = 0.25
"""Share of the target; shorter waits say nothing of those that decide about admission."""
_QUEUED = (State.ADMITTED, State.WAITING)


class Heart:
    """`capacity` is how many choices the backend runs at once, and may change. `preempt`, if the
    backend can, puts a running request back into the backend's own queue. `timer` measures what
    decisions cost."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        *,
        capacity: Callable[[], int],
        clock: Clock,
        rng: random.Random,
        forecaster: Forecaster,
        preempt: Callable[[Entry], None] | None = None,
        timer: Callable[[], float] | None = None,
    ) -> None:
        self.books = Books(policy, capacity=capacity, clock=clock, forecaster=forecaster)
        self._admission = Admission(self.books, rng)
        self._turns = Turns(self.books, preempt=preempt, timer=timer)
        self._numbers = 0
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._last_first_token = -math.inf

    def stats(self) -> QueueStats:
        return QueueStats(self.books.slots.total, sum(self.books.backlog.choices))

    # The life of a request.

    def admit(
        self,
        request: Request,
        cost: Cost,
        claim: Claim,
        interrupt: Interrupt,
        wake: Callable[[], None],
    ) -> Entry:
        """Raises Overloaded or DeadlineExceeded."""
        books = self.books
        now = books.now()
        self._numbers += 1
        entry = Entry(
            number=self._numbers,
            request=request,
            claim=claim,
            cost=cost,
            interrupt=interrupt,
            wake=wake,
            arrival=now,
            choices=cost.choices,
            tokens=0,
            forecast=_NO_FORECAST,
        )
        books.estimate(entry, cost)
        if claim.deadline is not None:
            self._check_deadline(entry, claim.deadline, now)
        self._admission.make_room(entry)
        wait = books.wait_s(claim.priority_class) or 0.0
        if wait > _WORTH_LEARNING * books.target_s(claim.priority_class):
            entry.predicted_s = wait + books.prefill_s(entry)
        books.counters.admitted[claim.priority_class] += 1
        books.slots.seen(entry, now)
        books.hold(entry)
        if claim.deadline is not None:
            self._remind(entry, claim.deadline)
        return entry

    def ask(self, entry: Entry, cost: Cost) -> None:
        """The request is ready for its turn. `wake` is called when it comes, possibly within."""
        if entry.state is not State.ADMITTED:
            return
        books = self.books
        now = books.now()
        if cost != entry.cost and not entry.visit:
            books.unhold(entry)
            books.estimate(entry, cost)
            books.hold(entry)
        books.enqueue(entry, now)
        if entry.claim.deadline is not None:
            self._remind(entry, entry.claim.deadline - books.prefill_s(entry))
        self._turns.give(now)
        if entry.dispatched_at is None:
            self._turns.revoke_for(entry, now)

    def started(self, entry: Entry, cached_tokens: int = 0) -> None:
        if entry.state is not State.DISPATCHED:
            return
        books = self.books
        entry.state = State.RUNNING
        del books.unstarted[entry]
        books.running[entry] = None
        spared = min(cached_tokens - entry.cost.prompt_tokens + entry.tokens, entry.tokens)
        if spared > 0 and books.prefills.holds(entry):
            books.prefills.remove(entry)
            entry.tokens -= spared
            books.charge(entry, -spared * books.speed.prefill_token_s)
            books.prefills.add(entry)

    def generated(self, entry: Entry, tokens: int) -> None:
        if entry.state is not State.RUNNING or tokens < 1:
            return
        books = self.books
        now = books.now()
        entry.generated += tokens
        if entry.first_token_at is not None:
            seconds = (now - entry.last_token_at) * entry.choices
            books.speed.next_tokens(tokens, seconds, books.slots.total)
            entry.last_token_at = now
            return
        entry.first_token_at = entry.last_token_at = now
        if entry.predicted_s:
            books.waits.observe(entry.predicted_s, now - entry.arrival)
        dispatched = now if entry.dispatched_at is None else entry.dispatched_at
        if any(books.backlog.choices):
            alone = now - max(dispatched, self._last_first_token)
            books.speed.first_token(entry.tokens, alone)
        self._last_first_token = now
        books.prefills.remove(entry)
        self._turns.give(now)

    def choice_finished(self, entry: Entry, *, natural: bool = True) -> None:
        if entry.state not in (State.DISPATCHED, State.RUNNING):
            return
        books = self.books
        now = books.now()
        books.slots.give(entry, 1, now)
        entry.choices -= 1
        entry.cut += not natural
        if entry.dispatched_at is not None:
            books.speed.resided(now - entry.dispatched_at)
        if not entry.choices:
            self._learn(entry)
            books.close(entry)
        self._turns.give(now)

    def release(self, entry: Entry) -> None:
        """Idempotent."""
        books = self.books
        if entry.state is State.GONE:
            return
        if entry.state in _QUEUED:
            books.drop(entry)
        else:
            self._learn(entry)
            books.slots.give(entry, entry.choices, books.now())
            books.close(entry)
        self._turns.give(books.now())

    # The backend, the operator and the clock.

    def observe_step(self, sample: StepSample) -> None:
        books = self.books
        now = books.now()
        books.prefills.advance(sample.prefill_tokens)
        books.speed.observe_step(sample, backlogged=books.prefills.remaining > 0)
        self._turns.give(now)
        if books.policy.preemption:
            self._turns.preempt_one(now)

    def capacity_changed(self) -> None:
        self._turns.give(self.books.now())

    def configure(self, policy: SchedulingPolicy) -> None:
        """From now on. Keys of those that wait already stay."""
        self.books.configure(policy)
        self._turns.give(self.books.now())

    def next_timer(self) -> float | None:
        """When to call `expire`, in the clock's time."""
        while self._deadlines and self._deadlines[0][2].state is State.GONE:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> None:
        """Ends requests that have missed their deadline, or wait and cannot meet it any more."""
        while (due := self.next_timer()) is not None and due <= now:
            entry = heapq.heappop(self._deadlines)[2]
            deadline = entry.claim.deadline
            if deadline is None or entry.expired:
                continue
            if deadline > now and entry.state is not State.WAITING:
                continue
            entry.expired = True
            if entry.state in _QUEUED:
                self.books.drop(entry)
            self.books.counters.shed(entry.claim, "deadline")
            entry.interrupt(DeadlineExceeded(_PASSED, reason="deadline"))
        self._turns.give(now)

    def _check_deadline(self, entry: Entry, deadline: float, now: float) -> None:
        """Whether the first token can come in time. How long the answer gets is too uncertain to
        refuse for; what is not complete at the deadline is ended then."""
        wait = self.books.wait_s(entry.priority_class) or 0.0
        if now < deadline and now + wait + self.books.prefill_s(entry) <= deadline:
            return
        self.books.counters.shed(entry.claim, "deadline")
        raise DeadlineExceeded(
            _PASSED if deadline <= now else "The request cannot be answered before its deadline.",
            reason="deadline",
            queue_position=self.books.backlog.before(entry.priority_class)[0],
        )

    def _remind(self, entry: Entry, at: float) -> None:
        self._numbers += 1
        heapq.heappush(self._deadlines, (at, self._numbers, entry))

    def _learn(self, entry: Entry) -> None:
        """From the answer's length: of several choices, their mean."""
        if entry.first_token_at is None:
            return
        choices = entry.cost.choices
        length = round(entry.generated / choices)
        cut = entry.cut + entry.choices
        for index in range(choices):
            self.books.forecaster.observe(
                entry.request,
                entry.claim,
                entry.cost.prompt_tokens,
                length,
                natural=index >= cut,
            )
