"""How long answers get: decayed histograms of lengths, some of them cut short.

A cancelled or length-capped answer says only that it would have been longer than it is. Ignoring
such answers, or taking them at face value, biases predictions down. Here they count as at risk up
to where they were cut and drop out there, as in the product-limit estimate; with pseudo-counts
from a broader population it is the Bayes estimate of Susarla and Van Ryzin (1976). Without cuts
it reduces to the mixture `(n * own + strength * broader) / (n + strength)`.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import mul, sub

__all__ = ["EDGES", "LengthDistribution", "Tally", "lognormal", "posterior"]

_PER_OCTAVE = 4
_OCTAVES = 20


def _edges() -> tuple[int, ...]:
    steps = (round(2 ** (k / _PER_OCTAVE)) for k in range(_PER_OCTAVE * _OCTAVES + 1))
    return tuple(sorted({*steps, 1, 2, 3, 4}))


EDGES = _edges()
"""The longest answer of each bucket, a quarter octave apart; short ones are exact."""

_LOWS = (0, *EDGES[:-1])
_WIDTHS = tuple(float(high - low) for low, high in zip(_LOWS, EDGES, strict=True))
_HALVES = tuple((width - 1) / 2.0 for width in _WIDTHS)
_ZEROS = bytes(8 * len(EDGES))

_HALF_LIFE_OBSERVATIONS = 500.0
_HALF_LIFE_S = 1800.0
_LONGEST_SILENCE_S = 2 * _HALF_LIFE_S
"""A quiet night fades what was learnt, but does not erase it."""
_RESCALE = 2.0**200


def _bucket(length: int) -> int:
    return min(bisect_left(EDGES, length), len(EDGES) - 1)


class Tally:
    """Decayed counts of answers by length, in units of the newest one: a unit grows instead of
    all counts shrinking. `seen` counts all answers ever."""

    __slots__ = ("_at", "_total", "_unit", "cut", "ended", "seen")

    def __init__(self, now: float) -> None:
        self.ended = array("d", _ZEROS)
        self.cut: array[float] | None = None
        self.seen = 0
        self._at = now
        self._total = 0.0
        self._unit = 1.0

    @property
    def unit(self) -> float:
        return self._unit

    @property
    def size(self) -> float:
        """Answers that the decayed counts amount to."""
        return self._total / self._unit

    def add(self, now: float, length: int, *, natural: bool) -> None:
        silence = min(now - self._at, _LONGEST_SILENCE_S)
        self._at = now
        self.seen += 1
        self._unit *= 2.0 ** (1.0 / _HALF_LIFE_OBSERVATIONS + silence / _HALF_LIFE_S)
        if self._unit > _RESCALE:
            self._rescale()
        self._total += self._unit
        bucket = _bucket(length)
        if natural:
            self.ended[bucket] += self._unit
            return
        if self.cut is None:
            self.cut = array("d", _ZEROS)
        low, high = _LOWS[bucket], EDGES[bucket]
        within = min(1.0, (length - low) / (high - low))
        self.cut[bucket] += within * self._unit
        if bucket:  # what was cut at once, before a single token, says nothing
            self.cut[bucket - 1] += (1.0 - within) * self._unit
        else:
            self._total -= (1.0 - within) * self._unit

    def _rescale(self) -> None:
        unit = self._unit
        self.ended = array("d", [count / unit for count in self.ended])
        if self.cut is not None:
            self.cut = array("d", [count / unit for count in self.cut])
        self._total /= unit
        self._unit = 1.0


def lognormal(median: float, sigma: float) -> list[float]:
    """The probability of each bucket when nothing was seen yet."""
    scale = sigma * math.sqrt(2.0)
    below = [0.5 * (1.0 + math.erf(math.log((high + 0.5) / median) / scale)) for high in EDGES]
    below[-1] = 1.0
    return [high - low for low, high in zip([0.0, *below[:-1]], below, strict=True)]


def posterior(prior: Sequence[float], tally: Tally, strength: float) -> list[float]:
    """The probability of each bucket by `tally`, which `prior` joins as `strength` answers."""
    scale = 1.0 / tally.unit
    if tally.cut is None:
        share = 1.0 / (strength + tally.size)
        own, broad = scale * share, strength * share
        return [broad * p + own * n for p, n in zip(prior, tally.ended, strict=True)]
    result = []
    left = 1.0
    at_risk = strength + tally.size
    for p, ended, cut in zip(prior, tally.ended, tally.cut, strict=True):
        mass = strength * p + ended * scale
        ends = left * mass / at_risk if mass < at_risk else left
        result.append(ends)
        left -= ends
        at_risk -= mass + cut * scale
    result[-1] += left
    return result


class LengthDistribution:
    """Lengths uniform within each bucket, with what questions about them need summed up.

    `_left[b]` is the chance to get past the bucket's lower end, `_area[b]` the expected number of
    tokens up to there.
    """

    __slots__ = ("_area", "_below", "_left", "order_cap", "order_factor")

    def __init__(self, probabilities: Sequence[float]) -> None:
        self._below = list(accumulate(probabilities))
        self._left: list[float] = [1.0, *map(sub, repeat(1.0), self._below)]
        self._left[-1] = 0.0
        steps = map(sub, map(mul, _WIDTHS, self._left), map(mul, _HALVES, probabilities))
        self._area: list[float] = [0.0, *accumulate(steps)]
        self.order_cap = self.quantile(0.99)
        self.order_factor = 1.0 + 0.5 * self.survival(4 * self.quantile(0.5))

    def quantile(self, level: float) -> int:
        """The shortest length that at least `level` of the answers do not exceed."""
        bucket = min(bisect_left(self._below, level), len(EDGES) - 1)
        low, high = _LOWS[bucket], EDGES[bucket]
        before = 1.0 - self._left[bucket]
        mass = self._left[bucket] - self._left[bucket + 1]
        within = (level - before) / mass if mass > 0.0 else 1.0
        return low + max(1, math.ceil(within * (high - low) - 1e-9))

    def survival(self, length: int) -> float:
        """The chance that an answer is longer."""
        bucket = _bucket(length + 1)
        low, high = _LOWS[bucket], EDGES[bucket]
        left = self._left[bucket]
        after = self._left[bucket + 1]
        return left - (left - after) * min(1.0, (length - low) / (high - low))

    def mean(self, limit: int | None = None) -> float:
        """The expected length of an answer that `limit` cuts off."""
        return self._expected(EDGES[-1] if limit is None else limit)

    def order_mean(self, limit: int | None) -> float:
        """The mean without the last percentile, raised where the tail is heavy; after TIE
        (arXiv 2604.00499): what may be very long should not pass for its average."""
        cap = self.order_cap if limit is None else min(self.order_cap, limit)
        mean = self._expected(cap) * self.order_factor
        return mean if limit is None else min(mean, float(limit))

    def residual(self, generated: int, limit: int | None = None) -> float:
        """Expected tokens still to come after so many, up to `limit` in all."""
        cap = EDGES[-1] if limit is None else min(limit, EDGES[-1])
        if generated >= cap:
            return 0.0
        left = self.survival(generated)
        if left < 1e-9:  # longer than anything known: as much again
            return float(min(max(generated, 1), cap - generated))
        return (self._expected(cap) - self._expected(generated)) / left

    def _expected(self, cap: int) -> float:
        bucket = _bucket(cap)
        low, high = _LOWS[bucket], EDGES[bucket]
        steps = min(cap, high) - low
        left = self._left[bucket]
        slope = (left - self._left[bucket + 1]) / (high - low)
        return self._area[bucket] + steps * left - slope * steps * (steps - 1) / 2.0
