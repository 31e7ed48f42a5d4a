"""Where a request's time went, told with its events."""

from __future__ import annotations

import msgspec

from headrace.core.clock import Clock
from headrace.core.events import Event, Start, Timings, Usage
from headrace.telemetry import RequestRecord

__all__ = ["timed"]


def timed(event: Event, record: RequestRecord, clock: Clock) -> Event:
    """The event, with what `record` knows of the request's times if it is one that tells them."""
    kind = type(event)
    if kind is Start:
        return msgspec.structs.replace(event, queue_s=_between(_arrival(record), record.dispatched))
    if kind is Usage:
        first, last = record.first_token, record.last_token
        begun = _arrival(record) if record.dispatched is None else record.dispatched
        timings = Timings(
            queue_s=_between(_arrival(record), record.dispatched),
            prefill_s=_between(begun, first),
            decode_s=None if first is None else _between(first, last),
            total_s=clock.monotonic() - _arrival(record),
        )
        return msgspec.structs.replace(event, timings=timings)
    return event


def _arrival(record: RequestRecord) -> float:
    return record.request.arrival


def _between(start: float, end: float | None) -> float | None:
    return None if end is None else max(0.0, end - start)
