"""What must agree between two questions for one answer to serve both: pure, some microseconds.

Each guard can only refuse. They look at what the two canonical forms do not share: a number, a
unit, a negation, a name and so on among it decides the question, whatever an embedding says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headrace.caching.semantic.forms import Form
from headrace.caching.semantic.lexicon import Lexicon, lexicon, root

__all__ = ["Difference", "difference", "objection"]

_STRICT = (
    "negation", "superlative", "quantity", "modal", "tense", "pronoun", "direction", "language",
    "programming", "format", "time", "time-bound", "unit", "join",
)  # fmt: skip
"""Classes of words of which both texts must have the same, the telling ones first."""
_KINDS_ALIKE = frozenset({frozenset({"say", "what"}), frozenset({"about", "what"})})
_NEVER_A_TYPO = 5
"""Letters. Of two words this short, one letter's difference makes another word."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The words that only one of the two has, after those that are forms, near synonyms or typing
    errors of one another are taken out, in pairs, and counted."""

    removed: tuple[str, ...]
    added: tuple[str, ...]
    forms: int = 0
    near: int = 0
    typos: int = 0
    pairs: tuple[tuple[str, str], ...] = field(default=())


def difference(asked: Form, stored: Form) -> Difference:
    """What one asks beyond the other."""
    words = lexicon()
    only_stored = list((stored.counts - asked.counts).elements())
    only_asked = list((asked.counts - stored.counts).elements())
    if not only_stored or not only_asked:
        return Difference(tuple(only_stored), tuple(only_asked))
    counts = {"forms": 0, "near": 0, "typos": 0}
    pairs: list[tuple[str, str]] = []
    left: list[str] = []
    for old in only_stored:
        for n, new in enumerate(only_asked):
            how = _alike(old, new, words)
            if how is not None:
                counts[how] += 1
                pairs.append((old, new))
                del only_asked[n]
                break
        else:
            left.append(old)
    return Difference(tuple(left), tuple(only_asked), **counts, pairs=tuple(pairs))


def objection(asked: Form, stored: Form, unlike: Difference) -> str | None:
    """Why the two may have different answers, in a word, or None if no guard can tell."""
    if asked.opaque or stored.opaque:
        return "language"
    if asked.literals != stored.literals:
        return "literal"
    if asked.numbers != stored.numbers:
        return "number"
    words = lexicon()
    if any(words.opposed(a, b) for a in unlike.removed for b in unlike.added):
        return "antonym"
    if any(words.opposed(a, b) for a, b in unlike.pairs):
        return "antonym"
    changed = (*unlike.removed, *unlike.added)
    for name in _STRICT:
        members = words.classes[name]
        if any(word in members for word in changed):
            return name
    if any(word in words.polar for word in changed):
        return "polarity"
    names = asked.names | stored.names
    if any(word in names or not words.known(word) for word in changed if _wordy(word)):
        return "name"
    if any(not _wordy(word) for word in changed):
        return "symbol"
    if not _kinds_agree(asked.kind, stored.kind):
        return "question"
    return None if _same_order(asked, stored, unlike) else "order"


def _wordy(word: str) -> bool:
    return word.isalpha() and len(word) > 1


def _kinds_agree(a: str, b: str) -> bool:
    return a == b or frozenset({a, b}) in _KINDS_ALIKE


def _same_order(asked: Form, stored: Form, unlike: Difference) -> bool:
    """Whether what they share comes in one order, but for phrases that moved as a whole."""
    new_names = {new: old for old, new in unlike.pairs}
    mine = [new_names.get(word, word) for word in asked.words]
    theirs = list(stored.words)
    shared = Counter(mine) & Counter(theirs)
    if _only(mine, shared) == _only(theirs, shared):
        return True
    if unlike.pairs:
        return False
    chunks, others = Counter(asked.chunks), Counter(stored.chunks)
    # A phrase may move, and a word may be put in or left out, but not both at once.
    return chunks == others


def _only(words: list[str], shared: Counter[str]) -> list[str]:
    """The words of `shared`, as often as it has them."""
    left = shared.copy()
    out: list[str] = []
    for word in words:
        if left[word] > 0:
            left[word] -= 1
            out.append(word)
    return out


def _alike(a: str, b: str, words: Lexicon) -> str | None:
    if root(a) == root(b) and not _roles(a, b):
        return "forms"
    if frozenset((a, b)) in words.near:
        return "near"
    return "typos" if _typo(a, b, words) else None


def _roles(a: str, b: str) -> bool:
    """ "boring" and "bored" are two sides of one thing."""
    endings = {word[-3:] if word.endswith("ing") else word[-2:] for word in (a, b)}
    return endings == {"ing", "ed"}


def _typo(a: str, b: str, words: Lexicon) -> bool:
    """One letter more, less, other or swapped, in a word that is one only on one side."""
    if min(len(a), len(b)) <= _NEVER_A_TYPO or abs(len(a) - len(b)) > 1 or a[0] != b[0]:
        return False
    if words.known(a) == words.known(b) or a == b or not (a.isalpha() and b.isalpha()):
        return False
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    x, y = a[start : len(a) - end], b[start : len(b) - end]
    return len(x) + len(y) == 1 or (len(x) == len(y) == 1) or (len(x) == 2 and x == y[::-1])
