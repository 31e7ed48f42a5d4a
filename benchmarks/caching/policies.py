"""What the memory tier is compared with: caches of a byte budget, each a key at a time."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import Protocol

from headrace.caching import MemoryTier
from headrace.caching.entry import Entry
from headrace.core.clock import VirtualClock

__all__ = ["GDSF", "LRU", "S3FIFO", "Policy", "Shipped"]

OVERHEAD = 400
"""Bytes beside the answer, as in the memory tier, for all alike."""


class Policy(Protocol):
    def ask(self, key: bytes) -> bool:
        """Whether it is there."""
        ...

    def keep(self, key: bytes, size: int, saved_s: float, /) -> None: ...


class LRU:
    """The least recently used goes first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self.sizes: OrderedDict[bytes, int] = OrderedDict()

    def ask(self, key: bytes) -> bool:
        if key not in self.sizes:
            return False
        self.sizes.move_to_end(key)
        return True

    def keep(self, key: bytes, size: int, _saved_s: float) -> None:
        size += OVERHEAD
        if size > self.budget:
            return
        self.sizes[key] = size
        self.used += size
        while self.used > self.budget:
            self.used -= self.sizes.popitem(last=False)[1]


class S3FIFO:
    """Three queues: new, proven, and keys of those lately thrown out of the first (J. Yang et al.,
    SOSP 2023), with sizes in bytes: a tenth for the new ones."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.small: deque[bytes] = deque()
        self.main: deque[bytes] = deque()
        self.ghost: OrderedDict[bytes, None] = OrderedDict()
        self.sizes: dict[bytes, int] = {}
        self.hits: dict[bytes, int] = {}
        self.in_small: set[bytes] = set()
        self.small_used = self.main_used = 0

    def ask(self, key: bytes) -> bool:
        if key not in self.sizes:
            return False
        self.hits[key] = min(3, self.hits[key] + 1)
        return True

    def keep(self, key: bytes, size: int, _saved_s: float) -> None:
        size += OVERHEAD
        if size > self.budget:
            return
        while self.small_used + self.main_used + size > self.budget:
            if self.small_used > self.budget // 10 or not self.main:
                self._leave_small()
            else:
                self._leave_main()
        self.sizes[key], self.hits[key] = size, 0
        if key in self.ghost:
            del self.ghost[key]
            self.main.append(key)
            self.main_used += size
        else:
            self.small.append(key)
            self.in_small.add(key)
            self.small_used += size

    def _leave_small(self) -> None:
        key = self.small.popleft()
        self.in_small.discard(key)
        size = self.sizes[key]
        self.small_used -= size
        if self.hits[key] > 1:
            self.hits[key] = 0
            self.main.append(key)
            self.main_used += size
            return
        del self.sizes[key], self.hits[key]
        self.ghost[key] = None
        while len(self.ghost) > len(self.sizes):
            self.ghost.popitem(last=False)

    def _leave_main(self) -> None:
        while True:
            key = self.main.popleft()
            if self.hits[key]:
                self.hits[key] -= 1
                self.main.append(key)
                continue
            self.main_used -= self.sizes.pop(key)
            del self.hits[key]
            return


class GDSF:
    """Greatest saved time per byte and hit stays (L. Cherkasova, 1998); lets everything in."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self.floor = 0.0
        self.kept: dict[bytes, tuple[int, float, int, float]] = {}
        self.heap: list[tuple[float, bytes]] = []

    def ask(self, key: bytes) -> bool:
        if key not in self.kept:
            return False
        size, saved_s, hits, _ = self.kept[key]
        self._rank(key, size, saved_s, hits + 1)
        return True

    def keep(self, key: bytes, size: int, saved_s: float) -> None:
        size += OVERHEAD
        if size > self.budget:
            return
        while self.used + size > self.budget:
            priority, victim = heapq.heappop(self.heap)
            if victim in self.kept and self.kept[victim][3] == priority:
                self.floor = priority
                self.used -= self.kept.pop(victim)[0]
        self.used += size
        self._rank(key, size, saved_s, 1)

    def _rank(self, key: bytes, size: int, saved_s: float, hits: int) -> None:
        priority = self.floor + hits * saved_s / size
        self.kept[key] = (size, saved_s, hits, priority)
        heapq.heappush(self.heap, (priority, key))


class Shipped:
    """The memory tier of the server itself."""

    def __init__(self, budget: int) -> None:
        self._tier = MemoryTier(budget, VirtualClock())

    def ask(self, key: bytes) -> bool:
        return self._tier.look(key) is not None

    def keep(self, key: bytes, size: int, saved_s: float) -> None:
        log = _Bytes()
        log.size = size
        self._tier.put(key, Entry(log, False, 0.0, 1e18, saved_s, 0, 0))


class _Bytes(bytes):
    """As long as told, without the memory."""

    size = 0

    def __len__(self) -> int:
        return self.size
