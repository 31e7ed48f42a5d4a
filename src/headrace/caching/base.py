"""The seams of caching: tiers that keep entries, and what replicas tell each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headrace.caching.entry import Entry

__all__ = [
    "Bulletin",
    "Handler",
    "Leases",
    "Listed",
    "Match",
    "Semantic",
    "SemanticState",
    "Tier",
    "TierStats",
]


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier as of now. `healthy` false: it is being passed by. Counts are since the start."""

    entries: int | None
    bytes: int | None
    healthy: bool = True
    hits: int = 0
    misses: int = 0
    stores: int = 0
    evictions: int = 0
    failures: int = 0
    dropped: int = 0
    """Writes given up because too many were waiting or the tier was unhealthy."""


class Tier(Protocol):
    """One place where entries are kept, by 32-byte keys that tell nothing of what they stand for.

    Methods are called on one event loop and neither block it nor raise: a broken, slow or full
    tier is a miss, and a write may be lost. An entry past its `expires` is never returned.
    """

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Returns soon, whether or not the tier can be reached."""
        ...

    async def get(self, key: bytes) -> Entry | None:
        """Within the tier's own time limit."""
        ...

    def put(self, key: bytes, entry: Entry) -> None:
        """Written behind, overwriting what is there."""
        ...

    def remove(self, key: bytes) -> None: ...

    def stats(self) -> TierStats: ...

    async def close(self) -> None:
        """Writes what still waits, within a second or two. Idempotent."""
        ...


@runtime_checkable
class Listed(Protocol):
    """A tier that can tell all it has, for an export."""

    def entries(self) -> AsyncIterator[tuple[bytes, Entry]]:
        """Keys and entries as of about now, in a bounded amount of memory."""
        ...


Handler = Callable[[bytes], None]


class Bulletin(Protocol):
    """A log of changes that every replica writes and reads, in the same order for all.

    Messages published while it cannot be reached are kept, up to a number, and sent later.
    """

    def publish(self, kind: str, message: bytes) -> None:
        """Never blocks, never raises."""
        ...

    def subscribe(self, kind: str, handler: Handler) -> None:
        """`handler` gets each message of this kind, the replica's own ones too, on the loop."""
        ...

    def on_gap(self, handler: Callable[[], None]) -> None:
        """Called after messages were missed, or may have been."""
        ...


class Leases(Protocol):
    """Who of several replicas computes an answer. Unreachable: everybody may."""

    async def take(self, key: bytes, ttl_s: float) -> Callable[[], Awaitable[None]] | None:
        """What gives the lease back, or None if another replica holds it. Within the tier's time
        limit; a lease that cannot be had for any other reason is granted."""
        ...

    async def held(self, key: bytes) -> bool:
        """Whether somebody computes it now; False if that cannot be told."""
        ...


@dataclass(frozen=True, slots=True)
class Match:
    """A stored answer to another question that means the same: the entry's key, the cosine of the
    two questions, the probability that the answer is right for both, and its lower bound."""

    key: bytes
    similarity: float
    probability: float
    lower: float
    pair: str
    """Names the two questions, for feedback."""


@dataclass(frozen=True, slots=True)
class SemanticState:
    """Look-ups in vain by reason, and between what the share of wrong answers is at 95 %, by so
    many that were `judged`."""

    refused: Mapping[str, int]
    judged: int
    interval: tuple[float, float]


class Semantic(Protocol):
    """Stored questions, found by meaning. All but `find` return at once; nothing raises."""

    async def start(self, read: Callable[[bytes], Awaitable[Entry | None]]) -> None:
        """Returns at once; what is needed is loaded meanwhile. `read` gives the entry of a key."""
        ...

    async def close(self) -> None: ...

    def serves(self, owner: str, model: str) -> bool:
        """Whether the operator allows it for them."""
        ...

    async def find(
        self, partition: bytes, text: str, *, min_similarity: float | None = None
    ) -> Match | None:
        """Within a deadline of its own."""
        ...

    def learn(self, partition: bytes, text: str, key: bytes, expires: float) -> None:
        """The answer to `text` is stored under `key` until `expires`, in Unix time."""
        ...

    def forget(self, key: bytes) -> None:
        """There is no entry of this key any more."""
        ...

    def feedback(self, pair: str, *, good: bool) -> bool:
        """Somebody's word on two questions taken for the same; False if they are not known."""
        ...

    def state(self) -> SemanticState: ...

    def report(self) -> Mapping[str, object]:
        """What it did and how well, as JSON knows it."""
        ...
