"""The cache's own counts, as metrics and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from headrace.caching import ResponseCache
from headrace.telemetry import CachingMetrics

__all__ = ["observe", "report"]


def observe(cache: ResponseCache, metrics: CachingMetrics) -> None:
    """Sets all figures, as of now."""
    counters = cache.counters
    metrics.set_answers(
        misses=counters.misses,
        bypasses=counters.bypasses,
        stores=counters.stores,
        coalesced=counters.coalesced,
    )
    hits: Counter[tuple[str, str]] = Counter()
    for (tier, owner), count in counters.hits.items():
        hits[tier, owner.partition("/")[0]] += count
    metrics.set_hits(hits)
    metrics.set_saved(
        seconds=counters.saved_s,
        prompt_tokens=counters.saved_prompt_tokens,
        generation_tokens=counters.saved_completion_tokens,
    )
    if cache.semantic is not None:
        state = cache.semantic.state()
        metrics.set_semantic(state.refused, state.judged, state.interval)
    for name, stats in cache.stats().items():
        metrics.set_tier(
            name,
            entries=stats.entries,
            size=stats.bytes,
            healthy=stats.healthy,
            totals={
                "evictions": stats.evictions,
                "failures": stats.failures,
                "dropped": stats.dropped,
            },
        )


def report(cache: ResponseCache) -> dict[str, object]:
    """For people and scripts; what is counted is counted since the start."""
    counters = cache.counters
    hits: Counter[str] = Counter()
    for (tier, _), count in counters.hits.items():
        hits[tier] += count
    found = hits.total()
    asked = found + counters.misses + counters.coalesced
    return {
        "hits": dict(hits),
        "coalesced": counters.coalesced,
        "misses": counters.misses,
        "bypasses": counters.bypasses,
        "stores": counters.stores,
        "hit_rate": round((found + counters.coalesced) / asked, 4) if asked else None,
        "saved": {
            "seconds": round(counters.saved_s, 3),
            "prompt_tokens": counters.saved_prompt_tokens,
            "completion_tokens": counters.saved_completion_tokens,
        },
        "tiers": {name: asdict(tier) for name, tier in cache.stats().items()},
        "semantic": None if cache.semantic is None else cache.semantic.report(),
    }
