"""Many callers' texts as batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from headrace.caching.semantic.base import EmbeddingFailedError
from headrace.caching.semantic.embedders.batcher import Batcher

pytestmark = pytest.mark.anyio


class Model:
    """Waits for the gate, then answers with each item's size."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[int]] = []
        self.broken: Exception | None = None

    def run(self, items: list[int]) -> Sequence[np.ndarray]:
        self.gate.wait(5)
        self.batches.append(items)
        if self.broken is not None:
            raise self.broken
        return [np.array([item], np.float32) for item in items]


def batcher(model: Model, most_waiting: int = 8192) -> Batcher[int]:
    return Batcher(model.run, lambda item: item, budget=64, most_waiting=most_waiting)


async def values(made: Batcher[int], items: Sequence[int]) -> list[int]:
    return [int(vector[0]) for vector in await made.submit(items)]


async def test_one_alone_does_not_wait_for_others() -> None:
    model = Model()
    made = batcher(model)
    assert await values(made, [7]) == [7]
    assert model.batches == [[7]]
    await made.close()


async def test_what_comes_while_the_model_is_busy_goes_together() -> None:
    model = Model()
    made = batcher(model)
    model.gate.clear()
    first = asyncio.create_task(values(made, [5]))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(values(made, [4])) for _ in range(10)]
    await asyncio.sleep(0.01)
    model.gate.set()
    assert await first == [5]
    assert await asyncio.gather(*others) == [[4]] * 10
    assert [len(batch) for batch in model.batches] == [1, 10]
    await made.close()


async def test_hundreds_each_get_their_own_in_order_and_within_the_budget() -> None:
    model = Model()
    made = batcher(model)
    asked = [[(3 * n) % 40 + 1, n % 7 + 1] for n in range(400)]
    assert await asyncio.gather(*(values(made, items) for items in asked)) == asked
    for batch in model.batches:
        assert len(batch) == 1 or max(batch) * len(batch) <= 64
        assert max(batch) <= 2 * max(batch[0], 16)
    assert len(model.batches) < 500
    await made.close()


async def test_the_longest_waiting_is_in_the_next_batch() -> None:
    model = Model()
    made = batcher(model)
    model.gate.clear()
    tasks = [asyncio.create_task(values(made, [1]))]
    await asyncio.sleep(0.01)
    tasks.append(asyncio.create_task(values(made, [60])))
    tasks += [asyncio.create_task(values(made, [1])) for _ in range(100)]
    await asyncio.sleep(0.01)
    model.gate.set()
    await asyncio.gather(*tasks)
    assert model.batches[1][0] == 60
    await made.close()


async def test_who_has_gone_is_not_computed() -> None:
    model = Model()
    made = batcher(model)
    model.gate.clear()
    first = asyncio.create_task(values(made, [1]))
    await asyncio.sleep(0.01)
    gone = asyncio.create_task(values(made, [2]))
    stays = asyncio.create_task(values(made, [3]))
    await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.sleep(0.01)
    model.gate.set()
    assert (await first, await stays) == ([1], [3])
    assert model.batches == [[1], [3]]
    await made.close()


async def test_a_failure_is_that_batchs_alone() -> None:
    model = Model()
    made = batcher(model)
    model.broken = EmbeddingFailedError("no")
    with pytest.raises(EmbeddingFailedError, match="no"):
        await made.submit([1])
    model.broken = None
    assert await values(made, [2]) == [2]
    await made.close()


async def test_too_many_are_refused_and_closing_refuses_what_waits() -> None:
    model = Model()
    made = batcher(model, most_waiting=3)
    model.gate.clear()
    first = asyncio.create_task(values(made, [1]))
    await asyncio.sleep(0.01)
    waits = asyncio.create_task(values(made, [1, 1, 1]))
    await asyncio.sleep(0.01)
    with pytest.raises(EmbeddingFailedError, match="too many"):
        await made.submit([1])
    closing = asyncio.create_task(made.close())
    await asyncio.sleep(0.01)
    with pytest.raises(EmbeddingFailedError, match="closed"):
        await waits
    model.gate.set()
    await closing
    assert await first == [1]
    with pytest.raises(EmbeddingFailedError):
        await made.submit([1])
