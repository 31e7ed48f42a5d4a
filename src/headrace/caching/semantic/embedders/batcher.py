"""Many callers' texts as batches for a model that runs in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from headrace.caching.semantic.base import EmbeddingFailedError

if TYPE_CHECKING:
    from headrace.caching.semantic.base import Vector

__all__ = ["Batcher"]

Item = TypeVar("Item")


class _Waiting(Generic[Item]):
    __slots__ = ("future", "item", "size")

    def __init__(self, item: Item, size: int, future: asyncio.Future[Vector]) -> None:
        self.item = item
        self.size = size
        self.future = future


class Batcher(Generic[Item]):
    """Runs what waits as soon as a worker is free, so waiting is never for its own sake: texts
    gather only while all workers are busy, which is when a batch pays.

    A batch starts with the longest-waiting item and takes others of about its size, since the
    model pads all to the longest: `budget` bounds size of the longest times their number.
    `run` is called in a worker thread. Owned by one event loop.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Vector]],
        size: Callable[[Item], int],
        *,
        budget: int,
        workers: int = 1,
        most_waiting: int = 8192,
        name: str = "embed",
    ) -> None:
        self._run = run
        self._size = size
        self._budget = budget
        self._idle = workers
        self._most_waiting = most_waiting
        self._waiting: list[_Waiting[Item]] = []
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=f"headrace-{name}")
        self._under_way: set[asyncio.Task[None]] = set()
        self._closed = False
        self.batches = 0
        self.items = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def submit(self, items: Sequence[Item]) -> list[Vector]:
        """The vectors, in order. Raises EmbeddingFailedError when too many wait already, and what
        `run` raises. Cancelled items are not run unless they run already."""
        if self._closed or len(self._waiting) + len(items) > self._most_waiting:
            raise EmbeddingFailedError("too many texts wait for the embedder")
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in items]
        self._waiting += [
            _Waiting(item, self._size(item), future)
            for item, future in zip(items, futures, strict=True)
        ]
        self._pump()
        return list(await asyncio.gather(*futures))

    async def close(self) -> None:
        """Refuses what waits; what runs is let finish."""
        self._closed = True
        for waiting in self._waiting:
            if not waiting.future.done():
                waiting.future.set_exception(EmbeddingFailedError("the embedder is closed"))
        self._waiting.clear()
        if self._under_way:
            await asyncio.wait(self._under_way)
        self._pool.shutdown(wait=False)

    def _pump(self) -> None:
        self._waiting = [waiting for waiting in self._waiting if not waiting.future.done()]
        while self._idle and self._waiting:
            self._idle -= 1
            task = asyncio.get_running_loop().create_task(self._work(self._batch()))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    def _batch(self) -> list[_Waiting[Item]]:
        first = self._waiting[0].size
        alike = sorted(self._waiting[1:], key=lambda waiting: abs(waiting.size - first))
        batch, longest = [self._waiting[0]], first
        for waiting in alike:
            longest = max(longest, waiting.size)
            if longest * (len(batch) + 1) > self._budget or waiting.size > 2 * max(first, 16):
                break
            batch.append(waiting)
        taken = {id(waiting) for waiting in batch}
        self._waiting = [waiting for waiting in self._waiting if id(waiting) not in taken]
        return batch

    async def _work(self, batch: list[_Waiting[Item]]) -> None:
        self.batches += 1
        self.items += len(batch)
        try:
            vectors = await asyncio.get_running_loop().run_in_executor(
                self._pool, self._run, [waiting.item for waiting in batch]
            )
            if len(vectors) != len(batch):
                raise EmbeddingFailedError(f"{len(vectors)} vectors for {len(batch)} texts")
        except Exception as error:  # noqa: BLE001 - whatever it is, the callers get it
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
        else:
            for waiting, vector in zip(batch, vectors, strict=True):
                if not waiting.future.done():
                    waiting.future.set_result(vector)
        finally:
            self._idle += 1
            if not self._closed:
                self._pump()
