"""The nearest stored vectors within one partition: exact up to a size, by a graph above it."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.caching.semantic.base import Vector

__all__ = ["EXACT_ROWS", "ExactIndex", "GraphIndex", "VectorIndex"]

EXACT_ROWS = 50_000
"""Above it a scan takes longer than a look-up may."""
_ON_LOOP_ROWS = 1_000
"""A scan of so few takes less than the way to a thread and back."""


class ExactIndex:
    """One matrix, scanned whole. Rows stay dense: the last one fills the gap of one removed."""

    def __init__(self, dimensions: int) -> None:
        self._matrix = np.empty((4, dimensions), np.float32)
        self._numbers: list[int] = []
        self._rows: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, vector: Vector) -> None:
        if number in self._rows:
            self._matrix[self._rows[number]] = vector
            return
        row = len(self._numbers)
        if row == len(self._matrix):
            grown = np.empty((2 * row, self._matrix.shape[1]), np.float32)
            grown[:row] = self._matrix
            self._matrix = grown
        self._matrix[row] = vector
        self._numbers.append(number)
        self._rows[number] = row

    def remove(self, number: int) -> None:
        row = self._rows.pop(number, None)
        if row is None:
            return
        last = self._numbers.pop()
        if last != number:
            self._matrix[row] = self._matrix[len(self._numbers)]
            self._numbers[row] = last
            self._rows[last] = row

    async def search(self, vector: Vector, count: int) -> list[tuple[int, float]]:
        """Numbers and cosines, the nearest first. A long scan runs in a thread; what changes
        meanwhile may be missed, but what is returned is there and has that cosine."""
        rows = len(self._numbers)
        if rows <= _ON_LOOP_ROWS:
            best = _nearest(self._matrix[:rows], vector, count)
        else:
            best = await asyncio.to_thread(_nearest, self._matrix[:rows], vector, count)
        found = [
            (self._numbers[row], float(self._matrix[row] @ vector))
            for row in best
            if row < len(self._numbers)
        ]
        return sorted(found, key=lambda item: (-item[1], item[0]))

    def numbers(self) -> list[int]:
        return list(self._numbers)

    def get(self, number: int) -> Vector | None:
        row = self._rows.get(number)
        return None if row is None else self._matrix[row]


def _nearest(matrix: NDArray[np.float32], vector: Vector, count: int) -> list[int]:
    rows = len(matrix)
    if not rows or count < 1:
        return []
    cosines = matrix @ vector
    best = np.arange(rows) if count >= rows else np.argpartition(cosines, rows - count)[-count:]
    found: list[int] = best.tolist()
    return found


class GraphIndex:
    """A proximity graph by usearch (Y. Malkov and D. Yashunin, IEEE TPAMI 42, 2020): a look-up that
    grows with the logarithm, and finds nearly all. One writer, and no reader beside it."""

    def __init__(self, dimensions: int) -> None:
        from usearch.index import Index  # noqa: PLC0415 - needed only above EXACT_ROWS

        self._graph: Any = Index(ndim=dimensions, metric="ip", dtype="f32", connectivity=32)

    @staticmethod
    def available() -> bool:
        return find_spec("usearch") is not None

    def __len__(self) -> int:
        return len(self._graph)

    def add(self, number: int, vector: Vector) -> None:
        self.remove(number)
        self._graph.add(number, vector)

    def remove(self, number: int) -> None:
        if number in self._graph:
            self._graph.remove(number)

    async def search(self, vector: Vector, count: int) -> list[tuple[int, float]]:
        """Numbers and cosines, the nearest first; some tenths of a millisecond, on the loop."""
        if not len(self._graph) or count < 1:
            return []
        matches = self._graph.search(vector, count)
        pairs = zip(matches.keys.tolist(), matches.distances.tolist(), strict=True)
        # The distance of the inner product is 1 - cosine for unit vectors.
        return [(int(number), 1.0 - float(distance)) for number, distance in pairs]


class VectorIndex:
    """An exact index that becomes a graph once it has outgrown a scan, if usearch is installed.
    Unit vectors by number. Event loop only."""

    def __init__(self, dimensions: int, exact_rows: int = EXACT_ROWS) -> None:
        self._dimensions = dimensions
        self._exact_rows = exact_rows
        self._index: ExactIndex | GraphIndex = ExactIndex(dimensions)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def exact(self) -> bool:
        return isinstance(self._index, ExactIndex)

    async def add(self, number: int, vector: Vector) -> None:
        """By one task at a time."""
        index = self._index
        if len(index) >= self._exact_rows and isinstance(index, ExactIndex):
            self._index = index = await self._graph(index)
        index.add(number, vector)

    def remove(self, number: int) -> None:
        self._index.remove(number)

    async def search(self, vector: Vector, count: int) -> list[tuple[int, float]]:
        return await self._index.search(vector, count)

    async def _graph(self, exact: ExactIndex) -> ExactIndex | GraphIndex:
        """The same vectors as a graph; the old index answers until it is built."""
        if not GraphIndex.available():
            return exact
        graph = GraphIndex(self._dimensions)
        added = exact.numbers()
        for count, number in enumerate(added):
            if (vector := exact.get(number)) is not None:
                graph.add(number, vector)
            if count % 64 == 63:
                await asyncio.sleep(0)
        for number in added:
            if exact.get(number) is None:
                graph.remove(number)
        return graph
