"""How much longer requests wait than was predicted."""

from __future__ import annotations

import math

__all__ = ["WaitCalibration"]

_STEP = 0.05
_QUANTILE = 0.9
_LEAST, _MOST = 1.0, 1.25


class WaitCalibration:
    """A factor that nine in ten waits stay within, found by a step up for each that was longer and
    a ninth of a step down for each that was not (H. Robbins and S. Monro, 1951). Never below 1:
    what came out shorter than predicted is no reason to admit more; and never far above, or it
    refused what a small machine can serve."""

    def __init__(self) -> None:
        self.factor = _LEAST

    def observe(self, predicted_s: float, actual_s: float) -> None:
        if predicted_s <= 0:
            return
        longer = actual_s > self.factor * predicted_s
        step = _STEP * (_QUANTILE if longer else _QUANTILE - 1.0)
        self.factor = min(max(self.factor * math.exp(step), _LEAST), _MOST)
