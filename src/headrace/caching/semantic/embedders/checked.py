"""An embedder whose vectors can be relied on: checked, remembered, and passed by while it fails."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from headrace.caching.semantic.base import EmbeddingFailedError
from headrace.core.clock import Clock

if TYPE_CHECKING:
    from headrace.caching.semantic.base import Embedder, Vector

__all__ = ["CheckedEmbedder", "CheckedSettings", "unit"]

_PROBES = (
    "How do I reset my password?",
    "The recipe needs two eggs and a cup of flour.",
    "Which planet has the most moons?",
)
_PROBES_TOO_CLOSE = 0.97
"""Cosine. Embedders whose unrelated texts lie closest, the E5 family, stay below 0.9."""
_SAME_VECTOR = 0.99999
_UNLIKE = 0.2
"""Share of common letter pairs below which one vector for two texts cannot be right."""
_RECENT = 32
_LEAST_BETWEEN_PROBES_S = 10.0
_NOT_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class CheckedSettings:
    """`remembered`: so many texts' vectors are kept. After `failures` in a row, or when it tells
    texts no longer apart, the embedder is not asked for `retry_s`."""

    remembered: int = 4096
    failures: int = 3
    retry_s: float = 10.0


class CheckedEmbedder:
    """Raises EmbeddingFailedError instead of giving a vector that is not finite, zero, of the wrong
    length, or the same for texts that have nothing in common.

    Event loop only. The inner embedder is this one's to start and close.
    """

    def __init__(
        self, inner: Embedder, clock: Clock, settings: CheckedSettings | None = None
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._settings = settings or CheckedSettings()
        self._known: OrderedDict[str, Vector] = OrderedDict()
        self._recent: deque[tuple[frozenset[str], Vector]] = deque(maxlen=_RECENT)
        self._failures = 0
        self._refused_until = float("-inf")
        self._probed_at = float("-inf")
        self._suspect = False
        self.canary: Vector | None = None
        """The vector of a fixed text. When it has changed, all vectors have."""
        self.failed = 0
        """Calls that ended in EmbeddingFailedError, those not made included."""

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def dimensions(self) -> int:
        return self._inner.dimensions

    @property
    def max_characters(self) -> int:
        return self._inner.max_characters

    async def start(self) -> None:
        """Raises EmbeddingFailedError also for an embedder that tells nothing apart."""
        await self._inner.start()
        await self._probe()

    async def embed(self, texts: Sequence[str]) -> list[Vector]:
        try:
            return await self._embed(texts)
        except EmbeddingFailedError:
            self.failed += 1
            raise

    def remembered(self, text: str) -> Vector | None:
        """The vector if it needs no computing."""
        return self._known.get(text)

    async def close(self) -> None:
        await self._inner.close()

    async def _embed(self, texts: Sequence[str]) -> list[Vector]:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        fresh: dict[str, Vector] = {}
        if new:
            if self._clock.monotonic() < self._refused_until:
                raise EmbeddingFailedError("the embedder fails and is passed by")
            if self._suspect:
                await self._probe()
            fresh = dict(zip(new, await self._ask(new), strict=True))
            for text, vector in fresh.items():
                await self._compare(text, vector)
        vectors = [fresh[text] if text in fresh else self._known[text] for text in texts]
        for text, vector in zip(texts, vectors, strict=True):
            self._known[text] = vector
            self._known.move_to_end(text)
        while len(self._known) > self._settings.remembered:
            self._known.popitem(last=False)
        return vectors

    async def _ask(self, texts: list[str]) -> list[Vector]:
        try:
            raw = await self._inner.embed(texts)
            if len(raw) != len(texts):
                raise EmbeddingFailedError(f"{len(raw)} vectors for {len(texts)} texts")
            vectors = [unit(vector, self.dimensions) for vector in raw]
        except (EmbeddingFailedError, asyncio.CancelledError):
            self._count_failure()
            raise
        except Exception as error:  # of another's code
            self._count_failure()
            raise EmbeddingFailedError(f"{type(error).__name__}: {error}") from error
        self._failures = 0
        return vectors

    def _count_failure(self) -> None:
        self._failures += 1
        if self._failures >= self._settings.failures:
            self._failures = 0
            self._refused_until = self._clock.monotonic() + self._settings.retry_s

    async def _compare(self, text: str, vector: Vector) -> None:
        """Refuses a vector that a text with nothing in common has just had."""
        pairs = _letter_pairs(text)
        for others, other in self._recent:
            if float(vector @ other) >= _SAME_VECTOR and _overlap(pairs, others) < _UNLIKE:
                if self._clock.monotonic() - self._probed_at >= _LEAST_BETWEEN_PROBES_S:
                    await self._probe()
                raise EmbeddingFailedError("one vector for two unlike texts")
        self._recent.append((pairs, vector))

    async def _probe(self) -> None:
        """Whether the embedder tells texts apart at all."""
        self._probed_at = self._clock.monotonic()
        vectors = await self._ask(list(_PROBES))
        closest = max(float(a @ b) for n, a in enumerate(vectors) for b in vectors[n + 1 :])
        self._suspect = closest >= _PROBES_TOO_CLOSE
        if self._suspect:
            self._known.clear()
            self._recent.clear()
            self._refused_until = self._probed_at + self._settings.retry_s
            raise EmbeddingFailedError(f"it tells nothing apart: cosines up to {closest:.3f}")
        self.canary = vectors[0]


def unit(vector: object, dimensions: int) -> Vector:
    """As float32 of length 1. Raises EmbeddingFailedError for what has no direction."""
    try:
        array = np.asarray(vector, dtype=np.float32)
    except (TypeError, ValueError):
        raise EmbeddingFailedError("not a vector of numbers") from None
    if array.shape != (dimensions,):
        raise EmbeddingFailedError(f"a vector of shape {array.shape}, not {dimensions} numbers")
    norm = float(np.linalg.norm(array.astype(np.float64)))
    if not np.isfinite(norm) or norm < _NOT_TINY:
        raise EmbeddingFailedError("a vector without a direction")
    return array / np.float32(norm)


def _letter_pairs(text: str) -> frozenset[str]:
    plain = "".join(text.casefold().split())
    return frozenset(map("".join, pairwise(plain))) or frozenset({plain})


def _overlap(one: frozenset[str], other: frozenset[str]) -> float:
    """Jaccard."""
    return len(one & other) / (len(one | other) or 1)
