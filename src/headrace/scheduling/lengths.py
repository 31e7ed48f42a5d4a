"""How long will the answer be? Learnt from the answers to similar requests.

Histograms are kept for four populations, from narrow to broad: the flow's requests of this shape,
all of the flow's, everybody's of this shape, all of the model's. Each narrows the one after it as
far as it has seen enough (`_STRENGTH` answers weigh as much as the broader one). What was measured
with it: benchmarks/length_prediction.py.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.request import Request
from headrace.scheduling.base import Claim
from headrace.scheduling.survival import LengthDistribution, Tally, lognormal, posterior

__all__ = ["Forecast", "LengthEstimator", "PredictionStats"]

_STRENGTH = 20.0
_PRIOR_MEDIAN = 256
_PRIOR_SIGMA = 1.2
_MAX_KEYS = 4096
_FRESHNESS = 16
"""A distribution is rebuilt when one of its tallies has grown by more than 1/16."""

_NO_LIMIT = -1
Shape = tuple[int, int, bool, bool]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens of one answer. `mean` is for ordering: its tail is inflated. `q80` and `q90` are
    exceeded by a fifth and a tenth of the answers."""

    mean: float
    q80: int
    q90: int


@dataclass(frozen=True, slots=True)
class PredictionStats:
    """How good recent forecasts were; None before there is anything to say.

    `rank_accuracy` is the share of pairs of answers that were put in the right order, 0.5 being
    blind. The coverages are the shares of answers within the quantile, 0.8 and 0.9 when
    calibrated.
    """

    answers: int
    rank_accuracy: float | None
    q80_coverage: float | None
    q90_coverage: float | None


class _Learnt:
    """A distribution, and how much its tallies had seen when it was made."""

    __slots__ = ("distribution", "seen")

    def __init__(self, distribution: LengthDistribution, seen: tuple[int, ...]) -> None:
        self.distribution = distribution
        self.seen = seen


class LengthEstimator:
    """Owned by the event loop. Memory is bounded by `max_keys`; the least recently used go."""

    def __init__(
        self, clock: Clock, *, max_keys: int = _MAX_KEYS, strength: float = _STRENGTH
    ) -> None:
        if max_keys < 8 or strength <= 0:
            raise ValueError("an estimator needs a few keys and some trust in its priors")
        self._clock = clock
        self._max_keys = max_keys
        self._strength = strength
        self._tallies: OrderedDict[Hashable, Tally] = OrderedDict()
        self._learnt: OrderedDict[Hashable, _Learnt] = OrderedDict()
        self._priors: dict[int, list[float]] = {}
        self._score = _Score()
        self._level80 = _Level(0.8, 0.13)
        self._level90 = _Level(0.9, 0.08)

    def __len__(self) -> int:
        return len(self._tallies)

    def forecast(
        self, request: Request, claim: Claim, prompt_tokens: int, limit: int | None
    ) -> Forecast:
        """What one choice of the request will generate, if it may not exceed `limit` tokens."""
        known = self._distribution(request, claim, prompt_tokens)
        q80 = known.quantile(self._level80.value)
        q90 = max(q80, known.quantile(self._level90.value))
        if limit is not None:
            q80, q90 = min(q80, limit), min(q90, limit)
        return Forecast(known.order_mean(limit), q80, q90)

    def residual(
        self,
        request: Request,
        claim: Claim,
        prompt_tokens: int,
        limit: int | None,
        generated: int,
    ) -> float:
        """Expected tokens still to come of a choice that has generated so many."""
        return self._distribution(request, claim, prompt_tokens).residual(generated, limit)

    def observe(
        self, request: Request, claim: Claim, prompt_tokens: int, length: int, *, natural: bool
    ) -> None:
        """One choice has ended after `length` tokens: by itself, or cut off there."""
        limit = request.sampling.max_tokens
        if limit == 0:
            return
        if natural or (limit is not None and length >= limit):
            self._score.add(self.forecast(request, claim, prompt_tokens, limit), length)
        known = self._distribution(request, claim, prompt_tokens)
        self._level80.learn(known, length, natural=natural)
        self._level90.learn(known, length, natural=natural)
        now = self._clock.monotonic()
        for key in _keys(request, claim, prompt_tokens):
            tally = self._tallies.get(key)
            if tally is None:
                tally = self._tallies[key] = Tally(now)
                if len(self._tallies) > self._max_keys:
                    self._tallies.popitem(last=False)
            else:
                self._tallies.move_to_end(key)
            tally.add(now, length, natural=natural)

    def stats(self) -> PredictionStats:
        return self._score.stats()

    def _distribution(
        self, request: Request, claim: Claim, prompt_tokens: int
    ) -> LengthDistribution:
        keys = _keys(request, claim, prompt_tokens)
        tallies = [self._tallies.get(key) for key in keys]
        learnt = self._learnt.get(keys[0])
        if learnt is not None and _fresh(learnt.seen, tallies):
            return learnt.distribution
        probabilities = self._prior(request.sampling.max_tokens)
        for tally in reversed(tallies):
            if tally is not None:
                probabilities = posterior(probabilities, tally, self._strength)
        learnt = _Learnt(
            LengthDistribution(probabilities), tuple(t.seen if t else 0 for t in tallies)
        )
        self._learnt[keys[0]] = learnt
        self._learnt.move_to_end(keys[0])
        if len(self._learnt) > self._max_keys:
            self._learnt.popitem(last=False)
        return learnt.distribution

    def _prior(self, limit: int | None) -> list[float]:
        median = min(_PRIOR_MEDIAN, limit or _PRIOR_MEDIAN)
        prior = self._priors.get(median)
        if prior is None:
            prior = self._priors[median] = lognormal(median, _PRIOR_SIGMA)
        return prior


def _keys(request: Request, claim: Claim, prompt_tokens: int) -> tuple[Hashable, ...]:
    """From the narrowest population to the broadest."""
    limit = request.sampling.max_tokens
    extra = request.extra_fields
    shape: Shape = (
        (prompt_tokens * prompt_tokens).bit_length(),  # by half octaves
        _NO_LIMIT if limit is None else limit.bit_length(),
        bool(extra.get("tools")),
        bool(extra.get("response_format")),
    )
    flow, model, endpoint = claim.flow, request.model, request.endpoint
    return (flow, model, endpoint, shape), (flow, model), (model, endpoint, shape), model


def _fresh(seen: tuple[int, ...], tallies: list[Tally | None]) -> bool:
    for then, tally in zip(seen, tallies, strict=True):
        now = tally.seen if tally is not None else 0
        if now - then > then // _FRESHNESS or now < then:
            return False
    return True


class _Level:
    """Which quantile to ask for so that as many answers as meant are within it, though lengths
    drift. Adaptive conformal inference (Gibbs and Candès 2021)."""

    _STEP = 0.002

    def __init__(self, nominal: float, span: float) -> None:
        self._nominal = nominal
        self._span = span
        self.value = nominal

    def learn(self, known: LengthDistribution, length: int, *, natural: bool) -> None:
        """A cut answer counts for as much as it would probably have stayed within."""
        quantile = known.quantile(self.value)
        if natural or length >= quantile:
            within = float(length <= quantile) if natural else 0.0
        else:
            within = 1.0 - known.survival(quantile) / max(known.survival(length), 1e-9)
        value = self.value + self._STEP * (self._nominal - within)
        self.value = min(max(value, self._nominal - self._span), self._nominal + self._span)


class _Score:
    """Running quality of forecasts, each against those of the answers that ended just before."""

    _PEERS = 16
    _MEMORY = 0.999

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque(maxlen=self._PEERS)
        self._answers = 0
        self._pairs = self._right = 0.0
        self._weight = self._within80 = self._within90 = 0.0

    def add(self, forecast: Forecast, length: int) -> None:
        fade = self._MEMORY
        self._answers += 1
        self._weight = fade * self._weight + 1.0
        self._within80 = fade * self._within80 + (length <= forecast.q80)
        self._within90 = fade * self._within90 + (length <= forecast.q90)
        pairs = right = 0.0
        for mean, other in self._recent:
            if other == length:
                continue
            pairs += 1.0
            if mean == forecast.mean:
                right += 0.5
            elif (mean < forecast.mean) == (other < length):
                right += 1.0
        self._pairs = fade * self._pairs + pairs
        self._right = fade * self._right + right
        self._recent.append((forecast.mean, length))

    def stats(self) -> PredictionStats:
        def share(part: float, whole: float) -> float | None:
            return part / whole if whole else None

        return PredictionStats(
            self._answers,
            share(self._right, self._pairs),
            share(self._within80, self._weight),
            share(self._within90, self._weight),
        )
