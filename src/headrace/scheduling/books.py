"""Everything the scheduler knows, and the accounts that keep it consistent."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.clock import Clock
from headrace.core.request import PriorityClass
from headrace.scheduling.base import Cost
from headrace.scheduling.calibration import WaitCalibration
from headrace.scheduling.counters import Counters
from headrace.scheduling.entry import Entry, State
from headrace.scheduling.forecast import Forecaster
from headrace.scheduling.policy import SchedulingPolicy
from headrace.scheduling.prefills import Prefills
from headrace.scheduling.queue import ClassQueue, Flow
from headrace.scheduling.slots import Slots
from headrace.scheduling.speed import BackendSpeed
from headrace.scheduling.targets import target_s

__all__ = ["Backlog", "Books"]

_ENGINE_SHARING = 1.5
"""A prompt takes this much longer than alone, beside the others being computed."""


class Backlog:
    """What has been admitted and is not with the backend, by class: choices, prompt tokens."""

    def __init__(self) -> None:
        self.choices = [0] * len(PriorityClass)
        self.tokens = [0] * len(PriorityClass)

    def count(self, entry: Entry, sign: int) -> None:
        self.choices[entry.priority_class] += sign * entry.choices
        self.tokens[entry.priority_class] += sign * entry.tokens

    def before(self, priority_class: PriorityClass) -> tuple[int, int]:
        """Choices and tokens of this class and the more urgent ones."""
        upto = priority_class + 1
        return sum(self.choices[:upto]), sum(self.tokens[:upto])


class Books:
    """An entry is in exactly one place: the backlog (with a queue, once it waits) or the slots."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        *,
        capacity: Callable[[], int],
        clock: Clock,
        forecaster: Forecaster,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.forecaster = forecaster
        self.speed = BackendSpeed()
        self.counters = Counters()
        self.queues = [ClassQueue(policy) for _ in PriorityClass]
        self.backlog = Backlog()
        self.slots = Slots(policy)
        self.prefills = Prefills()
        self.waits = WaitCalibration()
        self.unstarted: dict[Entry, None] = {}
        self.running: dict[Entry, None] = {}
        self._capacity = capacity

    # Questions.

    @property
    def capacity(self) -> int:
        return max(1, self._capacity())

    def now(self) -> float:
        return self.clock.monotonic()

    def target_s(self, priority_class: PriorityClass) -> float:
        """The time to the first token that the class may take, now."""
        capacity = self.capacity if self.policy.auto_targets else 0
        return target_s(self.policy, priority_class, self.speed, capacity)

    def prefill_s(self, entry: Entry) -> float:
        rate = self.speed.prefill_rate
        return 0.0 if rate is None else entry.tokens / rate

    def wait_s(self, priority_class: PriorityClass) -> float | None:
        """How long a request that came now would wait for its turn; None before that is known.

        Both the prompts before it and the slots it waits for must pass. By Little's law slots
        become free at capacity/residence a second.
        """
        rate = self.speed.prefill_rate
        if rate is None:
            return None
        choices, tokens = self.backlog.before(priority_class)
        prompts = (tokens + self.prefills.before(priority_class)) / rate
        capacity = self.capacity
        short = choices + 1 - self.slots.room(priority_class, self.now(), capacity)
        if short <= 0 or self.speed.residence_s is None:
            return prompts
        return max(prompts, short * self.speed.residence_s / capacity)

    def flow_of(self, entry: Entry) -> Flow:
        return self.queues[entry.priority_class].flow(entry.flow, entry.claim.weight)

    # Changes.

    def configure(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.slots.policy = policy
        for queue in self.queues:
            queue.configure(policy)

    def estimate(self, entry: Entry, cost: Cost) -> None:
        """Sets what follows from the cost: tokens, work, place. Not for one in the books."""
        policy = self.policy
        entry.cost = cost
        entry.forecast = self.forecaster.forecast(
            entry.request, entry.claim, cost.prompt_tokens, cost.max_tokens
        )
        entry.tokens = max(1, cost.prompt_tokens - cost.cached_tokens)
        entry.work = self.speed.work(entry.tokens, entry.forecast.mean * cost.choices)
        entry.latest = entry.arrival - _ENGINE_SHARING * self.prefill_s(entry)
        slack = policy.classes[entry.priority_class].slack_s
        entry.key = entry.arrival + slack + min(policy.kappa * entry.work, policy.cost_cap_s)

    def hold(self, entry: Entry) -> None:
        """Into the backlog."""
        self.backlog.count(entry, 1)
        self.flow_of(entry).hold(entry)

    def unhold(self, entry: Entry) -> None:
        self.backlog.count(entry, -1)
        self.flow_of(entry).unhold(entry)

    def enqueue(self, entry: Entry, now: float) -> None:
        entry.state = State.WAITING
        target = self.target_s(entry.priority_class)
        self.queues[entry.priority_class].add(entry, self.flow_of(entry), now, target)

    def drop(self, entry: Entry) -> None:
        """Out of backlog and queue for good."""
        if entry.state is State.WAITING:
            self.queues[entry.priority_class].remove(entry, self.flow_of(entry))
        self.unhold(entry)
        entry.state = State.GONE

    def dispatch(self, entry: Entry, now: float) -> None:
        queue, flow = self.queues[entry.priority_class], self.flow_of(entry)
        queue.serve(entry, flow)
        self.unhold(entry)
        entry.state = State.DISPATCHED
        entry.dispatched_at = now
        self.unstarted[entry] = None
        self.charge(entry, entry.work)
        self.slots.take(entry, now)
        self.prefills.add(entry)
        self.speed.prompt(entry.tokens)

    def take_back(self, entry: Entry) -> None:
        """Undoes `dispatch`, but the request must ask again to wait."""
        del self.unstarted[entry]
        self.prefills.remove(entry)
        self.slots.give(entry, entry.choices, self.now())
        self.charge(entry, -entry.charged)
        entry.state = State.ADMITTED
        entry.dispatched_at = None
        entry.by_guard = False
        self.hold(entry)

    def charge(self, entry: Entry, work: float) -> None:
        self.queues[entry.priority_class].charge(self.flow_of(entry), work)
        entry.charged += work
        self.counters.served(entry, work, self.now())

    def close(self, entry: Entry) -> None:
        """Out of the backend for good: what it took is known, so the charge is put right."""
        self.unstarted.pop(entry, None)
        self.running.pop(entry, None)
        self.prefills.remove(entry)
        prompt = entry.tokens if entry.first_token_at is not None else 0
        self.charge(entry, self.speed.work(prompt, entry.generated) - entry.charged)
        entry.state = State.GONE
