"""The nearest vectors."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.caching.semantic import index as module
from headrace.caching.semantic.index import ExactIndex, GraphIndex, VectorIndex

pytestmark = pytest.mark.anyio

D = 8


def vector(seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).normal(size=D).astype(np.float32)
    return raw / np.linalg.norm(raw)


async def test_an_empty_index_finds_nothing() -> None:
    assert await VectorIndex(D).search(vector(0), 5) == []


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60),
    st.integers(0, 20),
    st.integers(1, 6),
)
async def test_it_finds_what_a_plain_scan_finds(
    steps: list[tuple[bool, int]], asked: int, count: int
) -> None:
    index, plain = ExactIndex(D), dict[int, np.ndarray]()
    for n, (adds, number) in enumerate(steps):
        if adds:
            plain[number] = vector(1000 + n)
            index.add(number, plain[number])
        else:
            plain.pop(number, None)
            index.remove(number)
    assert len(index) == len(plain)
    question = vector(asked)
    expected = sorted(((float(v @ question), n) for n, v in plain.items()), reverse=True)[:count]
    found = await index.search(question, count)
    assert [cosine for _, cosine in found] == pytest.approx([c for c, _ in expected], abs=1e-5)
    for number, cosine in found:
        assert cosine == pytest.approx(float(plain[number] @ question), abs=1e-5)


async def test_a_scan_in_a_thread_returns_only_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that go while the scan runs are not in its result."""
    index = ExactIndex(D)
    for number in range(3000):
        index.add(number, vector(number))

    async def meanwhile(_: object, *args: object) -> object:
        found = module._nearest(*args)  # type: ignore[arg-type]
        for number in range(10, 3000):
            index.remove(number)
        return found

    monkeypatch.setattr(asyncio, "to_thread", meanwhile)
    found = await index.search(vector(5), 50)
    assert {number for number, _ in found} <= set(range(10))
    for number, cosine in found:
        assert cosine == pytest.approx(float(vector(number) @ vector(5)), abs=1e-5)


async def test_it_becomes_a_graph_when_it_has_outgrown_a_scan() -> None:
    pytest.importorskip("usearch")
    index = VectorIndex(D, exact_rows=200)
    for number in range(200):
        await index.add(number, vector(number))
    assert index.exact
    await index.add(200, vector(200))
    assert isinstance(index._index, GraphIndex)
    assert len(index) == 201
    for number in (0, 77, 200):
        (best, *_) = await index.search(vector(number), 3)
        assert best[0] == number
        assert best[1] == pytest.approx(1.0, abs=1e-4)
    index.remove(77)
    assert 77 not in [number for number, _ in await index.search(vector(77), 5)]


async def test_what_is_removed_while_the_graph_is_built_stays_out() -> None:
    pytest.importorskip("usearch")
    exact = ExactIndex(D)
    for number in range(300):
        exact.add(number, vector(number))
    index = VectorIndex(D, exact_rows=300)
    index._index = exact
    growing = asyncio.create_task(index.add(300, vector(300)))
    await asyncio.sleep(0)
    index.remove(3)
    await growing
    assert isinstance(index._index, GraphIndex)
    assert len(index) == 300
    assert 3 not in [number for number, _ in await index.search(vector(3), 5)]


async def test_without_usearch_it_goes_on_scanning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphIndex, "available", lambda: False)
    index = VectorIndex(D, exact_rows=4)
    for number in range(6):
        await index.add(number, vector(number))
    assert index.exact
    assert len(index) == 6
