"""Whether a stored answer may serve another question, with a bound on how often that is wrong.

Guards refuse first. What passes them is put on a step of how far the two questions are apart
(`features.STEPS`); the last step is split by the probability that a logistic regression gives it.
Each step has evidence: how many independent groups of questions were served rightly and wrongly
when the fitting data were asked in a stream, every question against all before it and the best
candidate taken, so that the chance that one of many entries is wrongly alike is in the counts. The
step's bound is the lower Clopper-Pearson bound of its rate, and no step is above a nearer one. A
pair is served iff its bound is at least 1 - delta. As the bound holds for each step by itself, it
holds for the rate of false hits among the hits of any mixture of steps, on traffic like that of
the evidence. Other traffic corrects it: outcomes told to `observe` are added to the evidence of
the step and, more strongly, of the entry.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from importlib import resources
from typing import Any, cast

import msgspec

from headrace.caching.semantic.base import Judgement, Text
from headrace.caching.semantic.bounds import rate_lower
from headrace.caching.semantic.features import STEPS, features, step
from headrace.caching.semantic.forms import Form, form_of
from headrace.caching.semantic.guards import Difference, difference, objection

__all__ = ["OPEN_ABOVE", "Evidence", "LearnedVerifier", "Model", "load_model"]

OPEN_ABOVE = (0.9, 0.7, 0.4, 0.0)
"""Where the last step is split, by probability."""
_PRIOR_WEIGHT = 600.0
"""Groups that the shipped evidence of a step counts for at most beside live outcomes (a power
prior: J. G. Ibrahim and M.-H. Chen, Statistical Science 15, 2000): about two live errors close a
step of which none was known, at a bound of 1 %."""
_ENTRY_WEIGHT = 20.0
"""Outcomes that an entry's step counts for beside the entry's own."""
_MOST_ENTRIES = 20_000


class Evidence(msgspec.Struct, frozen=True):
    """Groups of questions served, as fractions where a group had both outcomes."""

    right: float
    wrong: float


class Model(msgspec.Struct, frozen=True):
    """Of one embedder. Weights are by feature name, of features scaled to (x - mean) / scale."""

    bias: float
    weights: dict[str, float]
    means: dict[str, float]
    scales: dict[str, float]
    evidence: dict[str, Evidence]

    def probability(self, values: dict[str, float]) -> float:
        total = self.bias + sum(
            weight * (values[name] - self.means[name]) / self.scales[name]
            for name, weight in self.weights.items()
        )
        return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, total))))


class _Models(msgspec.Struct, frozen=True):
    about: dict[str, Any]
    models: dict[str, Model]


@functools.cache
def _models() -> _Models:
    data = resources.files("headrace.caching.semantic") / "verifier.json"
    return msgspec.json.decode(data.read_bytes(), type=_Models)


def load_model(embedder_id: str) -> Model:
    """The shipped one whose name is part of the embedder's id, or the one that ignores vectors."""
    models = _models().models
    name = next((name for name in models if name in embedder_id.lower()), "any")
    return models[name]


def steps() -> tuple[str, ...]:
    """Nearest first, the last of STEPS in its parts."""
    return (*STEPS[1:-1], *(f"open>{p:g}" for p in OPEN_ABOVE))


class LearnedVerifier:
    """One for each embedder. Event loop only, but for `prepare`, which any thread may call."""

    def __init__(
        self,
        embedder_id: str,
        delta: float = 0.01,
        *,
        confidence: float = 0.95,
        model: Model | None = None,
    ) -> None:
        if not 0.0 < delta < 1.0:
            raise ValueError(f"delta must be between 0 and 1, not {delta}")
        self._model = load_model(embedder_id) if model is None else model
        self._delta = delta
        self._confidence = confidence
        self._live: dict[str, tuple[int, int]] = {}
        self._entries: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._bounds = self._all_bounds()

    @property
    def delta(self) -> float:
        return self._delta

    def prepare(self, text: str) -> Form:
        """Kept with the entry: it takes longer to make than to compare."""
        return form_of(text)

    def judge(
        self, asked: Text, stored: Text, similarity: float, delta: float | None = None
    ) -> Judgement:
        """`delta` may only be stricter than the verifier's own."""
        refused, where, probability = self._place(_form(asked), _form(stored), similarity)
        if refused is not None:
            return Judgement(False, probability, 0.0, refused)
        lower = self._lower(where, _form(stored))
        allowed = self._delta if delta is None else min(delta, self._delta)
        served = lower >= 1.0 - allowed
        return Judgement(served, max(probability, lower), lower, "" if served else "bound")

    def observe(self, asked: Text, stored: Text, similarity: float, *, right: bool) -> None:
        """What became of a pair that passed the guards: its answer would have been right, or not.
        Pairs that a guard refuses teach nothing here."""
        refused, where, _ = self._place(_form(asked), _form(stored), similarity)
        if refused is not None or where == "identical":
            return
        name = _form(stored).trivial
        self._live[where] = _counted(self._live.get(where, (0, 0)), right)
        self._entries[name] = _counted(self._entries.get(name, (0, 0)), right)
        self._entries.move_to_end(name)
        if len(self._entries) > _MOST_ENTRIES:
            self._entries.popitem(last=False)
        self._bounds = self._all_bounds()

    def bounds(self) -> dict[str, float]:
        """The bound of each step as of now, nearest first."""
        return dict(self._bounds)

    def place(self, asked: Form, stored: Form, similarity: float) -> tuple[str | None, str, float]:
        """The guard that refuses or None, the step, and the probability. For the fit."""
        return self._place(asked, stored, similarity)

    def _place(self, asked: Form, stored: Form, similarity: float) -> tuple[str | None, str, float]:
        if not math.isfinite(similarity):
            return "similarity", "", 0.0
        unfit = asked.unfit or stored.unfit
        if unfit is not None:
            return unfit, "", 0.0
        if asked.trivial == stored.trivial:
            return None, "identical", 1.0
        unlike = difference(asked, stored)
        refused = objection(asked, stored, unlike)
        if refused is not None:
            return refused, "", 0.0
        probability = self._probability(asked, stored, unlike, similarity)
        where = step(asked, stored, unlike)
        if where == "open":
            where = next(f"open>{p:g}" for p in OPEN_ABOVE if probability >= p)
        return None, where, probability

    def _probability(
        self, asked: Form, stored: Form, unlike: Difference, similarity: float
    ) -> float:
        return self._model.probability(features(asked, stored, unlike, similarity))

    def _lower(self, where: str, stored: Form) -> float:
        """With the entry's own outcomes: the mean of the Beta distribution that follows from them
        and the step's bound (empirical Bayes: G. Casella, The American Statistician 39, 1985)."""
        if where == "identical":
            return 1.0
        right, wrong = self._entries.get(stored.trivial, (0, 0))
        prior = self._bounds[where] * _ENTRY_WEIGHT
        return (prior + right) / (_ENTRY_WEIGHT + right + wrong)

    def _all_bounds(self) -> dict[str, float]:
        bounds: dict[str, float] = {}
        least = 1.0
        for where in steps():
            known = self._model.evidence.get(where, Evidence(0.0, 0.0))
            right, wrong = self._live.get(where, (0, 0))
            total = known.right + known.wrong
            share = min(1.0, _PRIOR_WEIGHT / total) if right + wrong and total else 1.0
            bound = rate_lower(
                known.right * share + right, known.wrong * share + wrong, self._confidence
            )
            least = bounds[where] = min(least, bound)
        return bounds


def _form(text: Text) -> Form:
    """What `prepare` made."""
    return cast("Form", text)


def _counted(outcomes: tuple[int, int], right: bool) -> tuple[int, int]:
    return (outcomes[0] + 1, outcomes[1]) if right else (outcomes[0], outcomes[1] + 1)
