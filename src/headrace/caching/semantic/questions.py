"""The questions whose answers are stored, by partition."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.caching.semantic.index import VectorIndex

if TYPE_CHECKING:
    from headrace.caching.semantic.base import Text, Vector

__all__ = ["Asked", "Questions", "Stored"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question as it is compared. `wording` is its text without what never matters."""

    partition: bytes
    text: str
    wording: str
    prepared: Text


@dataclass(frozen=True, slots=True)
class Stored:
    """A question that has an answer under `key` until `expires`, in Unix time."""

    question: Asked
    key: bytes
    expires: float


@dataclass(slots=True)
class _Partition:
    index: VectorIndex
    rows: dict[int, Stored] = field(default_factory=dict)
    wordings: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)


class Questions:
    """At most `most` of them; the longest kept goes first. Event loop only, and vectors are added
    by one task at a time."""

    def __init__(self, dimensions: int, most: int) -> None:
        self._dimensions = dimensions
        self._most = most
        self._partitions: dict[bytes, _Partition] = {}
        self._places: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    @property
    def partitions(self) -> int:
        return len(self._partitions)

    def any_in(self, partition: bytes) -> bool:
        return partition in self._partitions

    async def add(self, stored: Stored, vector: Vector) -> None:
        """In the place of what has the same key."""
        self.remove(stored.key)
        name, number = stored.question.partition, next(self._numbers)
        partition = self._partitions.get(name)
        if partition is None:
            partition = self._partitions[name] = _Partition(VectorIndex(self._dimensions))
        partition.rows[number] = stored
        partition.wordings[stored.question.wording] = number
        self._places[stored.key] = (name, number)
        await partition.index.add(number, vector)
        if number not in partition.rows:  # removed while the index grew
            partition.index.remove(number)
        while len(self._places) > self._most:
            self.remove(next(iter(self._places)))

    def alias(self, asked: Asked, key: bytes) -> None:
        """From now on this wording too is the stored question's, until it has an answer itself."""
        place = self._places.get(key)
        if place is not None and place[0] == asked.partition:
            self._partitions[place[0]].aliases[asked.wording] = place[1]

    def remove(self, key: bytes) -> None:
        place = self._places.pop(key, None)
        if place is None:
            return
        name, number = place
        partition = self._partitions[name]
        stored = partition.rows.pop(number)
        partition.index.remove(number)
        if partition.wordings.get(stored.question.wording) == number:
            del partition.wordings[stored.question.wording]
        if partition.aliases:
            partition.aliases = {w: n for w, n in partition.aliases.items() if n != number}
        if not partition.rows:
            del self._partitions[name]

    def same_wording(self, asked: Asked) -> tuple[Stored, bool] | None:
        """The stored question that reads the same, and whether it does only by an alias."""
        partition = self._partitions.get(asked.partition)
        if partition is None:
            return None
        number = partition.wordings.get(asked.wording)
        if number is not None:
            return partition.rows[number], False
        number = partition.aliases.get(asked.wording)
        return None if number is None else (partition.rows[number], True)

    async def nearest(
        self, partition: bytes, vector: Vector, count: int
    ) -> list[tuple[Stored, float]]:
        """With their cosines, the nearest first."""
        kept = self._partitions.get(partition)
        if kept is None:
            return []
        found = await kept.index.search(vector, count)
        return [(kept.rows[number], cosine) for number, cosine in found if number in kept.rows]
