"""Vectors that can be relied on, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.caching.semantic.base import EmbeddingFailedError
from headrace.caching.semantic.embedders.checked import CheckedEmbedder, CheckedSettings
from headrace.core.clock import VirtualClock
from support.meaning import Letters

pytestmark = pytest.mark.anyio

TEXTS = ["how do birds fly?", "what is the capital of peru?", "bake me a cake"]


class Wrong(Letters):
    """Good until it is told otherwise."""

    def __init__(self, spoil: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.spoil = spoil
        self.spoilt = False

    async def embed(self, texts: Sequence[str]) -> Any:
        vectors = await super().embed(texts)
        return self.spoil(vectors) if self.spoilt else vectors


def constant(vectors: list[Any]) -> list[Any]:
    return [np.ones(26, np.float32) for _ in vectors]


async def test_good_vectors_come_through_at_unit_length_and_are_remembered() -> None:
    inner = Letters()
    checked = CheckedEmbedder(inner, VirtualClock())
    await checked.start()
    inner.asked.clear()
    first = await checked.embed(TEXTS)
    again = await checked.embed([TEXTS[1], TEXTS[0]])
    assert inner.asked == TEXTS
    assert (again[0] == first[1]).all()
    assert (again[1] == first[0]).all()
    assert all(np.linalg.norm(vector) == pytest.approx(1.0) for vector in first)
    assert checked.failed == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda vectors: [v * np.nan for v in vectors],
        lambda vectors: [v * np.inf for v in vectors],
        lambda vectors: [v * 0 for v in vectors],
        lambda vectors: [v[:-1] for v in vectors],
        lambda vectors: vectors[:-1],
        lambda vectors: [*vectors, vectors[0]],
        lambda vectors: ["x" for _ in vectors],
        lambda _: None,
        constant,
    ],
    ids=["nan", "inf", "zero", "short", "fewer", "more", "words", "none", "constant"],
)
async def test_a_bad_vector_is_a_failure_and_is_not_remembered(spoil: Any) -> None:
    inner = Wrong(spoil)
    checked = CheckedEmbedder(inner, VirtualClock())
    await checked.start()
    inner.spoilt = True
    with pytest.raises(EmbeddingFailedError):
        await checked.embed(TEXTS)
    inner.spoilt = False
    assert checked.failed == 1


async def test_an_embedder_that_tells_nothing_apart_does_not_start() -> None:
    inner = Wrong(constant)
    inner.spoilt = True
    with pytest.raises(EmbeddingFailedError, match="tells nothing apart"):
        await CheckedEmbedder(inner, VirtualClock()).start()


async def test_what_fails_in_a_row_is_passed_by_for_a_while() -> None:
    clock, inner = VirtualClock(), Letters()
    checked = CheckedEmbedder(inner, clock, CheckedSettings(failures=2, retry_s=10.0))
    await checked.start()
    inner.broken = ZeroDivisionError("bug")
    for text in ("a b", "c d"):
        with pytest.raises(EmbeddingFailedError, match="ZeroDivisionError"):
            await checked.embed([text])
    inner.broken = None
    with pytest.raises(EmbeddingFailedError, match="passed by"):
        await checked.embed(["e f"])
    clock.advance(11.0)
    await checked.embed(["e f"])


async def test_only_so_many_vectors_are_remembered() -> None:
    inner = Letters()
    checked = CheckedEmbedder(inner, VirtualClock(), CheckedSettings(remembered=3))
    await checked.start()
    texts = [f"{chr(97 + n) * 5} number" for n in range(6)]
    await checked.embed(texts)
    assert [checked.remembered(text) is not None for text in texts] == [False] * 3 + [True] * 3
