"""Counters fed with running totals that somebody else keeps."""

from __future__ import annotations

from prometheus_client import Counter

__all__ = ["Total"]


class Total:
    """A counter set to a running total; a total that falls has started again from zero."""

    __slots__ = ("_counter", "_last")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last: float = 0

    def set(self, total: float) -> None:
        if total != self._last:
            self._counter.inc(total - self._last if total > self._last else total)
            self._last = total
