"""What stands for an embedder and a verifier in tests: letters and words."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.caching.semantic.base import Judgement

if TYPE_CHECKING:
    from headrace.caching.semantic.base import Vector

__all__ = ["ByWords", "Letters"]


class Letters:
    """Texts as counts of their letters."""

    id = "letters"
    dimensions = 26
    max_characters = 1000

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self.starts = 0
        self.hangs = False
        self.asked: list[str] = []

    async def start(self) -> None:
        self.starts += 1
        if self.broken is not None:
            raise self.broken

    async def embed(self, texts: Sequence[str]) -> list[Vector]:
        self.asked += texts
        if self.hangs:
            await asyncio.Event().wait()
        if self.broken is not None:
            raise self.broken
        vectors = []
        for text in texts:
            counts = np.full(26, 1e-3, np.float32)
            for char in text.lower():
                if "a" <= char <= "z":
                    counts[ord(char) - 97] += 1
            vectors.append(counts / np.linalg.norm(counts))
        return vectors

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Words:
    words: frozenset[str]
    unfit: str | None = None


class ByWords:
    """Serves what has the same words; unsure where most are the same."""

    def __init__(self) -> None:
        self.observed: list[bool] = []

    def prepare(self, text: str) -> Words:
        words = frozenset(text.lower().strip("?").split())
        return Words(words, "time" if "now" in words else None)

    def judge(
        self,
        asked: object,
        stored: object,
        similarity: float,  # noqa: ARG002 - a Verifier has it
        delta: float | None = None,  # noqa: ARG002
    ) -> Judgement:
        assert isinstance(asked, Words)
        assert isinstance(stored, Words)
        share = len(asked.words & stored.words) / len(asked.words | stored.words)
        served = share == 1.0
        return Judgement(served, share, share, "" if served else "bound")

    def observe(self, *_: object, right: bool) -> None:
        self.observed.append(right)

    def bounds(self) -> dict[str, float]:
        return {}
