"""One request as the scheduler knows it, and a heap of such that forgets lazily."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from headrace.core.request import PriorityClass, Request
from headrace.scheduling.base import Claim, Cost, Interrupt
from headrace.scheduling.lengths import Forecast

__all__ = ["Entry", "Lane", "LazyHeap", "State"]

T = TypeVar("T")


class State(Enum):
    """ADMITTED: being tokenised, or its turn was revoked. DISPATCHED: handed to the backend, which
    has not begun with it. GONE: out of all books."""

    ADMITTED = "admitted"
    WAITING = "waiting"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    GONE = "gone"


class Lane(Enum):
    """Whether a waiting request can still meet its target."""

    ON_TIME = "on time"
    LATE = "late"


@dataclass(slots=True, eq=False)
class Entry:
    """`choices` are those not finished, `tokens` the uncached prompt, `work` the predicted
    accelerator seconds. `visit` counts entries to and exits from the queue, so that what a heap
    remembers of an earlier visit is recognised as void. `latest` plus the target is when its turn
    must come for the first token to be in time; `cut` counts choices that a limit ended."""

    number: int
    request: Request
    claim: Claim
    cost: Cost
    interrupt: Interrupt
    wake: Callable[[], None]
    arrival: float
    choices: int
    tokens: int
    forecast: Forecast
    work: float = 0.0
    key: float = 0.0
    latest: float = 0.0
    state: State = State.ADMITTED
    lane: Lane = Lane.ON_TIME
    visit: int = 0
    charged: float = 0.0
    predicted_s: float = 0.0
    """To its first token, when it was admitted; 0 where that was soon or nobody knew."""
    dispatched_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    generated: int = 0
    cut: int = 0
    preemptions: int = 0
    by_guard: bool = False
    expired: bool = False
    flow: str = field(init=False)
    priority_class: PriorityClass = field(init=False)

    def __post_init__(self) -> None:
        self.flow = self.claim.flow
        self.priority_class = self.claim.priority_class


class LazyHeap(Generic[T]):
    """Smallest key first, among equals the oldest or, if so asked, the newest. Items are never
    taken out of the middle: `alive(item, stamp)` tells which still count, and when most do not,
    they are swept out."""

    __slots__ = ("_alive", "_count", "_items", "_step", "_sweep_at")

    _SMALLEST_SWEEP = 64

    def __init__(self, alive: Callable[[T, float], bool], *, newest_first: bool = False) -> None:
        self._alive = alive
        self._step = -1 if newest_first else 1
        self._items: list[tuple[float, int, float, T]] = []
        self._count = 0
        self._sweep_at = self._SMALLEST_SWEEP

    def push(self, key: float, item: T, stamp: float) -> None:
        self._count += self._step
        items = self._items
        heapq.heappush(items, (key, self._count, stamp, item))
        if len(items) > self._sweep_at:
            alive = self._alive
            self._items = [entry for entry in items if alive(entry[3], entry[2])]
            heapq.heapify(self._items)
            self._sweep_at = max(self._SMALLEST_SWEEP, 2 * len(self._items))

    def top(self) -> tuple[float, T] | None:
        """The living item with the smallest key, and that key. O(log n) amortised."""
        items = self._items
        alive = self._alive
        while items:
            key, _, stamp, item = items[0]
            if alive(item, stamp):
                return key, item
            heapq.heappop(items)
        return None

    def living(self) -> Iterator[T]:
        """All living items, in no order."""
        alive = self._alive
        return (item for _, _, stamp, item in self._items if alive(item, stamp))

    def near_top(self, count: int) -> Iterator[T]:
        """Living ones of the first few of the heap: the smallest first, then small ones."""
        alive = self._alive
        return (item for _, _, stamp, item in self._items[:count] if alive(item, stamp))

    def pop(self) -> None:
        """Takes out what `top` returned."""
        heapq.heappop(self._items)
