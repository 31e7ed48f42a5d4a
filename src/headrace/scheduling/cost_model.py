"""How long does a step take? Learnt online from the steps themselves.

    t = base + prefill * P + decode * D + decode_context * K + prefill_context * C
        + attention * P * C + beyond * max(0, P + D - 512)

with P prompt tokens, D decoding sequences, K the sum of their contexts and C the context already
computed of the prompts. Two terms for C, since published fits disagree whether its cost grows with
P; the data decide. The fit is least squares on relative errors with exponential forgetting, held
near its last solution where recent steps say nothing, and no coefficient is negative. A speed
factor on top follows what slows everything at once (throttling, a neighbour) within some tens of
steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass
from operator import mul
from statistics import median

from headrace.scheduling.base import StepSample

__all__ = ["A100_8B", "SMALL_CPU", "CostModelStats", "StepCoefficients", "StepCostModel"]

_KNEE = 512
_KILO = 1000.0


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """Seconds: of a step, and more per token, sequence, token of context, thousand tokens of
    context per prompt token, and token beyond 512."""

    base: float
    prefill: float
    decode: float
    decode_context: float
    prefill_context: float
    attention: float
    beyond: float


A100_8B = StepCoefficients(1.49e-2, 8.13e-5, 9.52e-5, 1.11e-7, 7.55e-7, 1e-7, 1.45e-5)
"""Llama-3-8B on an A100, after the coefficients that Niyama published."""

SMALL_CPU = StepCoefficients(3e-2, 1.5e-3, 1.5e-3, 5e-7, 1e-6, 1e-5, 1e-6)
"""A model of 100 to 200 million parameters on two cores."""


@dataclass(frozen=True, slots=True)
class CostModelStats:
    """`error` is the running mean absolute relative error of predictions, None before any."""

    steps: int
    outliers: int
    error: float | None
    speed: float
    coefficients: StepCoefficients


class StepCostModel:
    """Owned by one thread. `prior` is what to believe before the first steps: its proportions
    matter, its scale is set by the first five steps. Pass saved `coefficients` to start warm."""

    _FORGET = 0.995
    _HOLD = 0.02
    _SEED_STEPS = 5
    _SPEED_RATE = 0.05
    _ERROR_RATE = 0.02
    _RECENT = 64
    _OUTLIER_FLOOR = 0.5
    _EARLY_OUTLIER = 3.0
    _OUTLIERS_IN_A_ROW = 5
    _SOLVE_EVERY = 4

    def __init__(self, prior: StepCoefficients = A100_8B) -> None:
        scale = list(astuple(prior))
        if not prior.base > 0 or min(scale) < 0:
            raise ValueError("coefficients are not negative, and a step takes time")
        tiny = prior.base * 1e-9  # a coefficient believed to be nothing can still be learnt
        self._scale = [max(x, tiny) for x in scale]
        n = len(self._scale)
        self._share = [1.0] * n
        self._moments = [[0.0] * n for _ in range(n)]
        self._targets = [0.0] * n
        self._speed = 1.0
        self._seed: list[StepSample] | None = []
        self._residuals: deque[float] = deque(maxlen=self._RECENT)
        self._rejected: list[float] = []
        self._steps = self._outliers = 0
        self._error: float | None = None
        self._decode = _Ratio(0.99)
        self._prefill = _Ratio(0.98)
        self._coefficients = scale

    # Learning

    def observe(self, sample: StepSample) -> None:
        """Takes in one step. Those without work or time are passed over."""
        if not sample.seconds > 0.0 or sample.prefill_tokens + sample.decode_tokens < 1:
            return
        self._steps += 1
        if self._seed is None:
            self._take(sample)
        else:
            self._calibrate(self._seed, sample)

    def _calibrate(self, seed: list[StepSample], sample: StepSample) -> None:
        """Scales the prior to the median of the first steps, some of which may be warm-ups."""
        seed.append(sample)
        self._speed = 1.0
        self._speed = median(s.seconds / self._predict(s) for s in seed)
        if len(seed) == self._SEED_STEPS:
            self._seed = None
            self._scale = [x * self._speed for x in self._scale]
            self._speed = 1.0
            self._publish()
            for earlier in seed:
                self._take(earlier)

    def _take(self, sample: StepSample) -> None:
        predicted = self._predict(sample)
        ratio = sample.seconds / predicted
        miss = abs(ratio - 1.0)
        rate = self._ERROR_RATE
        error = abs(predicted - sample.seconds) / sample.seconds
        self._error = error if self._error is None else self._error + rate * (error - self._error)
        if self._is_outlier(miss):
            self._outliers += 1
            self._rejected.append(ratio)
            if len(self._rejected) < self._OUTLIERS_IN_A_ROW:
                return
            # Not a hiccup: this is how fast it is now.
            self._speed *= median(self._rejected)
            self._residuals.clear()
            predicted = self._predict(sample)
            ratio = sample.seconds / predicted
        self._rejected.clear()
        self._residuals.append(miss)
        self._fit(sample, predicted / self._speed)
        self._speed *= 1.0 + self._SPEED_RATE * (ratio - 1.0)
        self._measure(sample)

    def _is_outlier(self, miss: float) -> bool:
        if len(self._residuals) < self._RECENT // 4:
            return miss > self._EARLY_OUTLIER
        return miss > max(5 * 1.4826 * median(self._residuals), self._OUTLIER_FLOOR)

    def _fit(self, sample: StepSample, expected: float) -> None:
        """One step more in the moments. Weighted by the expected, not the measured time, which
        would favour steps that happened to be short."""
        features = _features(sample)
        row = [x * s / expected for x, s in zip(features, self._scale, strict=True)]
        target = sample.seconds / expected
        keep = self._FORGET
        self._moments = [
            [keep * m + x * y for m, y in zip(known, row, strict=True)]
            for known, x in zip(self._moments, row, strict=True)
        ]
        self._targets = [keep * t + x * target for t, x in zip(self._targets, row, strict=True)]
        if self._steps < 64 or self._steps % self._SOLVE_EVERY == 0:
            self._share = _solve_nonnegative(self._moments, self._targets, self._share, self._HOLD)
            self._publish()

    def _publish(self) -> None:
        self._coefficients = [x * s for x, s in zip(self._share, self._scale, strict=True)]

    def _measure(self, sample: StepSample) -> None:
        if sample.decode_tokens:
            alone = self.predict(0, sample.decode_tokens, sample.decode_context)
            share = alone / self._predict(sample)
            self._decode.add(sample.seconds * share, sample.decode_tokens)
        if sample.prefill_tokens:  # weighted by size: a prompt's rest of a few tokens is no rate
            size = sample.prefill_tokens
            self._prefill.add(size * sample.seconds, size * size)

    # Asking

    def predict(
        self, prefill: int, decodes: int, decode_context: float = 0, prefill_context: float = 0
    ) -> float:
        """Seconds of such a step."""
        base, p, d, k, c, attention, beyond = self._coefficients
        excess = prefill + decodes - _KNEE
        seconds = (
            base
            + p * prefill
            + d * decodes
            + k * decode_context
            + (c + attention * prefill / _KILO) * prefill_context
        )
        if excess > 0:
            seconds += beyond * excess
        return float(seconds * self._speed)

    def _predict(self, sample: StepSample) -> float:
        return self.predict(
            sample.prefill_tokens,
            sample.decode_tokens,
            sample.decode_context,
            sample.prefill_context,
        )

    def prefill_budget(
        self,
        target_s: float,
        decodes: int,
        decode_context: float = 0,
        prefill_context: float = 0,
    ) -> int:
        """The most prompt tokens that such a step computes within `target_s`; 0 if none."""
        spare = target_s - self.predict(0, decodes, decode_context, prefill_context)
        _, p, _, _, _, attention, beyond = self._coefficients
        slope = (p + attention * prefill_context / _KILO) * self._speed
        return _fill(spare, slope, max(0, _KNEE - decodes), beyond * self._speed)

    def max_running(self, target_s: float, context_each: float) -> int:
        """The most sequences that decode together within `target_s`; 0 if none."""
        spare = target_s - self.predict(0, 0)
        _, _, d, k, _, _, beyond = self._coefficients
        slope = (d + k * context_each) * self._speed
        return _fill(spare, slope, _KNEE, beyond * self._speed)

    def request_cost(self, uncached_prompt: float, expected_output: float) -> float:
        """Accelerator seconds that a request takes, as a share of the steps that it is part of."""
        return uncached_prompt * self.prefill_token_s + expected_output * self.decode_token_s

    @property
    def prefill_token_s(self) -> float:
        """What one more prompt token costs in a step that runs anyway."""
        return float(self._coefficients[1] * self._speed)

    @property
    def decode_token_s(self) -> float:
        """A sequence's share of a decode step, as batches have been lately."""
        measured = self._decode.value
        return self.predict(0, 8) / 8 if measured is None else measured

    @property
    def prefill_tokens_per_s(self) -> float:
        """How fast prompts have been computed lately, beside whatever was decoding."""
        measured = self._prefill.value
        return 256 / self.predict(256, 8) if measured is None else 1.0 / measured

    @property
    def coefficients(self) -> StepCoefficients:
        return StepCoefficients(*(x * self._speed for x in self._coefficients))

    def stats(self) -> CostModelStats:
        return CostModelStats(
            self._steps, self._outliers, self._error, self._speed, self.coefficients
        )


class _Ratio:
    """A running quotient of sums."""

    __slots__ = ("_keep", "_over", "_under")

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._over = self._under = 0.0

    def add(self, over: float, under: float) -> None:
        self._over = self._keep * self._over + over
        self._under = self._keep * self._under + under

    @property
    def value(self) -> float | None:
        return self._over / self._under if self._under > 0.0 else None


def _features(sample: StepSample) -> tuple[float, ...]:
    p, d, c = sample.prefill_tokens, sample.decode_tokens, sample.prefill_context
    beyond = max(0, p + d - _KNEE)
    return 1.0, p, d, sample.decode_context, c, p * c / _KILO, beyond


def _fill(spare: float, slope: float, knee: int, extra: float) -> int:
    """How many units of `slope` seconds, `extra` more each beyond `knee`, fit into `spare`."""
    if spare <= 0.0:
        return 0
    ample = 1 << 20
    if spare <= slope * knee:
        return int(spare / slope)
    steeper = slope + extra
    if steeper * ample <= spare:
        return ample
    return knee + int((spare - slope * knee) / steeper)


def _solve_nonnegative(
    moments: list[list[float]], targets: list[float], near: list[float], hold: float
) -> list[float]:
    """Minimises the squared error plus `hold` times the squared distance from `near`.

    What would be negative is set to zero, worst first, and the rest solved again.
    """
    free = list(range(len(targets)))
    solution = [0.0] * len(targets)
    while free:
        rows = [
            [moments[i][j] + (hold if i == j else 0.0) for j in free]
            + [targets[i] + hold * near[i]]
            for i in free
        ]
        found = _solve(rows)
        worst = min(range(len(free)), key=found.__getitem__)
        if found[worst] >= 0.0:
            for i, x in zip(free, found, strict=True):
                solution[i] = x
            return solution
        del free[worst]
    return solution


def _solve(rows: list[list[float]]) -> list[float]:
    """Of a positive definite system, each row with its right side at the end; destroys it."""
    n = len(rows)
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            if factor:
                for j in range(i, n + 1):
                    row[j] -= factor * pivot[j]
    result = [0.0] * n
    for i in reversed(range(n)):
        known: float = sum(map(mul, rows[i][i + 1 : n], result[i + 1 :]))
        result[i] = (rows[i][n] - known) / rows[i][i]
    return result
