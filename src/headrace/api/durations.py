"""Times as headers spell them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.core.events import Start, Usage

__all__ = ["duration", "milliseconds", "server_timing", "timings_object"]


def duration(seconds: float) -> str:
    """As in OpenAI's x-ratelimit-reset headers, which is how Go writes one: 20ms, 1s, 1.5s, 6m0s.
    Rounded up to whole milliseconds, so that who waits this long has waited long enough."""
    total_ms = math.ceil(max(seconds, 0.0) * 1000 - 1e-6)
    if 0 < total_ms < 1000:
        return f"{total_ms}ms"
    minutes, rest_ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, fraction = divmod(rest_ms, 1000)
    text = _decimal(whole + fraction / 1000)
    if hours:
        return f"{hours}h{minutes}m{text}s"
    return f"{minutes}m{text}s" if minutes else f"{text}s"


def _decimal(value: float) -> str:
    """With up to three digits behind the point, and never an exponent."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def milliseconds(seconds: float | None) -> float | None:
    """Rounded to a microsecond."""
    return None if seconds is None else round(seconds * 1000, 3)


def server_timing(known: Start | Usage) -> bytes:
    """The Server-Timing header (https://www.w3.org/TR/server-timing/) of what is known by then:
    the wait at the start, all of it at the end; durations in milliseconds. `cached` is not a time:
    its description is the number of prompt tokens that were taken from the prefix cache."""
    if isinstance(known, Start):
        times: Iterable[tuple[str, float | None]] = (("queue", known.queue_s),)
    elif known.timings is None:
        times = ()
    else:
        t = known.timings
        times = (
            ("queue", t.queue_s),
            ("prefill", t.prefill_s),
            ("decode", t.decode_s),
            ("total", t.total_s),
        )
    metrics = [f"{name};dur={_decimal(s * 1000)}" for name, s in times if s is not None]
    return ", ".join([*metrics, f'cached;desc="{known.cached_tokens}"']).encode()


def timings_object(usage: Usage) -> dict[str, float | int | None] | None:
    """`timings` of a reply: our addition to OpenAI's format, as llama.cpp's server has one too."""
    if usage.timings is None:
        return None
    return {
        "queue_ms": milliseconds(usage.timings.queue_s),
        "prefill_ms": milliseconds(usage.timings.prefill_s),
        "decode_ms": milliseconds(usage.timings.decode_s),
        "total_ms": milliseconds(usage.timings.total_s),
        "cached_tokens": usage.cached_tokens,
    }
