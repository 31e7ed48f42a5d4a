"""The two embedders that run here, with their real weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from headrace.caching.semantic.base import EmbeddingFailedError, LocalEmbedder
from headrace.caching.semantic.embedders.minilm import MiniLMEmbedder
from headrace.caching.semantic.embedders.wordllama import WordLlamaEmbedder

pytestmark = pytest.mark.anyio

ALIKE = ("How do I reset my password?", "How can I change my password?")
APART = "Which planet has the most moons?"


@pytest.fixture(params=[WordLlamaEmbedder, MiniLMEmbedder], ids=["wordllama", "minilm"])
async def embedder(request: pytest.FixtureRequest) -> AsyncIterator[LocalEmbedder]:
    made: LocalEmbedder = request.param()
    await made.start()
    yield made
    await made.close()


async def test_alike_is_nearer_than_apart(embedder: LocalEmbedder) -> None:
    one, two, other = await embedder.embed([*ALIKE, APART])
    assert one @ two > 0.6
    assert one @ other < 0.4
    for vector in (one, two, other):
        assert vector.shape == (embedder.dimensions,)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


async def test_a_text_has_the_same_vector_in_any_company(embedder: LocalEmbedder) -> None:
    texts = [*ALIKE, APART, "a", "Überraschung! 東京 🚀", "word " * 100]
    together = await embedder.embed(texts)
    by_ids = await embedder.embed_ids([embedder.encode(text) for text in texts])
    many = await asyncio.gather(*(embedder.embed([text]) for text in texts))
    for vector, (alone,), ids in zip(together, many, by_ids, strict=True):
        # 8-bit weights are scaled by batch, so the last digits differ.
        assert float(vector @ alone) > 0.999
        assert float(vector @ ids) > 0.999


@pytest.mark.parametrize("wrong", ["", "word " * 3000])
async def test_what_cannot_be_embedded_whole_is_refused(
    embedder: LocalEmbedder, wrong: str
) -> None:
    with pytest.raises(EmbeddingFailedError, match="tokens"):
        await embedder.embed(["fine", wrong])


@pytest.mark.parametrize("ids", [[], [-1], [10**9], [5] * 5000])
async def test_what_are_no_tokens_is_refused(embedder: LocalEmbedder, ids: list[int]) -> None:
    with pytest.raises(EmbeddingFailedError):
        embedder.check(ids)
    with pytest.raises(EmbeddingFailedError):
        await embedder.embed_ids([ids])


async def test_it_starts_and_closes_twice_and_fails_between(embedder: LocalEmbedder) -> None:
    await embedder.start()
    await embedder.close()
    await embedder.close()
    with pytest.raises(EmbeddingFailedError, match="not loaded"):
        await embedder.embed(["x"])
    await embedder.start()
    assert len(await embedder.embed(["x"])) == 1


async def test_without_its_weights_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingFailedError, match="cannot be read"):
        await WordLlamaEmbedder(tmp_path).start()
    with pytest.raises(EmbeddingFailedError, match="cannot be read"):
        await MiniLMEmbedder(tmp_path / "model.onnx").start()
    (tmp_path / "model.onnx").write_bytes(b"another")
    with pytest.raises(EmbeddingFailedError, match="not the expected model"):
        await MiniLMEmbedder(tmp_path / "model.onnx").start()


async def test_ids_name_the_weights() -> None:
    minilm, wordllama = MiniLMEmbedder(), WordLlamaEmbedder()
    await wordllama.start()
    assert minilm.id.startswith("minilm-")
    assert len(wordllama.id.rpartition("-")[2]) == 12
