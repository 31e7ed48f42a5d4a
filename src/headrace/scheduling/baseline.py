"""How long a remote backend takes to the first token when nothing is in the way."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["TtftBaseline", "quantile"]

_KEEP = 0.98
_SEEN_BEFORE_SPEED = 8
_MOST_AT_ONCE = 1.5
_TELLING = 0.1


def quantile(values: Iterable[float], level: float) -> float:
    """The smallest value with at least `level` of the values below or at it; of at least one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(level * len(ordered)))]


class TtftBaseline:
    """`intercept + slope * uncached` seconds, by decayed least squares over answers to requests
    that met little company. One that took far longer than expected counts as half as much again,
    so what congestion slips in moves it slowly, while a lasting change still does."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._seen = 0

    @property
    def seen(self) -> int:
        return self._seen

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens a second; None while prompts do not tell, being few or alike."""
        _, slope = self._line()
        if slope <= 0.0:
            return None
        spread = math.sqrt(max(0.0, self._xx / self._n - (self._x / self._n) ** 2))
        return 1.0 / slope if slope * spread > _TELLING * self._y / self._n else None

    def relative(self, uncached: int, ttft: float) -> float:
        """How many times its expected time it took; 1 while nothing is known."""
        expected = self._expected(uncached)
        return ttft / expected if expected > 0.0 else 1.0

    def learn(self, uncached: int, ttft: float) -> None:
        """Takes in an answer to a request that met little company."""
        if self._seen:
            ttft = min(ttft, _MOST_AT_ONCE * self._most(uncached))
        self._seen += 1
        self._n = _KEEP * self._n + 1.0
        self._x = _KEEP * self._x + uncached
        self._y = _KEEP * self._y + ttft
        self._xx = _KEEP * self._xx + uncached * uncached
        self._xy = _KEEP * self._xy + uncached * ttft

    def _expected(self, uncached: int) -> float:
        intercept, slope = self._line()
        return intercept + slope * uncached

    def _most(self, uncached: int) -> float:
        """Expected, or while few were seen, in proportion to the prompt if it is a longer one."""
        if self._seen >= _SEEN_BEFORE_SPEED:
            return self._expected(uncached)
        longer = uncached * self._n / self._x if self._x > 0.0 else 1.0
        return self._y / self._n * max(1.0, longer)

    def _line(self) -> tuple[float, float]:
        """Neither part negative."""
        if self._n <= 0.0:
            return 0.0, 0.0
        spread = self._n * self._xx - self._x * self._x
        slope = 0.0
        if self._seen >= _SEEN_BEFORE_SPEED and spread > 1e-6 * self._n * self._xx:
            slope = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        intercept = (self._y - slope * self._x) / self._n
        if intercept < 0.0:
            return 0.0, self._xy / self._xx
        return intercept, slope
