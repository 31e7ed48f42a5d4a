"""Slots that a flow has lately used and will come back for."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from headrace.core.request import PriorityClass
from headrace.scheduling.entry import Entry

__all__ = ["Reach"]

_MOST_FLOWS = 256
_LEAST = 0.5

Key = tuple[PriorityClass, str]


@dataclass(slots=True)
class _Level:
    """How many slots a flow fills, and the most it has filled, which fades."""

    weight: float
    used: int
    most: float
    at: float

    def now(self, now: float, half_life_s: float) -> float:
        return max(float(self.used), self.most * math.exp2((self.at - now) / half_life_s))


class Reach:
    """Remembers how many slots each flow of a class has lately filled at once, which falls by half
    with every half-life. Only flows that fill fewer now are looked at: the others keep nothing from
    anybody."""

    def __init__(self, half_life_s: float) -> None:
        self.half_life_s = half_life_s
        self._levels: OrderedDict[Key, _Level] = OrderedDict()
        self._below: dict[Key, _Level] = {}

    def changed(self, entry: Entry, used: int, now: float) -> None:
        """The entry's flow now fills `used` slots of its class."""
        if self.half_life_s <= 0:
            return
        key = entry.priority_class, entry.flow
        known = self._levels.get(key)
        if known is None:
            known = self._levels[key] = _Level(entry.claim.weight, 0, 0.0, now)
            if len(self._levels) > _MOST_FLOWS:
                self._below.pop(self._levels.popitem(last=False)[0], None)
        self._levels.move_to_end(key)
        known.most = max(known.now(now, self.half_life_s), float(used))
        known.used, known.at, known.weight = used, now, entry.claim.weight
        if known.most > used:
            self._below[key] = known
        else:
            self._below.pop(key, None)

    def kept_from(self, entry: Entry, now: float, slots_per_weight: float, most: float) -> int:
        """How many free slots the other flows of its class have a claim to: up to what they lately
        filled, no more than their weighted share, and no more than `most` together."""
        if self.half_life_s <= 0:
            return 0
        kept = 0
        faded = []
        for key, known in self._below.items():
            if key[0] is not entry.priority_class or key[1] == entry.flow:
                continue
            most = known.now(now, self.half_life_s)
            if most - known.used < _LEAST:
                faded.append(key)
                continue
            within = min(math.ceil(most), math.floor(known.weight * slots_per_weight + 1e-9))
            kept += max(0, within - known.used)
        for key in faded:
            del self._below[key]
        return min(kept, math.floor(most))
