"""Metrics of what computes a model: the own engine's steps, and any backend's load."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from headrace.engine.wire import StepStats
from headrace.telemetry import buckets
from headrace.telemetry.totals import Total

__all__ = ["EngineFamilies", "EngineMetrics"]


class EngineFamilies:
    """The metric families, shared by all models of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        model = ("model_name",)

        def gauge(name: str, text: str, labels: tuple[str, ...] = model) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, model, registry=registry)

        # The five that routers read.
        self.running = gauge("vllm:num_requests_running", "Choices being computed.")
        self.waiting = gauge("vllm:num_requests_waiting", "Choices admitted and not computed yet.")
        self.kv_usage = gauge("vllm:kv_cache_usage_perc", "KV cache in use, 0 to 1.")
        self.cache_config = gauge(
            "vllm:cache_config_info",
            "Shape of the KV cache; always 1.",
            (*model, "block_size", "num_gpu_blocks"),
        )
        self.lora = gauge(
            "vllm:lora_requests_info",
            "Adapters in use, of which there are none; Unix time of the last update.",
            (*model, "max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )

        self.prefix_queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hits = counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self.preemptions = counter(
            "headrace_engine_preemptions", "Sequences that lost their KV blocks to others."
        )
        self.restarts = counter("headrace_engine_restarts", "Engine processes that had to go.")
        self.prefill_tokens = counter("headrace_engine_prefill_tokens", "Prompt tokens computed.")
        self.decode_tokens = counter("headrace_engine_decode_tokens", "Answer tokens computed.")
        self.step_s = Histogram(
            "headrace_engine_step_seconds",
            "Whole steps of the engine.",
            model,
            buckets=buckets.STEP_S,
            registry=registry,
        )
        self.step_tokens = Histogram(
            "headrace_engine_step_tokens",
            "Tokens computed in a step.",
            model,
            buckets=buckets.TOKENS,
            registry=registry,
        )


class EngineMetrics:
    """Series of one served model, and the engine client's observer. Event loop only."""

    def __init__(self, model: str, families: EngineFamilies) -> None:
        self._model = model
        self._families = families
        self._running = families.running.labels(model)
        self._waiting = families.waiting.labels(model)
        self._kv_usage = families.kv_usage.labels(model)
        self._lora = families.lora.labels(model, "0", "", "")
        self._preemptions = Total(families.preemptions.labels(model))
        self._prefix_queries = Total(families.prefix_queries.labels(model))
        self._prefix_hits = Total(families.prefix_hits.labels(model))
        self._restarts = families.restarts.labels(model)
        self._prefill_tokens = families.prefill_tokens.labels(model)
        self._decode_tokens = families.decode_tokens.labels(model)
        self._step_s = families.step_s.labels(model)
        self._step_tokens = families.step_tokens.labels(model)
        self._shape: tuple[int, int] | None = None
        self.prefix_tokens = (0, 0)
        """Prompt tokens looked up in the prefix cache, and found there."""

    def on_step(self, stats: StepStats) -> None:
        """Takes one step's report; a report of 0 seconds tells of no step."""
        self._preemptions.set(stats.preemptions_total)
        self._prefix_queries.set(stats.prefix_queries_total)
        self._prefix_hits.set(stats.prefix_hits_total)
        self.prefix_tokens = (stats.prefix_queries_total, stats.prefix_hits_total)
        if stats.seconds > 0:
            self._prefill_tokens.inc(stats.prefill_tokens)
            self._decode_tokens.inc(stats.decode_tokens)
            self._step_s.observe(stats.seconds)
            self._step_tokens.observe(stats.prefill_tokens + stats.decode_tokens)

    def on_restart(self, reason: str) -> None:  # noqa: ARG002 - free text is no label
        self._restarts.inc()

    def set_load(self, running: int, waiting: int, kv_usage: float, wall: float) -> None:
        """Choices running and waiting, KV cache in use (0 to 1), at Unix time `wall`."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._kv_usage.set(kv_usage)
        self._lora.set(wall)

    def set_cache_shape(self, block_size: int, blocks: int) -> None:
        if self._shape != (block_size, blocks):
            if self._shape is not None:
                self._families.cache_config.remove(self._model, *map(str, self._shape))
            self._shape = (block_size, blocks)
            self._families.cache_config.labels(self._model, str(block_size), str(blocks)).set(1)
