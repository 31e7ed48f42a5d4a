"""Entries in this process's memory, within a budget of bytes."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace.caching.base import TierStats
from headrace.caching.entry import Entry
from headrace.core.clock import Clock

__all__ = ["MemoryTier"]

_OVERHEAD = 400
"""Bytes an entry takes beside its log: key, slot, entry, heap items, dict slot. Measured."""
_GHOST_BYTES = 100
_GHOSTS = 2.0
"""So many keys of entries that had to go are remembered for each that is there."""
_NEWCOMERS = 0.05
"""Share of the budget for entries that have to prove themselves. Smaller is better for hits, as
long as a few answers fit."""
_LEAST_S = 1e-3


@dataclass(slots=True)
class _Slot:
    entry: Entry
    size: int
    hits: int
    proven: bool
    priority: float = 0.0
    number: int = 0


class MemoryTier:
    """Keeps what saves the most seconds per byte. A new entry waits in a small first-in-first-out
    queue; unless it is asked for there, it goes, and only its key is remembered, by which it is
    proven when it comes again (S3-FIFO: J. Yang et al., SOSP 2023). Among the proven ones the
    priority is

        L + hits * saved_s / size

    and the least one goes first; L is the priority of the last one that went, so that what was
    once popular ages (GDSF: L. Cherkasova, 1998). So a scan of requests that never come back
    displaces nothing. benchmarks/caching/eviction.py compares. Event loop only.
    """

    name = "memory"

    def __init__(self, max_bytes: int, clock: Clock) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._slots: dict[bytes, _Slot] = {}
        self._new: OrderedDict[bytes, None] = OrderedDict()
        self._new_bytes = 0
        self._heap: list[tuple[float, int, bytes]] = []
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
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
        slot = self._slots.get(key)
        if slot is None or slot.entry.expires <= self._clock.wall():
            if slot is not None:
                self._drop(key, slot)
            self._misses += 1
            return None
        self._hits += 1
        slot.hits += 1
        if slot.proven:
            self._rank(key, slot)
        return slot.entry

    def put(self, key: bytes, entry: Entry) -> None:
        hits, proven = 0, self._ghosts.pop(key, self) is None
        old = self._slots.get(key)
        if old is not None:
            hits, proven = old.hits, old.proven
            self._drop(key, old)
        size = entry.size + _OVERHEAD
        if entry.expires <= self._clock.wall():
            return
        if size > self.max_bytes:
            self._dropped += 1
            return
        self._make_room(size)
        slot = _Slot(entry, size, max(1, hits) if proven else hits, proven)
        self._slots[key] = slot
        self._bytes += size
        self._stores += 1
        if proven:
            self._rank(key, slot)
        else:
            self._new[key] = None
            self._new_bytes += size

    def remove(self, key: bytes) -> None:
        slot = self._slots.get(key)
        if slot is not None:
            self._drop(key, slot)

    def clear(self) -> None:
        self._slots.clear()
        self._new.clear()
        self._heap.clear()
        self._ghosts.clear()
        self._bytes = self._new_bytes = 0

    def stats(self) -> TierStats:
        return TierStats(
            entries=len(self._slots),
            bytes=self._bytes + _GHOST_BYTES * len(self._ghosts),
            hits=self._hits,
            misses=self._misses,
            stores=self._stores,
            evictions=self._evictions,
            dropped=self._dropped,
        )

    def _make_room(self, size: int) -> None:
        while self._bytes + size + _GHOST_BYTES * len(self._ghosts) > self.max_bytes:
            if not self._slots:
                self._ghosts.popitem(last=False)
            elif self._new and (
                self._new_bytes > _NEWCOMERS * self.max_bytes or len(self._new) == len(self._slots)
            ):
                self._judge_newcomer()
            else:
                self._evict_proven()

    def _judge_newcomer(self) -> None:
        """The oldest of the new ones stays if it was asked for, and goes otherwise."""
        key = next(iter(self._new))
        slot = self._slots[key]
        if slot.hits:
            del self._new[key]
            self._new_bytes -= slot.size
            slot.proven = True
            self._rank(key, slot)
            return
        self._drop(key, slot)
        self._evictions += 1
        self._ghosts[key] = None
        while len(self._ghosts) > _GHOSTS * len(self._slots):
            self._ghosts.popitem(last=False)

    def _evict_proven(self) -> None:
        while True:
            priority, number, key = heapq.heappop(self._heap)
            slot = self._slots.get(key)
            if slot is not None and slot.proven and slot.number == number:
                self._floor = priority
                self._drop(key, slot)
                self._evictions += 1
                return

    def _rank(self, key: bytes, slot: _Slot) -> None:
        saved_s = max(slot.entry.saved_s, _LEAST_S)
        slot.priority = self._floor + slot.hits * saved_s / slot.size
        slot.number = next(self._numbers)
        heapq.heappush(self._heap, (slot.priority, slot.number, key))
        if len(self._heap) > 64 + 4 * len(self._slots):
            self._heap = [(s.priority, s.number, k) for k, s in self._slots.items() if s.proven]
            heapq.heapify(self._heap)

    def _drop(self, key: bytes, slot: _Slot) -> None:
        del self._slots[key]
        self._bytes -= slot.size
        if not slot.proven:
            del self._new[key]
            self._new_bytes -= slot.size
