"""Entries in this process's memory, within a budget of bytes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace.caching.base import TierStats
from headrace.caching.entry import Entry
from headrace.caching.sketch import FrequencySketch
from headrace.core.clock import Clock

__all__ = ["MemoryTier"]

_OVERHEAD = 400
"""Bytes an entry takes beside its log: key, slot, entry, heap items, dict slot. Measured."""
_TYPICAL_ENTRY = 2048
_LEAST_S = 1e-3


@dataclass(slots=True)
class _Slot:
    entry: Entry
    size: int
    hits: int
    priority: float
    number: int


class MemoryTier:
    """Keeps what saves the most seconds per byte: GDSF (Cherkasova, 1998), in which an entry's
    priority is

        L + hits * saved_s / size

    and the least one goes first; L is the priority of the last one that went, so that what was
    once popular ages. Where others must go for it, a newcomer is let in only if it is expected to
    save more than they do, by how often each was asked for lately (TinyLFU). So a scan of requests
    that never come back displaces nothing. Event loop only.
    """

    name = "memory"

    def __init__(self, max_bytes: int, clock: Clock) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._slots: dict[bytes, _Slot] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._sketch = FrequencySketch(max_bytes // _TYPICAL_ENTRY)
        self._numbers = itertools.count()
        self._floor = 0.0
        self._bytes = 0
        self._hits = self._misses = self._stores = self._evictions = self._dropped = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    async def entries(self) -> AsyncIterator[tuple[bytes, Entry]]:
        for key in tuple(self._slots):
            slot = self._slots.get(key)
            if slot is not None and slot.entry.expires > self._clock.wall():
                yield key, slot.entry

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    async def get(self, key: bytes) -> Entry | None:
        return self.look(key)

    def look(self, key: bytes) -> Entry | None:
        """`get` without waiting."""
        self._sketch.add(key)
        slot = self._slots.get(key)
        if slot is None or slot.entry.expires <= self._clock.wall():
            if slot is not None:
                self._drop(key, slot)
            self._misses += 1
            return None
        self._hits += 1
        slot.hits += 1
        self._rank(key, slot)
        return slot.entry

    def put(self, key: bytes, entry: Entry) -> None:
        old = self._slots.get(key)
        hits = 1
        if old is not None:
            hits = old.hits
            self._drop(key, old)
        size = entry.size + _OVERHEAD
        if entry.expires <= self._clock.wall():
            return
        if size > self.max_bytes or not self._make_room(key, entry, size):
            self._dropped += 1
            return
        slot = _Slot(entry, size, hits, 0.0, 0)
        self._slots[key] = slot
        self._bytes += size
        self._stores += 1
        self._rank(key, slot)

    def remove(self, key: bytes) -> None:
        slot = self._slots.get(key)
        if slot is not None:
            self._drop(key, slot)

    def clear(self) -> None:
        self._slots.clear()
        self._heap.clear()
        self._bytes = 0

    def stats(self) -> TierStats:
        return TierStats(
            entries=len(self._slots),
            bytes=self._bytes,
            hits=self._hits,
            misses=self._misses,
            stores=self._stores,
            evictions=self._evictions,
            dropped=self._dropped,
        )

    def _make_room(self, key: bytes, entry: Entry, size: int) -> bool:
        """Evicts for it, unless what would have to go is worth more."""
        spare = self._bytes + size - self.max_bytes
        if spare <= 0:
            return True
        worth = self._worth(key, entry)
        victims: list[tuple[float, int, bytes]] = []
        now = self._clock.wall()
        freed, given_up = 0, 0.0
        while freed < spare:
            item = heapq.heappop(self._heap)
            slot = self._slots.get(item[2])
            if slot is None or slot.number != item[1]:
                continue
            victims.append(item)
            freed += slot.size
            if slot.entry.expires > now:
                given_up += self._worth(item[2], slot.entry)
            if given_up > worth:
                for back in victims:
                    heapq.heappush(self._heap, back)
                return False
        for priority, _, victim in victims:
            self._floor = max(self._floor, priority)
            self._drop(victim, self._slots[victim])
            self._evictions += 1
        return True

    def _worth(self, key: bytes, entry: Entry) -> float:
        """Seconds it is expected to save until the sketch is halved."""
        return self._sketch.count(key) * max(entry.saved_s, _LEAST_S)

    def _rank(self, key: bytes, slot: _Slot) -> None:
        saved_s = max(slot.entry.saved_s, _LEAST_S)
        slot.priority = self._floor + slot.hits * saved_s / slot.size
        slot.number = next(self._numbers)
        heapq.heappush(self._heap, (slot.priority, slot.number, key))
        if len(self._heap) > 64 + 4 * len(self._slots):
            self._heap = [(s.priority, s.number, k) for k, s in self._slots.items()]
            heapq.heapify(self._heap)

    def _drop(self, key: bytes, slot: _Slot) -> None:
        del self._slots[key]
        self._bytes -= slot.size
