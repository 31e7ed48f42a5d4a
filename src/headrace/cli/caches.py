"""The response cache that the settings ask for."""

from __future__ import annotations

import random
import secrets
from typing import TYPE_CHECKING

from headrace.caching import CachePolicy, KeyMaker, MemoryTier, ResponseCache

if TYPE_CHECKING:
    from headrace.config import CachingSettings
    from headrace.core.clock import Clock

__all__ = ["response_cache"]


def response_cache(settings: CachingSettings, clock: Clock) -> ResponseCache | None:
    """None where it is switched off."""
    if not settings.enabled:
        return None
    secret = settings.secret
    return ResponseCache(
        MemoryTier(settings.memory, clock),
        KeyMaker(secrets.token_bytes(32) if secret is None else secret.get_secret_value().encode()),
        CachePolicy(
            ttl_s=settings.ttl,
            samples=settings.samples,
            coalesce=settings.coalesce,
            tool_calls=settings.tool_calls,
        ),
        clock=clock,
        rng=random.SystemRandom(),
    )
