"""Prometheus metrics. vLLM's names where routers and dashboards read them, ours for the rest.

No label value comes from a caller: models are served names, endpoints and outcomes fixed words.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from headrace.core.request import Endpoint
from headrace.telemetry import buckets
from headrace.telemetry.caching import CachingMetrics
from headrace.telemetry.embedding import EmbeddingMetrics
from headrace.telemetry.engine import EngineFamilies, EngineMetrics
from headrace.telemetry.outcome import Outcome
from headrace.telemetry.scheduling import SchedulingFamilies, SchedulingMetrics

__all__ = ["EXPOSITION_TYPE", "Metrics", "ModelMetrics"]

EXPOSITION_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """One server's metrics in a registry of their own. Safe from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "headrace_requests",
            "Requests by how they ended; each is counted once.",
            ("model_name", "endpoint", "outcome"),
            registry=self.registry,
        )
        self._tokens = {
            kind: Counter(
                f"headrace_{kind}_tokens",
                text,
                ("model_name",),
                registry=self.registry,
            )
            for kind, text in (
                ("prompt", "Prompt tokens of requests that started."),
                ("cached", "Those of them taken from the prefix cache."),
                ("generation", "Tokens generated, also for clients that left."),
            )
        }
        self._histograms = {
            name: Histogram(
                f"headrace_{name}", text, ("model_name",), buckets=bounds, registry=self.registry
            )
            for name, text, bounds in _HISTOGRAMS
        }
        self._unrouted = {
            (endpoint, outcome): self._requests.labels("", endpoint.value, outcome.value)
            for endpoint in Endpoint
            for outcome in _BEFORE_A_MODEL
        }
        self._models: dict[str, ModelMetrics] = {}
        self._engine_families = EngineFamilies(self.registry)
        self._engines: dict[str, EngineMetrics] = {}
        self._scheduling_families = SchedulingFamilies(self.registry)
        self._schedulers: dict[str, SchedulingMetrics] = {}
        self.caching = CachingMetrics(self.registry)
        self.embedding = EmbeddingMetrics(self.registry)
        self.http_in_flight = Gauge(
            "headrace_http_requests_in_flight",
            "HTTP requests being answered.",
            registry=self.registry,
        )

    def model(self, name: str) -> ModelMetrics:
        """The figures of a served model. `name` must be one of ours, never a caller's word."""
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = ModelMetrics(
                name, self._requests, self._tokens, self._histograms
            )
        return found

    def engine(self, model: str) -> EngineMetrics:
        """The figures of what computes a served model; also the observer of the own engine."""
        found = self._engines.get(model)
        if found is None:
            found = self._engines[model] = EngineMetrics(model, self._engine_families)
        return found

    def prefix_tokens(self) -> tuple[int, int]:
        """Prompt tokens looked up in the prefix caches of all models, and found there."""
        each = [engine.prefix_tokens for engine in self._engines.values()]
        return sum(asked for asked, _ in each), sum(found for _, found in each)

    def scheduling(self, model: str) -> SchedulingMetrics:
        """The figures of the queue in front of a served model."""
        found = self._schedulers.get(model)
        if found is None:
            found = self._schedulers[model] = SchedulingMetrics(model, self._scheduling_families)
        return found

    def unrouted(self, endpoint: Endpoint, outcome: Outcome) -> None:
        """Counts a request that never got as far as a model."""
        child = self._unrouted.get((endpoint, outcome))
        if child is None:
            child = self._requests.labels("", endpoint.value, outcome.value)
        child.inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format, of type EXPOSITION_TYPE."""
        return generate_latest(self.registry)


class ModelMetrics:
    """Series of one served model, bound once so that no label is looked up per token."""

    def __init__(
        self,
        name: str,
        requests: Counter,
        tokens: dict[str, Counter],
        histograms: dict[str, Histogram],
    ) -> None:
        self.requests = {
            (endpoint, outcome): requests.labels(name, endpoint.value, outcome.value)
            for endpoint in Endpoint
            for outcome in Outcome
        }
        self.prompt_tokens_total = tokens["prompt"].labels(name)
        self.cached_tokens_total = tokens["cached"].labels(name)
        self.generation_tokens_total = tokens["generation"].labels(name)
        bound = {key: histogram.labels(name) for key, histogram in histograms.items()}
        self.queue_s = bound["queue_time_seconds"]
        self.prefill_s = bound["prefill_time_seconds"]
        self.decode_s = bound["decode_time_seconds"]
        self.first_token_s = bound["time_to_first_token_seconds"]
        self.inter_token_s = bound["inter_token_latency_seconds"]
        self.request_s = bound["e2e_request_latency_seconds"]
        self.prompt_tokens = bound["request_prompt_tokens"]
        self.generation_tokens = bound["request_generation_tokens"]


_BEFORE_A_MODEL = (
    Outcome.UNAUTHORIZED,
    Outcome.BODY_TIMEOUT,
    Outcome.TOO_LARGE,
    Outcome.INVALID,
    Outcome.MODEL_NOT_FOUND,
    Outcome.PERMISSION,
    Outcome.UNAVAILABLE,
    Outcome.SHUTTING_DOWN,
    Outcome.CANCELLED,
    Outcome.FAILED,
)
"""How requests end that name no model of ours; a series from the start. Others get one when they
happen."""

_HISTOGRAMS = (
    (
        "time_to_first_token_seconds",
        "From arrival to the first token, of requests that produced one.",
        buckets.TIME_TO_FIRST_TOKEN_S,
    ),
    (
        "inter_token_latency_seconds",
        "Between consecutive tokens of a choice.",
        buckets.INTER_TOKEN_S,
    ),
    (
        "e2e_request_latency_seconds",
        "From arrival to the end, of requests that started.",
        buckets.REQUEST_S,
    ),
    (
        "queue_time_seconds",
        "From arrival to being handed to the backend.",
        buckets.TIME_TO_FIRST_TOKEN_S,
    ),
    (
        "prefill_time_seconds",
        "From being handed to the backend to the first token.",
        buckets.TIME_TO_FIRST_TOKEN_S,
    ),
    ("decode_time_seconds", "From the first token to the last.", buckets.REQUEST_S),
    ("request_prompt_tokens", "Prompt tokens a request that started.", buckets.TOKENS),
    ("request_generation_tokens", "Tokens generated a request that started.", buckets.TOKENS),
)
