"""Who may have another of the backend's running slots."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import TypeVar

from headrace.core.request import PriorityClass
from headrace.scheduling.entry import Entry
from headrace.scheduling.policy import SchedulingPolicy
from headrace.scheduling.reach import Reach

__all__ = ["Slots"]

_CLASSES = tuple(PriorityClass)
_MOST_FLOWS = 4096
_FLOOR = 0.5
_PRESSING = 0.7
_REACH_SHARE = 0.25
"""Of the slots kept for flows that will come back, divided by the number of flows."""
_SIMILAR = 1.05
_RATE = 0.02
_SMALL_BACKEND = 8

K = TypeVar("K")


class Slots:
    """Counts in choices.

    A class takes a slot only while all classes together fill less than its share, so that more
    urgent ones find one free. That alone would starve it beside a busy more urgent class: once a
    request has waited most of its slack, its class and the less urgent ones may always fill half
    of that share. The last `express` slots of each share go only to flows below their weighted
    share of the slots, and all but one of these to requests that are not larger than usual, since
    they are soon done with it. Beyond that, what a flow has lately filled of its weighted share
    stays within its reach: flows above their own share of the same class leave it free for it. So
    a flood takes no slot that a steady flow comes back for. Nothing is kept for classes and flows
    not seen lately; one flow alone uses all.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.total = 0
        self.by_class = [0] * len(_CLASSES)
        self.usual_work = 0.0
        self._by_flow: dict[str, int] = {}
        self._by_class_and_flow: dict[tuple[PriorityClass, str], int] = {}
        self._reach = Reach(policy.reach_s)
        self._class_seen = [-math.inf] * len(_CLASSES)
        self._flow_seen: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._weights = 0.0
        self._preempted: deque[Entry] = deque()
        self._limits_of = 0
        self._limits_until = -math.inf
        self._known_limits: tuple[int, ...] = ()

    @property
    def policy(self) -> SchedulingPolicy:
        return self._policy

    @policy.setter
    def policy(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._reach.half_life_s = policy.reach_s
        self._limits_until = -math.inf

    def seen(self, entry: Entry, now: float) -> None:
        """A request has come in, or has its turn."""
        if self._class_seen[entry.priority_class] < now - self._policy.memory_s:
            self._limits_until = -math.inf
        self._class_seen[entry.priority_class] = now
        flows = self._flow_seen
        before = flows.pop(entry.flow, None)
        if before is not None:
            self._weights -= before[1]
        flows[entry.flow] = now, entry.claim.weight
        self._weights += entry.claim.weight
        while True:
            name, (at, weight) = next(iter(flows.items()))
            if at >= now - self._policy.memory_s and len(flows) <= _MOST_FLOWS:
                return
            del flows[name]
            self._weights -= weight

    def take(self, entry: Entry, now: float) -> None:
        self.seen(entry, now)
        self.usual_work += (_RATE if self.usual_work else 1.0) * (entry.work - self.usual_work)
        self.total += entry.choices
        self.by_class[entry.priority_class] += entry.choices
        self._count(entry, entry.choices, now)

    def give(self, entry: Entry, choices: int, now: float) -> None:
        """Some of the entry's choices are out of the backend."""
        self.total -= choices
        self.by_class[entry.priority_class] -= choices
        self._count(entry, -choices, now)
        if entry in self._preempted:
            self._preempted.remove(entry)
        else:
            # The backend lets preempted sequences go on before anyone new.
            for _ in range(min(choices, len(self._preempted))):
                self._preempted.popleft()

    def preempted(self, entry: Entry) -> None:
        """Its one choice has been put back into the backend's own queue."""
        self._preempted.append(entry)

    def is_preempted(self, entry: Entry) -> bool:
        return entry in self._preempted

    @property
    def flows_seen(self) -> int:
        """How many flows came or had a turn lately."""
        return len(self._flow_seen)

    @property
    def occupied(self) -> int:
        return self.total - len(self._preempted)

    def admits(self, entry: Entry, now: float, capacity: int) -> bool:
        """Whether there is room for it. Alone, anything runs."""
        if not self.total:
            return True
        wanted = self.occupied + entry.choices
        kept = self._kept_from(entry, now, capacity)
        limits = self._limits(now, capacity)
        if wanted > (min(limits[0], capacity) - kept if kept else limits[0]):
            return False
        own = wanted
        for priority_class in range(1, entry.priority_class + 1):
            own -= self.by_class[priority_class - 1]
            limit = limits[priority_class]
            within = min(limit, capacity) - kept if kept else limit
            if wanted > within and (
                own > max(1.0, _FLOOR * limit) or not self._presses(entry, priority_class, now)
            ):
                return False
        return True

    def _presses(self, entry: Entry, priority_class: int, now: float) -> bool:
        """Whether it has waited for most of the head start that others had."""
        slack = self._policy.classes[_CLASSES[priority_class]].slack_s
        return now - entry.arrival >= _PRESSING * slack

    def _limits(self, now: float, capacity: int) -> tuple[int, ...]:
        """What all classes together may fill before each gets no more. Kept until a class comes
        up or has not been seen for long enough."""
        if now > self._limits_until or capacity != self._limits_of:
            memory = self._policy.memory_s
            latest, until = -math.inf, math.inf
            limits = []
            for priority_class, seen in zip(_CLASSES, self._class_seen, strict=True):
                limit = capacity + self._policy.look_ahead
                if latest >= now - memory:
                    share = self._policy.classes[priority_class].slots
                    limit = max(1, capacity - self._kept(1.0 - share, capacity))
                limits.append(limit)
                latest = max(latest, seen)
                if seen >= now - memory:
                    until = min(until, seen + memory)
            self._limits_of, self._limits_until = capacity, until
            self._known_limits = tuple(limits)
        return self._known_limits

    def open_classes(self, now: float, capacity: int) -> list[bool]:
        """Which classes anybody of could have a slot; what `admits` says of one may be stricter."""
        if not self.total:
            return [True] * len(_CLASSES)
        own = wanted = self.occupied + 1
        limits = self._limits(now, capacity)
        is_open = wanted <= limits[0]
        found = [is_open]
        for priority_class in range(1, len(_CLASSES)):
            own -= self.by_class[priority_class - 1]
            limit = limits[priority_class]
            is_open = is_open and (wanted <= limit or own <= max(1.0, _FLOOR * limit))
            found.append(is_open)
        return found

    def room(
        self, priority_class: PriorityClass, now: float, capacity: int, *, express: bool = False
    ) -> int:
        """Free slots for an ordinary request of the class, or for a favoured one."""
        limit = min(capacity, self._limits(now, capacity)[priority_class])
        if priority_class and not express and self.flows_seen > 1:
            limit -= self._kept(self._policy.express, capacity)
        return max(0, limit - self.occupied)

    def share_used(self, entry: Entry, capacity: int) -> float:
        """What its flow would fill with it, over the flow's weighted share of the slots."""
        used = self._by_flow.get(entry.flow, 0) + entry.choices
        weight = entry.claim.weight
        if weight >= self._weights:
            return used / capacity
        share = weight / self._weights * capacity
        return used / share if share > 1.0 else float(used)

    def favoured(self, entry: Entry, capacity: int) -> bool:
        """Whether its flow fills no more than its share of the slots with it."""
        return (
            len(self._flow_seen) < 2
            or not self._policy.express
            or self.share_used(entry, capacity) <= 1.0
        )

    def _kept_from(self, entry: Entry, now: float, capacity: int) -> int:
        """How many slots of its class's share are closed to it."""
        if self.favoured(entry, capacity):
            return 0
        express = self._kept(self._policy.express, capacity)
        if express and entry.work <= _SIMILAR * self.usual_work:
            express = 1
        # Of many flows some are always back, so that less need be kept for each.
        most = _REACH_SHARE * capacity / self.flows_seen
        kept = self._reach.kept_from(entry, now, capacity / self._weights, most)
        return max(express, kept)

    def by_class_and_flow(self) -> dict[tuple[PriorityClass, str], int]:
        return dict(self._by_class_and_flow)

    def _count(self, entry: Entry, choices: int, now: float) -> None:
        """Flows without any are forgotten."""
        _add(self._by_flow, entry.flow, choices)
        key = entry.priority_class, entry.flow
        _add(self._by_class_and_flow, key, choices)
        self._reach.changed(entry, self._by_class_and_flow.get(key, 0), now)

    @staticmethod
    def _kept(share: float, capacity: int) -> int:
        """A share of the slots as a number; none of very few for a small share."""
        exact = share * capacity
        return math.ceil(exact - 1e-9) if capacity >= _SMALL_BACKEND else round(exact)


def _add(counts: dict[K, int], key: K, number: int) -> None:
    left = counts.get(key, 0) + number
    if left:
        counts[key] = left
    else:
        counts.pop(key, None)
