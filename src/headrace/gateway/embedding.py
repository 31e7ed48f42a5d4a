"""Texts to vectors for whoever asks, past the queue of generation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.backends.base import ModelCard
from headrace.caching.semantic.base import EmbeddingFailedError, LocalEmbedder
from headrace.core.errors import BackendUnavailable, InvalidRequest
from headrace.telemetry import EmbeddingMetrics

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Embedded", "Embeddings"]

_ENCODED_ON_LOOP = 8_192
"""Characters that are tokenised in less time than the way to a thread and back takes."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """One vector for each input, in order, and the tokens of all."""

    vectors: list[NDArray[np.float32]]
    tokens: int


class Embeddings:
    """Embedders by the name they are served under. Event loop only."""

    def __init__(self, embedders: Mapping[str, LocalEmbedder], metrics: EmbeddingMetrics) -> None:
        self._embedders = dict(embedders)
        self._metrics = metrics
        self._cards = tuple(
            ModelCard(name, 0, embedder.max_tokens) for name, embedder in self._embedders.items()
        )

    def cards(self) -> tuple[ModelCard, ...]:
        return self._cards

    def __contains__(self, model: str) -> bool:
        return model in self._embedders

    async def embed(
        self,
        model: str,
        inputs: Sequence[str | tuple[int, ...]],
        dimensions: int | None,
    ) -> Embedded:
        """Raises InvalidRequest that names the field, and BackendUnavailable."""
        embedder = self._embedders[model]
        if dimensions is not None and dimensions not in (embedder.dimensions, *embedder.shorter):
            possible = ", ".join(map(str, (*embedder.shorter, embedder.dimensions)))
            raise InvalidRequest(f"{model} has vectors of {possible} numbers.", param="dimensions")
        ids = await self._tokens(embedder, inputs)
        try:
            vectors = await embedder.embed_ids(ids)
        except EmbeddingFailedError as error:
            raise BackendUnavailable(
                f"The embedding model cannot answer: {error}.", retry_after_s=1.0
            ) from None
        tokens = sum(map(len, ids))
        self._metrics.embedded(model, len(ids), tokens)
        if dimensions is not None and dimensions < embedder.dimensions:
            vectors = [_cut(vector, dimensions) for vector in vectors]
        return Embedded(vectors, tokens)

    async def _tokens(
        self, embedder: LocalEmbedder, inputs: Sequence[str | tuple[int, ...]]
    ) -> list[Sequence[int]]:
        length = sum(len(item) for item in inputs)
        if length <= _ENCODED_ON_LOOP:
            return _encoded(embedder, inputs)
        return await asyncio.to_thread(_encoded, embedder, inputs)

    async def start(self) -> None:
        """Raises BackendUnavailable of one that cannot be loaded."""
        for name, embedder in self._embedders.items():
            try:
                await embedder.start()
            except EmbeddingFailedError as error:
                raise BackendUnavailable(f"{name}: {error}") from None

    async def close(self) -> None:
        for embedder in self._embedders.values():
            await embedder.close()


def _encoded(
    embedder: LocalEmbedder, inputs: Sequence[str | tuple[int, ...]]
) -> list[Sequence[int]]:
    found: list[Sequence[int]] = []
    for number, item in enumerate(inputs):
        try:
            if isinstance(item, str):
                found.append(embedder.encode(item))
            else:
                embedder.check(item)
                found.append(item)
        except EmbeddingFailedError as error:
            raise InvalidRequest(f"Input {number}: {error}.", param="input") from None
    return found


def _cut(vector: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Its beginning, made a unit vector again."""
    import numpy as np  # noqa: PLC0415 - comes with the semantic extra

    short = vector[:dimensions]
    norm = np.linalg.norm(short)
    cut: NDArray[np.float32] = (short / (norm if norm > 0 else 1.0)).astype(np.float32)
    return cut
