"""What the scheduler counts about itself."""

from __future__ import annotations

import math

from headrace.core.request import PriorityClass
from headrace.scheduling.base import Claim
from headrace.scheduling.entry import Entry, Lane

__all__ = ["Counters"]

_HALF_LIFE_S = 60.0
_MOST_FLOWS = 4096


class Counters:
    """Totals since the start, by class where they are lists. An overtake is a turn for somebody
    while an older request of the same class waits."""

    def __init__(self) -> None:
        classes = len(PriorityClass)
        self.admitted = [0] * classes
        self.turns = [0] * classes
        self.sheds: dict[tuple[str, PriorityClass], int] = {}
        self.overtakes = 0
        self.longest_overtake_s = 0.0
        self.guard_turns = 0
        self.late_turns = 0
        self.revoked = 0
        self.preempted = 0
        self.decisions = 0
        self.decision_seconds = 0.0
        self.longest_wait_s = [0.0] * classes
        self._service: dict[str, tuple[float, float]] = {}

    def shed(self, claim: Claim, reason: str) -> None:
        key = reason, claim.priority_class
        self.sheds[key] = self.sheds.get(key, 0) + 1

    def turn(self, entry: Entry, now: float, oldest: Entry | None) -> None:
        own = entry.priority_class
        self.turns[own] += 1
        self.guard_turns += entry.by_guard
        self.late_turns += entry.lane is Lane.LATE
        self.longest_wait_s[own] = max(self.longest_wait_s[own], now - entry.arrival)
        if oldest is not None and oldest is not entry and oldest.arrival < entry.arrival:
            self.overtakes += 1
            gap = entry.arrival - oldest.arrival
            self.longest_overtake_s = max(self.longest_overtake_s, gap)

    def decided(self, seconds: float) -> None:
        self.decisions += 1
        self.decision_seconds += seconds

    def served(self, entry: Entry, work: float, now: float) -> None:
        """Work per weight, fading with a half-life of a minute."""
        service, at = self._service.get(entry.flow, (0.0, now))
        faded = service * math.exp2((at - now) / _HALF_LIFE_S)
        self._service[entry.flow] = faded + work / entry.claim.weight, now
        if len(self._service) > _MOST_FLOWS:
            since = now - 5 * _HALF_LIFE_S
            recent = sorted(self._service.items(), key=lambda item: -item[1][1])
            self._service = {f: s for f, s in recent[: _MOST_FLOWS // 2] if s[1] >= since}

    def jain(self, now: float) -> float | None:
        """Jain's index of fairness over flows served lately: 1 if all had the same per weight."""
        recent: list[float] = [
            s * math.exp2((at - now) / _HALF_LIFE_S)
            for s, at in self._service.values()
            if now - at < 5 * _HALF_LIFE_S
        ]
        recent = [s for s in recent if s > 1e-9]
        if not recent:
            return None
        total = sum(recent)
        return total * total / (len(recent) * sum(s * s for s in recent))
