"""Static vectors: the mean of the vectors of a text's tokens, from the files in wordllama's wheel.

40 microseconds for a question, so it runs on the event loop. It knows no word order: "A to B" and
"B to A" are the same to it, and the verifier must tell them apart.

Only the wheel's files are used, not its code, which looks for its tokenizer in a folder that the
wheel does not have, and then asks a hub. The vectors are the same to the last bit. The package says
MIT; its README says that they were trained from the token embeddings of Llama 2 70B and Phi-3
medium, so whoever cannot accept the Llama 2 Community Licence takes another embedder.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.caching.semantic.base import EmbeddingFailedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headrace.caching.semantic.base import Vector

__all__ = ["WordLlamaEmbedder"]

_WEIGHTS = Path("weights/l2_supercat_256.safetensors")
_TOKENIZER = Path("tokenizers/l2_supercat_tokenizer_config.json")
_NAME = "wordllama-l2-supercat-256"
_PIECE = 32
"""Texts that are embedded before others get their turn on the event loop."""


class WordLlamaEmbedder:
    """`folder` holds the wheel's `weights` and `tokenizers`; by default the installed package."""

    dimensions = 256
    max_characters = 2_000
    max_tokens = 2_048
    shorter = (64, 128)
    """It was trained so that these beginnings are of use (Matryoshka: A. Kusupati et al., 2022)."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._id = _NAME
        self._table: NDArray[np.float32] | None = None
        self._tokenizer: Any = None

    @property
    def id(self) -> str:
        return self._id

    async def start(self) -> None:
        if self._table is None:
            await asyncio.to_thread(self._load)

    async def embed(self, texts: Sequence[str]) -> list[Vector]:
        return await self.embed_ids([self.encode(text) for text in texts])

    def encode(self, text: str) -> list[int]:
        """Its tokens. Raises EmbeddingFailedError if they are none or too many."""
        if self._tokenizer is None:
            raise EmbeddingFailedError("wordllama is not loaded")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not 0 < len(ids) <= self.max_tokens:
            raise EmbeddingFailedError(f"{len(ids)} tokens, of at most {self.max_tokens}")
        return ids

    def check(self, ids: Sequence[int]) -> None:
        table = self._table
        if table is None:
            raise EmbeddingFailedError("wordllama is not loaded")
        if not 0 < len(ids) <= self.max_tokens:
            raise EmbeddingFailedError(f"{len(ids)} tokens, of at most {self.max_tokens}")
        if min(ids) < 0 or max(ids) >= len(table):
            raise EmbeddingFailedError("not tokens of this embedder")

    async def embed_ids(self, ids: Sequence[Sequence[int]]) -> list[Vector]:
        """For texts that are tokens already."""
        vectors = []
        for n, row in enumerate(ids, 1):
            vectors.append(self._mean(row))
            if n % _PIECE == 0:
                await asyncio.sleep(0)
        return vectors

    async def close(self) -> None:
        self._table = self._tokenizer = None

    def _mean(self, ids: Sequence[int]) -> Vector:
        import numpy as np  # noqa: PLC0415 - comes with the semantic extra

        self.check(ids)
        mean = self._rows(ids).mean(axis=0)
        norm = float(np.linalg.norm(mean))
        if not norm > 0:
            raise EmbeddingFailedError("the tokens' vectors cancel out")
        vector: Vector = mean / np.float32(norm)
        return vector

    def _rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        if self._table is None:
            raise EmbeddingFailedError("wordllama is not loaded")
        rows: NDArray[np.float32] = self._table[list(ids)]
        return rows

    def _load(self) -> None:
        try:
            import numpy as np  # noqa: PLC0415 - comes with the semantic extra
            from safetensors.numpy import load  # noqa: PLC0415
            from tokenizers import Tokenizer  # noqa: PLC0415
        except ImportError as error:
            raise EmbeddingFailedError(f"wordllama needs the semantic extra: {error}") from None
        folder = self._folder or _installed()
        try:
            weights = (folder / _WEIGHTS).read_bytes()
            tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
            table = load(weights)["embedding.weight"].astype(np.float32)
        except Exception as error:  # tokenizers and safetensors raise types of their own
            raise EmbeddingFailedError(f"wordllama in {folder} cannot be read: {error}") from error
        if table.ndim != 2 or table.shape[1] != self.dimensions:
            raise EmbeddingFailedError(f"wordllama's table has the shape {table.shape}")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._id = f"{_NAME}-{hashlib.sha256(weights).hexdigest()[:12]}"
        self._tokenizer, self._table = tokenizer, table


def _installed() -> Path:
    spec = find_spec("wordllama")
    if spec is None or spec.origin is None:
        raise EmbeddingFailedError("the package wordllama is not installed")
    return Path(spec.origin).parent
