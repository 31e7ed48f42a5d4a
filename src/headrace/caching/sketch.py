"""How often a key was seen lately, in a few bytes a key."""

from __future__ import annotations

__all__ = ["FrequencySketch"]

_ROWS = 4
_MOST = 15


class FrequencySketch:
    """A count-min sketch of counters up to 15 that are halved after every ten requests a counter,
    as in TinyLFU (Einziger, Friedman, Manes, 2017, arXiv 1512.00727). Never counts too low since
    the last halving. Keys are uniformly distributed bytes, so their own bytes serve as hashes."""

    def __init__(self, capacity: int) -> None:
        width = 1 << max(8, (max(1, capacity) - 1).bit_length())
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(_ROWS)]
        self._seen = 0
        self._period = 10 * width

    def add(self, key: bytes) -> None:
        for row, at in self._places(key):
            if row[at] < _MOST:
                row[at] += 1
        self._seen += 1
        if self._seen >= self._period:
            self._age()

    def count(self, key: bytes) -> int:
        return min(row[at] for row, at in self._places(key))

    def _places(self, key: bytes) -> list[tuple[bytearray, int]]:
        mask = self._mask
        return [
            (row, int.from_bytes(key[4 * i : 4 * i + 4], "little") & mask)
            for i, row in enumerate(self._rows)
        ]

    def _age(self) -> None:
        halves = bytes(value >> 1 for value in range(256))
        self._rows = [row.translate(halves) for row in self._rows]
        self._seen //= 2
