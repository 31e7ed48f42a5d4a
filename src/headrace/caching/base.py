"""The seam at which answers are looked up and kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from headrace.core.events import Event
from headrace.core.request import Request

__all__ = ["Recorder", "ResponseCache"]


class Recorder(Protocol):
    """Keeps one answer while it streams by. Dropped without `commit`, it keeps nothing."""

    def add(self, event: Event) -> None:
        """Called with every event, in order, before the client has it. Never raises."""
        ...

    def commit(self) -> None:
        """The answer is complete: store it, in the background where that takes time."""
        ...


class ResponseCache(Protocol):
    """Stored answers, as the streams they were. Methods run on the event loop.

    A cache that is broken or slow is a miss, never an error. What may be stored or reused for
    whom is the cache's own decision, from the request alone: its tenant is already set, its
    prompt is not tokenised yet.
    """

    async def lookup(self, request: Request) -> AsyncIterator[Event] | None:
        """The stored stream, whose Start names the cache tier, or None."""
        ...

    def record(self, request: Request) -> Recorder | None:
        """A recorder for the answer about to be computed, or None if it is not to be kept."""
        ...
