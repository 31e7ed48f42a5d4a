"""What two questions differ in, as figures: cheap, each with a sign that is known beforehand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from headrace.caching.semantic.forms import Form
from headrace.caching.semantic.guards import Difference
from headrace.caching.semantic.lexicon import Lexicon, lexicon

__all__ = ["SIGNS", "STEPS", "features", "is_light", "step"]

STEPS = ("identical", "surface", "wording", "grammar", "soft", "light", "open")
"""How far two questions are apart, nearest first: the same text; the same but for what typing
changes; the same canonical wording; but for number, person or advice; but for word forms, near
synonyms, typing errors or the place of a phrase; but for words that carry little; anything else."""

SIGNS: Mapping[str, int] = {
    "similarity": 1,
    "characters": 1,
    "overlap": 1,
    "shared": 1,
    "forms": -1,
    "near": -1,
    "typos": -1,
    "light": -1,
    "extra": -1,
    "replaced": -1,
    "rarity": -1,
    "changed": -1,
}
"""Which way each feature may move the probability: a fit that says otherwise has found an accident
of its data."""

_LIGHT = frozenset(
    "again want like know sure able help here there thing something way one let please also "
    "etc name call called".split()
)


def is_light(word: str, words: Lexicon) -> bool:
    """Whether leaving the word out of a question seldom changes the answer."""
    return word in _LIGHT or word in words.classes["lenient"] or word in words.classes["auxiliary"]


def step(asked: Form, stored: Form, unlike: Difference) -> str:
    """Of STEPS, how far the two are apart."""
    if asked.trivial == stored.trivial:
        return "identical"
    if asked.surface == stored.surface:
        return "surface"
    if asked.inflected == stored.inflected:
        return "wording"
    if asked.joined == stored.joined:
        return "grammar"
    if not unlike.removed and not unlike.added:
        return "soft"
    words = lexicon()
    light = all(is_light(word, words) for word in (*unlike.removed, *unlike.added))
    return "light" if light and not (unlike.removed and unlike.added) else "open"


def features(asked: Form, stored: Form, unlike: Difference, similarity: float) -> dict[str, float]:
    """By the names of SIGNS. `similarity` is the cosine of the embedder's two vectors."""
    words = lexicon()
    shared = asked.counts & stored.counts
    removed = [word for word in unlike.removed if not is_light(word, words)]
    added = [word for word in unlike.added if not is_light(word, words)]
    lost = sum(map(words.rarity, removed)) + sum(map(words.rarity, added))
    kept = sum(words.rarity(word) * n for word, n in shared.items())
    union = (asked.counts | stored.counts).total()
    return {
        "similarity": similarity,
        "characters": _trigram_cosine(asked.joined, stored.joined),
        "overlap": shared.total() / union if union else 0.0,
        "shared": math.log1p(sum(1 for word in shared if not is_light(word, words))),
        "forms": float(unlike.forms),
        "near": float(unlike.near),
        "typos": float(unlike.typos),
        "light": float(len(unlike.removed) + len(unlike.added) - len(removed) - len(added)),
        "extra": float(abs(len(removed) - len(added))),
        "replaced": float(min(len(removed), len(added))),
        "rarity": lost / (lost + kept) if lost + kept else 0.0,
        "changed": float(asked.inflected != stored.inflected),
    }


def _trigram_cosine(a: str, b: str) -> float:
    if a == b:
        return 1.0
    x = Counter(a[n : n + 3] for n in range(max(1, len(a) - 2)))
    y = Counter(b[n : n + 3] for n in range(max(1, len(b) - 2)))
    dot = sum(n * y[gram] for gram, n in x.items())
    norm = math.sqrt(sum(n * n for n in x.values()) * sum(n * n for n in y.values()))
    return dot / norm if norm else 0.0
