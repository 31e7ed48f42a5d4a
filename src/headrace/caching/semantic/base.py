"""The seams of the semantic tier: what turns texts into vectors, and what judges two texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]
    """One dimension, unit length."""

__all__ = ["Embedder", "EmbeddingFailedError", "Judgement", "LocalEmbedder", "Text", "Verifier"]


class EmbeddingFailedError(Exception):
    """There is no vector, or none that could be trusted. The request goes on without."""


class Embedder(Protocol):
    """Texts to vectors whose dot product says how alike they are. Used on one event loop, which it
    does not block for long."""

    @property
    def id(self) -> str:
        """Changes whenever the vectors of the same text would."""
        ...

    @property
    def dimensions(self) -> int: ...

    @property
    def max_characters(self) -> int:
        """Longer texts may not be embedded whole, so they are not compared."""
        ...

    async def start(self) -> None:
        """Loads what is needed. Raises EmbeddingFailedError."""
        ...

    async def embed(self, texts: Sequence[str]) -> list[Vector]:
        """One for each text, in order. Raises EmbeddingFailedError, also for a text longer than the
        embedder's window."""
        ...

    async def close(self) -> None: ...


class LocalEmbedder(Embedder, Protocol):
    """One whose tokens are known here, so that they can be counted and given instead of texts."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def shorter(self) -> tuple[int, ...]:
        """Lengths to which its vectors can be cut and still be of use."""
        ...

    def encode(self, text: str) -> list[int]:
        """Its tokens. Raises EmbeddingFailedError if there are none or too many."""
        ...

    def check(self, ids: Sequence[int]) -> None:
        """Raises EmbeddingFailedError unless these are tokens, of which there are some and not too
        many."""
        ...

    async def embed_ids(self, ids: Sequence[Sequence[int]]) -> list[Vector]:
        """For texts that are tokens already. Raises EmbeddingFailedError."""
        ...


class Text(Protocol):
    """What a verifier knows of one text. Made once and kept with it; nobody else looks inside."""

    @property
    def unfit(self) -> str | None:
        """Why no text may be compared with this one: too long, mostly code, about now or about the
        asker. None: it may."""
        ...


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether the answer to the stored text may serve the asked one.

    `probability` that it is right, `lower` the bound it is above with the verifier's confidence.
    `reason` is empty, or what refused: a guard's name, or "bound".
    """

    served: bool
    probability: float
    lower: float
    reason: str


class Verifier(Protocol):
    """Pure, and some tenths of a millisecond. Called for the best few candidates of a look-up."""

    def prepare(self, text: str) -> Text: ...

    def judge(
        self, asked: Text, stored: Text, similarity: float, delta: float | None = None
    ) -> Judgement:
        """`delta` may only be stricter than the verifier's own."""
        ...

    def observe(self, asked: Text, stored: Text, similarity: float, *, right: bool) -> None:
        """What became of a pair that the guards let pass."""
        ...

    def bounds(self) -> dict[str, float]:
        """By how far two texts are apart: what the rate of right answers is above, as of now."""
        ...
