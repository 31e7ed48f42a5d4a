"""How often the tier is wrong at present, and what follows from it."""

from __future__ import annotations

from collections import deque
from typing import Literal

from headrace.caching.semantic.bounds import rate_interval

__all__ = ["FalseHits", "Stance"]

Stance = Literal["normal", "strict", "off"]

_WINDOW = 2_000
_ENOUGH = 20
"""Labels below which one error among them does not yet close the tier."""


class FalseHits:
    """The share of wrong ones among the latest answers found by meaning, from a random sample of
    them that was judged. Event loop only.

    While the rate is above `delta` the tier is strict: it serves only what meets half of it. When
    even the lower end of the rate's interval is above, the tier serves nothing; what it would have
    served is still sampled, so that it comes back by itself.
    """

    def __init__(self, delta: float, *, window: int = _WINDOW) -> None:
        self._delta = delta
        self._labels: deque[bool] = deque(maxlen=window)
        self._wrong = 0

    @property
    def judged(self) -> int:
        return len(self._labels)

    @property
    def wrong(self) -> int:
        return self._wrong

    def add(self, *, wrong: bool) -> None:
        if len(self._labels) == self._labels.maxlen:
            self._wrong -= self._labels[0]
        self._labels.append(wrong)
        self._wrong += wrong

    def interval(self) -> tuple[float, float]:
        """Where the rate is, at 95 % (Clopper and Pearson)."""
        return rate_interval(self._wrong, self.judged - self._wrong)

    @property
    def stance(self) -> Stance:
        if not self._wrong or self._wrong <= self._delta * self.judged:
            return "normal"
        if self.judged >= _ENOUGH and self.interval()[0] > self._delta:
            return "off"
        return "strict"

    def allowed(self) -> float | None:
        """The bound to hold at present; None serves nothing."""
        stance = self.stance
        if stance == "off":
            return None
        return self._delta if stance == "normal" else self._delta / 2.0
