"""Metrics of the queue in front of a model: who waited, who was refused, how well it predicts.

Totals and gauges are set from the scheduler's own books when somebody asks for them; only waits
are observed one by one. Reasons are the scheduler's fixed words, classes our own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.core.request import PriorityClass
from headrace.telemetry import buckets
from headrace.telemetry.totals import Total

__all__ = ["SchedulingFamilies", "SchedulingMetrics"]

_QUANTILES = ("0.8", "0.9")


class SchedulingFamilies:
    """The metric families, shared by all models of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            name = f"headrace_scheduler_{name}"
            return Gauge(name, text, ("model_name", *labels), registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            name = f"headrace_scheduler_{name}"
            return Counter(name, text, ("model_name", *labels), registry=registry)

        own = "priority_class"
        self.wait_s = Histogram(
            "headrace_scheduler_wait_seconds",
            "From arrival to the turn, of requests that had one.",
            ("model_name", own),
            buckets=buckets.TIME_TO_FIRST_TOKEN_S,
            registry=registry,
        )
        self.longest_wait_s = gauge("longest_wait_seconds", "The longest wait for a turn yet.", own)
        self.admitted = counter("admitted", "Requests taken into the queue.", own)
        self.turns = counter("turns", "Turns given.", own)
        self.sheds = counter("sheds", "Requests refused or pushed out.", "reason", own)
        self.overtakes = counter(
            "overtakes", "Turns given while an older request of the same class waited."
        )
        self.longest_overtake_s = gauge(
            "longest_overtake_seconds", "The most that an overtaken request was older."
        )
        self.guard = counter("guard_turns", "Turns given by the guard against starvation.")
        self.late = counter("late_turns", "Turns given to requests already past their target.")
        self.revoked = counter("revoked_turns", "Turns taken back before the backend started.")
        self.preemptions = counter(
            "preemptions", "Requests that the backend was asked to set aside for more urgent ones."
        )
        self.jain = gauge(
            "fairness_jain", "Jain's index over flows served lately, by work per weight; 1 is even."
        )
        self.rank_accuracy = gauge(
            "length_rank_accuracy", "Share of pairs of answers whose lengths were put in order."
        )
        self.coverage = gauge(
            "length_coverage",
            "Share of answers no longer than this predicted quantile.",
            "quantile",
        )
        self.cost_model_error = gauge(
            "cost_model_error", "Mean relative error of predicted step times; 0.1 is ten percent."
        )
        self.ttft_target_s = gauge(
            "ttft_target_seconds", "Time to the first token that a request may take as of now.", own
        )
        self.itl_target_s = gauge(
            "itl_target_seconds", "Gap between tokens that the step sizes aim at."
        )
        self.eta = gauge("eta", "Part of the target that a step is planned to take.")
        self.step_tokens = gauge("step_token_budget", "Most tokens computed in a step as of now.")
        self.running_cap = gauge("running_cap", "Most choices computed together as of now.")
        self.decisions = counter("decisions", "Times that the scheduler chose who is next.")
        self.decision_s = counter("decision_seconds", "Time that it took for that.")


class SchedulingMetrics:
    """Series of one served model. None means that a figure is not known; then it has no series.

    Totals count from the scheduler's start. Sequences over classes are in the order of
    PriorityClass.
    """

    def __init__(self, model: str, families: SchedulingFamilies) -> None:
        self._model = model
        self._families = families
        names = [c.name.lower() for c in PriorityClass]
        self._waits = [families.wait_s.labels(model, name) for name in names]
        self._longest_waits = [families.longest_wait_s.labels(model, name) for name in names]
        self._admitted = [Total(families.admitted.labels(model, name)) for name in names]
        self._turns = [Total(families.turns.labels(model, name)) for name in names]
        self._sheds: dict[tuple[str, PriorityClass], Total] = {}
        self._overtakes = Total(families.overtakes.labels(model))
        self._longest_overtake = families.longest_overtake_s.labels(model)
        self._guard = Total(families.guard.labels(model))
        self._late = Total(families.late.labels(model))
        self._revoked = Total(families.revoked.labels(model))
        self._preemptions = Total(families.preemptions.labels(model))
        self._decisions = Total(families.decisions.labels(model))
        self._decision_s = Total(families.decision_s.labels(model))

    def waited(self, priority_class: PriorityClass, seconds: float) -> None:
        """A request had its turn after so long. RequestRecord calls it at its end, once."""
        self._waits[priority_class].observe(seconds)

    def set_classes(
        self, admitted: Sequence[int], turns: Sequence[int], longest_wait_s: Sequence[float]
    ) -> None:
        for c in PriorityClass:
            self._admitted[c].set(admitted[c])
            self._turns[c].set(turns[c])
            self._longest_waits[c].set(longest_wait_s[c])

    def set_sheds(self, totals: Mapping[tuple[str, PriorityClass], int]) -> None:
        for key, total in totals.items():
            series = self._sheds.get(key)
            if series is None:
                reason, priority_class = key
                labels = (self._model, reason, priority_class.name.lower())
                series = self._sheds[key] = Total(self._families.sheds.labels(*labels))
            series.set(total)

    def set_order(
        self, *, overtakes: int, longest_overtake_s: float, guard_turns: int, late_turns: int
    ) -> None:
        self._overtakes.set(overtakes)
        self._longest_overtake.set(longest_overtake_s)
        self._guard.set(guard_turns)
        self._late.set(late_turns)

    def set_taken_back(self, *, revoked: int, preempted: int) -> None:
        self._revoked.set(revoked)
        self._preemptions.set(preempted)

    def set_ttft_targets(self, seconds: Sequence[float | None]) -> None:
        for c in PriorityClass:
            self._set(self._families.ttft_target_s, seconds[c], c.name.lower())

    def set_fairness(self, jain: float | None) -> None:
        self._set(self._families.jain, jain)

    def set_forecast(
        self, *, rank_accuracy: float | None, coverage_q80: float | None, coverage_q90: float | None
    ) -> None:
        self._set(self._families.rank_accuracy, rank_accuracy)
        for quantile, share in zip(_QUANTILES, (coverage_q80, coverage_q90), strict=True):
            self._set(self._families.coverage, share, quantile)

    def set_cost_model_error(self, relative: float | None) -> None:
        self._set(self._families.cost_model_error, relative)

    def set_batching(
        self,
        *,
        itl_target_s: float | None,
        eta: float | None,
        step_tokens: int | None,
        running_cap: int | None = None,
    ) -> None:
        self._set(self._families.itl_target_s, itl_target_s)
        self._set(self._families.eta, eta)
        self._set(self._families.step_tokens, step_tokens)
        self._set(self._families.running_cap, running_cap)

    def set_decisions(self, count: int, seconds: float) -> None:
        self._decisions.set(count)
        self._decision_s.set(seconds)

    def _set(self, family: Gauge, value: float | None, *labels: str) -> None:
        if value is None:
            with suppress(KeyError):
                family.remove(self._model, *labels)
        else:
            family.labels(self._model, *labels).set(value)
