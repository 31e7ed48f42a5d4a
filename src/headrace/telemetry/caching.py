"""The response cache in figures. Fed with totals that it keeps itself."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from headrace.telemetry.totals import Total

__all__ = ["CachingMetrics"]

_TIER = (
    ("evictions", "Entries that had to go to make room."),
    ("failures", "Times that the tier did not do what was asked of it."),
    ("dropped", "Entries not kept: worth less than what is there, or the tier was away."),
)


class CachingMetrics:
    """Series of the whole server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"headrace_cache_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"headrace_cache_{name}", text, labels, registry=registry)

        self._hits = counter("hits", "Answers that were stored.", "tier", "tenant")
        self._misses = Total(counter("misses", "Answers looked for in vain, and then computed."))
        self._bypasses = Total(counter("bypasses", "Answers computed without looking for them."))
        self._stores = Total(counter("stores", "Answers stored."))
        self._coalesced = Total(counter("coalesced", "Answers that a twin's generation gave."))
        self._saved_s = Total(counter("saved_seconds", "What computing those again would take."))
        saved = counter("saved_tokens", "Tokens not computed again.", "kind")
        self._saved_prompt = Total(saved.labels("prompt"))
        self._saved_generation = Total(saved.labels("generation"))
        self._entries = gauge("entries", "Answers a tier holds.", "tier")
        self._bytes = gauge("bytes", "What they take.", "tier")
        self._healthy = gauge("tier_healthy", "0 while a tier is passed by.", "tier")
        self._refused = counter("semantic_refusals", "Look-ups by meaning in vain.", "reason")
        self._judged = gauge("semantic_judged", "Latest answers found by meaning that were judged.")
        self._false_hits = gauge(
            "semantic_false_hit_rate", "Of those, where the share of wrong ones is at 95 %.", "end"
        )
        self._refused_totals: dict[str, Total] = {}
        self._tier = {name: counter(name, text, "tier") for name, text in _TIER}
        self._tier_totals: dict[tuple[str, str], Total] = {}
        self._hit_totals: dict[tuple[str, str], Total] = {}

    def set_answers(self, *, misses: int, bypasses: int, stores: int, coalesced: int) -> None:
        self._misses.set(misses)
        self._bypasses.set(bypasses)
        self._stores.set(stores)
        self._coalesced.set(coalesced)

    def set_hits(self, totals: Mapping[tuple[str, str], int]) -> None:
        """By tier and tenant."""
        for key, total in totals.items():
            if key not in self._hit_totals:
                self._hit_totals[key] = Total(self._hits.labels(*key))
            self._hit_totals[key].set(total)

    def set_saved(self, *, seconds: float, prompt_tokens: int, generation_tokens: int) -> None:
        self._saved_s.set(seconds)
        self._saved_prompt.set(prompt_tokens)
        self._saved_generation.set(generation_tokens)

    def set_semantic(
        self, refused: Mapping[str, int], judged: int, interval: tuple[float, float]
    ) -> None:
        """`refused` by reason; the interval of the false-hit rate rests on `judged` answers."""
        for reason, total in refused.items():
            if reason not in self._refused_totals:
                self._refused_totals[reason] = Total(self._refused.labels(reason))
            self._refused_totals[reason].set(total)
        self._judged.set(judged)
        for end, value in zip(("low", "high"), interval, strict=True):
            self._false_hits.labels(end).set(value)

    def set_tier(
        self,
        name: str,
        *,
        entries: int | None,
        size: int | None,
        healthy: bool,
        totals: Mapping[str, int],
    ) -> None:
        """`totals` has evictions, failures and dropped."""
        if entries is not None:
            self._entries.labels(name).set(entries)
        if size is not None:
            self._bytes.labels(name).set(size)
        self._healthy.labels(name).set(healthy)
        for kind, total in totals.items():
            if (kind, name) not in self._tier_totals:
                self._tier_totals[kind, name] = Total(self._tier[kind].labels(name))
            self._tier_totals[kind, name].set(total)
