"""What the judgement knows of English words, read once from the lists in `words/`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from importlib import resources
from itertools import combinations

__all__ = ["Lexicon", "lexicon"]

_IRREGULAR = {
    "children": "child", "men": "man", "women": "woman", "people": "people", "feet": "foot",
    "teeth": "tooth", "mice": "mouse", "geese": "goose", "lives": "life", "wives": "wife",
    "knives": "knife", "leaves": "leaf", "wolves": "wolf", "halves": "half", "shelves": "shelf",
    "criteria": "criterion", "phenomena": "phenomenon", "indices": "index", "matrices": "matrix",
    "vertices": "vertex", "analyses": "analysis", "theses": "thesis", "crises": "crisis",
    "movies": "movie", "cookies": "cookie", "calories": "calorie", "selfies": "selfie",
    "shoes": "shoe", "does": "do", "goes": "go", "has": "have", "potatoes": "potato",
    "tomatoes": "tomato", "heroes": "hero", "viruses": "virus", "buses": "bus", "gases": "gas",
    "lenses": "lens", "bonuses": "bonus", "statuses": "status",
}  # fmt: skip
_INVARIANT = frozenset(
    "news physics mathematics economics politics series species always perhaps whereas lens gas "
    "bus plus minus virus bonus status campus focus versus census chess his hers its this is was "
    "yes us as has does thus less unless across access process success business address express "
    "class glass mass pass loss boss cross dress press stress analysis basis crisis thesis "
    "diabetes windows kubernetes pandas james paris texas kansas athletics ethics electronics "
    "linguistics statistics genetics graphics robotics dynamics mechanics aws ios dns css js "
    "sms gps mars venus jesus christmas".split()
)


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Immutable. `rank` counts from 1, the most frequent."""

    rank: dict[str, int]
    synonyms: dict[str, str]
    phrases: tuple[tuple[str, str], ...]
    """Synonyms of several words, longest first."""
    antonyms: frozenset[tuple[str, str]]
    """Both ways round."""
    polar: frozenset[str]
    """Every word that has an antonym."""
    classes: dict[str, frozenset[str]]
    english: frozenset[str]
    foreign: frozenset[str]
    near: frozenset[frozenset[str]]
    """Pairs of words that nearly mean the same."""

    def rarity(self, word: str) -> float:
        """Natural logarithm of how many running words there are to one of this: by Zipf's law,
        frequency is about 1 / (rank * H), H the harmonic number of the vocabulary (G. K. Zipf,
        Human Behavior and the Principle of Least Effort, 1949)."""
        rank = self.rank.get(word) or self.rank.get(stem(word)) or 2 * len(self.rank)
        return math.log(10.0 * rank)

    def known(self, word: str) -> bool:
        return word in self.rank or stem(word) in self.rank

    def opposed(self, a: str, b: str) -> bool:
        """Whether the two are antonyms, by the list or by a prefix that negates."""
        if (a, b) in self.antonyms:
            return True
        short, long = sorted((a, b), key=len)
        return any(long == prefix + short for prefix in _NEGATING) and len(short) > 2


_NEGATING = ("un", "in", "im", "il", "ir", "dis", "non", "anti", "de", "mis", "non-", "anti-", "a")


def stem(word: str) -> str:
    """The singular of a regular noun, the plain form of a verb in -s: nothing further."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) < 4 or not word.endswith("s") or word in _INVARIANT or word.endswith(("ss", "us")):
        return word
    if word.endswith("ies"):
        return word[:-3] + "y" if len(word) > 4 else word[:-1]
    if word.endswith(("ches", "shes", "sses", "xes", "zzes")):
        return word[:-2]
    return word if word.endswith("is") else word[:-1]


@functools.lru_cache(maxsize=1 << 16)
def root(word: str) -> str:
    """A crude root that joins the forms of a word (M. F. Porter's step 1b and 1c, 1980), and no
    more: who does a thing, and the doing of it, are other things ("print", "printer")."""
    word = stem(word)
    for ending in ("ing", "ed", "ly"):
        base = word[: -len(ending)]
        if word.endswith(ending) and len(base) >= 4 and any(c in "aeiouy" for c in base):
            if len(base) > 4 and base[-1] == base[-2] and base[-1] not in "ls":
                base = base[:-1]
            word = base
            break
    return word[:-1] if len(word) > 4 and word[-1] in "ey" else word


@functools.cache
def lexicon() -> Lexicon:
    """Some 10 ms the first time."""
    rank = {word: n for n, word in enumerate(_words("frequency.txt"), 1)}
    synonyms: dict[str, str] = {}
    phrases: list[tuple[str, str]] = []
    for line in _lines("synonyms.txt"):
        first, *others = line.split()
        for other in others:
            synonyms[other] = first
            if "-" in other:
                phrases.append((other.replace("-", " "), first))
    opposed: set[tuple[str, str]] = set()
    for line in _lines("antonyms.txt"):
        a, b = line.split()
        for x in (a, synonyms.get(a, a), stem(a)):
            for y in (b, synonyms.get(b, b), stem(b)):
                opposed |= {(x, y), (y, x)}
    english = frozenset(_words("english.txt"))
    return Lexicon(
        rank=rank,
        synonyms=synonyms,
        phrases=tuple(sorted(phrases, key=lambda pair: -len(pair[0]))),
        antonyms=frozenset(opposed),
        polar=frozenset(word for pair in opposed for word in pair),
        classes=_classes(),
        english=english,
        foreign=frozenset(_words("other.txt")) - english,
        near=frozenset(
            frozenset((synonyms.get(a, a), synonyms.get(b, b)))
            for line in _lines("near.txt")
            for a, b in combinations((stem(word) for word in line.split()), 2)
        ),
    )


def _classes() -> dict[str, frozenset[str]]:
    classes: dict[str, frozenset[str]] = {}
    name = ""
    for line in _lines("classes.txt"):
        if line.startswith("["):
            name = line.strip("[]")
        else:
            classes[name] = classes.get(name, frozenset()) | frozenset(line.split())
    return classes


def _words(name: str) -> list[str]:
    return [word for line in _lines(name) for word in line.split()]


def _lines(name: str) -> list[str]:
    text = (resources.files("headrace.caching.semantic") / "words" / name).read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]
