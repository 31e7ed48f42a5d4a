"""Texts that were turned into vectors."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

__all__ = ["EmbeddingMetrics"]


class EmbeddingMetrics:
    """Series by embedding model, whose names are the server's own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"headrace_embedding_{name}", text, ("model_name",), registry=registry)

        self._requests = counter("requests", "Calls answered with vectors.")
        self._texts = counter("texts", "Texts turned into vectors.")
        self._tokens = counter("tokens", "Their tokens.")

    def embedded(self, model: str, texts: int, tokens: int) -> None:
        self._requests.labels(model).inc()
        self._texts.labels(model).inc(texts)
        self._tokens.labels(model).inc(tokens)
