"""Questions with intents, their vectors, and how one is looked for among those before it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.caching.semantic.base import Embedder
from headrace.caching.semantic.embedders.minilm import MiniLMEmbedder
from headrace.caching.semantic.embedders.wordllama import WordLlamaEmbedder
from headrace.caching.semantic.forms import Form, form_of

__all__ = ["EMBEDDERS", "Question", "nearest", "questions", "vectors"]

EMBEDDERS: dict[str, type[WordLlamaEmbedder | MiniLMEmbedder]] = {
    "wordllama": WordLlamaEmbedder,
    "minilm": MiniLMEmbedder,
}
CANDIDATES = 5
MIN_SIMILARITY = 0.5
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    intent: str
    form: Form


def questions(folder: Path) -> list[Question]:
    """Of banking77 and CLINC150, each wording of an intent once. Those out of scope have no
    intent, so nothing is known of what they share."""
    found: dict[tuple[str, str], Question] = {}
    for name in ("intents_banking77", "intents_clinc150"):
        for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["intent"] == "oos":
                continue
            form = form_of(row["text"])
            intent = f"{name}/{row['intent']}"
            found.setdefault((form.trivial, intent), Question(row["text"], intent, form))
    return list(found.values())


def vectors(name: str, texts: Sequence[str], cache: Path | None) -> NDArray[np.float32]:
    """One row a text; those of a model that takes long are kept in `cache`."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    file = None if cache is None else cache / f"{name}-{digest}.npy"
    if file is not None and file.exists():
        kept: NDArray[np.float32] = np.load(file)
        return kept
    made = np.stack(asyncio.run(_embedded(EMBEDDERS[name](), texts)))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, made)
    return made


async def _embedded(embedder: Embedder, texts: Sequence[str]) -> list[NDArray[np.float32]]:
    await embedder.start()
    rows: list[NDArray[np.float32]] = []
    for start in range(0, len(texts), _ROWS):
        rows += await embedder.embed([text[:1000] for text in texts[start : start + _ROWS]])
    await embedder.close()
    return rows


def nearest(matrix: NDArray[np.float32], row: int, stored: int) -> list[tuple[int, float]]:
    """Among the first `stored` rows, as the tier does it: the best few of enough similarity."""
    if not stored:
        return []
    cosines = matrix[:stored] @ matrix[row]
    count = min(CANDIDATES, stored)
    best = np.argpartition(cosines, stored - count)[-count:]
    found = [(int(i), float(cosines[i])) for i in best if cosines[i] >= MIN_SIMILARITY]
    return sorted(found, key=lambda item: -item[1])
