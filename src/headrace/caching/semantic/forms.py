"""A text as the judgement compares it: its words in a canonical form, and what must match exactly.

Two texts with one canonical form ask the same thing as far as English is concerned: politeness,
contractions, articles, spelling, number of the noun, and the many ways to begin a question do not
change an answer. Everything that may change one is kept. A text in another language than English
is `opaque`: nothing but its own wording is known of it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field

from headrace.caching.semantic.lexicon import Lexicon, lexicon, stem
from headrace.caching.semantic.rewrite import canonical, expand, singular
from headrace.caching.semantic.rewrite import numbered as _numbered

__all__ = ["Form", "form_of", "plain"]

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_LITERAL = re.compile(
    r"`[^`]+`"
    r"|(?:https?|ftp)://\S+|www\.\S+"
    r"|[\w.+-]+@[\w-]+\.[\w.-]+"
    r"|\"\"?[^\"]+\"\"?|“[^”]+”|«[^»]+»|„[^“”]+[“”]|(?<![\w'])'[^']+'(?!\w)"
    r"|(?<!\w)[@#][A-Za-z_]\w+"
    r"|(?<![\w/])(?:~|\.{1,2})?/(?:[\w.-]+/)*[\w.-]+"
    r"|\b[A-Za-z]:\\\S+"
    r"|\b\w+(?:_\w+)+\b|\b\w+\(\)"
    r"|(?<!\w)--?[a-zA-Z][\w-]*"
)
_CODE = re.compile(
    r"[{};]\s*$|=>|==|!=|&&|\|\||</?\w+>|^\s*(?:def|class|import|#include)\b", re.MULTILINE
)
_TOKEN = re.compile(
    r"\d+(?:[.,:/]\d+)*"
    r"|[^\W\d_]+(?:['’][^\W\d_]+)*(?:\+\+|\#)?"
    r"|[+*×÷=<>^%$€£¥₹°/−]|(?<=\d)\s*-(?=\s*\d)"
)
_SENTENCE = re.compile(r"(?<=[.?!])\s+|\n+|(?<=[?!])(?=\w)")
_ELLIPTIC = re.compile(
    r"^(?:and|but|so|then|or|also)\b"
    r"|^(?:why|how|what|when|where|who|which)( not| so| else| about .*)?$"
    r"|\b(?:above|aforementioned|earlier|previous(?:ly)?|the (?:former|latter)|as (?:i|you) said"
    r"|you (?:said|mentioned|told)|i (?:said|mentioned|told)|go on|continue|try again|once more"
    r"|last (?:message|answer|question|time))\b"
)
_POINTING = re.compile(
    r"\b(?:this|these|following|attached|as follows|below|above|in the (?:picture|image|photo))\b"
)
"""At something that is not in the text: a picture, a program."""
_RECORD = frozenset(
    "account accounts name order orders balance appointment appointments password email address "
    "card cards bill bills bank calendar schedule list reminder reminders flight reservation "
    "booking payment transaction transactions subscription invoice ticket tickets package parcel "
    "credit paycheck salary insurance luggage inbox contacts phone pin location alarm history "
    "meeting meetings birthday file files data document documents code resume essay text".split()
)
_POSSESSIVE = frozenset({"my", "our", "mine", "ours"})
_NUMBER = re.compile(r"\d")
_SYMBOLS = {"$": "usd", "€": "euro", "£": "gbp", "¥": "yen", "₹": "inr", "%": "percent"}
_ARTICLES = frozenset({"a", "an", "the"})
_ADVISING = frozenset({"should", "would", "must"})
LONGEST = 600
"""Characters. A longer text says too much for its few words to be weighed."""


@dataclass(frozen=True, slots=True)
class Form:
    """Immutable, made once a text. `literals` are quotations, code, addresses and the like."""

    trivial: str
    opaque: bool
    script: str
    words: tuple[str, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)
    surface: str = ""
    """Without blanks, articles, case, marks and spellings: what a hurried typist changes."""
    inflected: str = ""
    """`joined`, but with the number of its nouns and the modal verb it was asked with."""
    joined: str = ""
    chunks: tuple[tuple[str, ...], ...] = ()
    numbers: tuple[str, ...] = ()
    literals: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    kind: str = ""
    sentences: int = 0
    unfit: str | None = None


def plain(text: str) -> str:
    """What changes no answer in any language: blanks, final marks, the case of the first letter."""
    text = " ".join(unicodedata.normalize("NFC", text).split())
    text = text.strip(" .?!…。？！؟¿¡।")
    return text[:1].lower() + text[1:]


def form_of(text: str) -> Form:
    """Pure, and a fraction of a millisecond for a question."""
    trivial = plain(text)
    words = lexicon()
    script = _script(text)
    if len(text) > LONGEST:
        return Form(trivial, True, script, unfit="long")
    literals, rest = _literals(text)
    if script != "latin" or not _is_english(rest, words):
        return Form(trivial, True, script, unfit=None if trivial else "empty")
    names = _names(rest)
    sentences = [s for s in _SENTENCE.split(rest) if s.strip()]
    raw = [_tokens(s) for s in sentences]
    rewritten = [part for tokens in raw if (part := canonical(tokens, words))]
    parts = [[singular(token, words) for token in part] for part in rewritten]
    tokens = tuple(token for n, part in enumerate(parts) for token in ((["|"] if n else []) + part))
    flat = [token for part in raw for token in part]
    return Form(
        trivial=trivial,
        opaque=False,
        script=script,
        words=tokens,
        counts=Counter(tokens),
        surface="".join(words.synonyms.get(t, t) for t in _numbered(flat) if t not in _ARTICLES),
        inflected="".join(
            [*(t for t in flat if t in _ADVISING), *(t for part in rewritten for t in part)]
        ),
        joined="".join(tokens),
        chunks=_chunks(tokens, words),
        numbers=tuple(token for token in tokens if _NUMBER.match(token)),
        literals=literals,
        names=names,
        kind=" ".join(_kind(part, words) for part in parts),
        sentences=len(parts),
        unfit=_unfit(text, rest, literals, tokens, words),
    )


def _tokens(sentence: str) -> list[str]:
    raw = [_SYMBOLS.get(t.strip(), t.strip()) for t in _TOKEN.findall(sentence)]
    return expand(
        [
            "letter-a" if n and token == "A" else token.lower().replace("’", "'")
            for n, token in enumerate(raw)
        ]
    )


def _literals(text: str) -> tuple[tuple[str, ...], str]:
    found: list[str] = []

    def keep(match: re.Match[str]) -> str:
        found.append(match.group().strip("\"“”«»„'`").strip() or match.group())
        return f" literal{'x' * len(found)} "

    rest = _LITERAL.sub(keep, _FENCE.sub(keep, text))
    return tuple(found), rest


def _script(text: str) -> str:
    """The script of most letters, by the first word of their Unicode names."""
    scripts: Counter[str] = Counter()
    for char in text[:400]:
        if char.isalpha():
            ascii_letter = char.isascii()
            scripts[
                "latin" if ascii_letter else unicodedata.name(char, "?").split()[0].lower()
            ] += 1
    if not scripts:
        return "none"
    strange = sum(n for script, n in scripts.items() if script != "latin")
    return (
        "latin"
        if strange == 0 or scripts["latin"] > 20 * strange
        else max(scripts, key=scripts.__getitem__)
    )


def _is_english(text: str, words: Lexicon) -> bool:
    tokens = [t.lower().replace("’", "'") for t in re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", text)]
    tokens = [t for t in expand(tokens) if not t.startswith("literal")]
    ours = sum(token in words.english for token in tokens)
    theirs = sum(token in words.foreign for token in tokens)
    known = sum(token in words.english or words.known(token) for token in tokens)
    if not tokens:
        return True
    if theirs and theirs >= ours:
        return False
    return known >= 0.5 * len(tokens) if ours else known == len(tokens)


def _names(text: str) -> frozenset[str]:
    """Words written with a capital where grammar asks for none. A text all in capitals, or in
    title case, tells nothing by them."""
    words = re.findall(r"(?:^|[.?!]\s+)?[^\W\d_]+", text)
    inner = [w for w in words if w[0] not in ".?!" and w.strip() != "I"][1:]
    capital = [w for w in inner if w[0].isupper()]
    if not capital or len(capital) > 0.6 * len(inner):
        return frozenset()
    lowered = {w.lower() for w in capital}
    return frozenset(lowered | {stem(w) for w in lowered})


def _chunks(tokens: tuple[str, ...], words: Lexicon) -> tuple[tuple[str, ...], ...]:
    """The text cut before each preposition and question word, in sorted order: what may trade
    places without a change of meaning."""
    cut = words.classes["lenient"] | words.classes["direction"] | _QUESTION | {"|"}
    chunks: list[list[str]] = [[]]
    for token in tokens:
        if token in cut and chunks[-1]:
            chunks.append([])
        chunks[-1].append(token)
    return tuple(sorted(tuple(chunk) for chunk in chunks))


_QUESTION = frozenset(
    "what who whom whose when where why how howto howmany howmuch howlong".split()
)
_AUXILIARY = frozenset(
    "be do did have has had can could should would will shall may might must was were am".split()
)


def _kind(part: list[str], words: Lexicon) -> str:
    """Of a canonical sentence: its question word, `yesno`, or `say` for all others."""
    first = next((token for token in part if token in _QUESTION), None)
    if first is not None:
        return first
    if part[0] in _AUXILIARY:
        return "yesno"
    return part[0] if part[0] in words.english else "say"


def _unfit(
    text: str, rest: str, literals: tuple[str, ...], tokens: tuple[str, ...], words: Lexicon
) -> str | None:
    if not tokens:
        return "empty"
    bound = words.classes["time-bound"]
    lowered = " ".join(re.findall(r"[a-z']+", rest.lower()))
    if any(token in bound for token in tokens) or re.search(
        r"\b(?:this|last|next|past|coming) (?:week|month|year|weekend|season|day|night|election)\b|"
        r"\b(?:right now|at the moment|these days|so far|up to date|as of|ago)\b",
        lowered,
    ):
        return "time"
    if any(
        a in _POSSESSIVE and (b in _RECORD or c in _RECORD)
        for a, b, c in zip(tokens, (*tokens[1:], ""), (*tokens[2:], "", ""), strict=False)
    ) or re.search(r"\b(?:remind me|am i|who i am|near me|around here|near here)\b", lowered):
        return "personal"
    if _ELLIPTIC.search(lowered) or _only_pronouns(tokens, words):
        return "elliptic"
    if not literals and _POINTING.search(lowered):
        return "elliptic"
    return "code" if _CODE.search(text) else None


def _only_pronouns(tokens: tuple[str, ...], words: Lexicon) -> bool:
    """Nothing in it says what it is about: "how do I install it"."""
    refers = any(token in _REFERRING for token in tokens)
    about = [
        t
        for t in tokens
        if t not in words.classes["pronoun"]
        and t not in words.english
        and t not in words.classes["auxiliary"]
        and t not in _QUESTION
    ]
    return not about or (refers and len(about) <= 1)


_REFERRING = frozenset("it this that these those they them he she him her".split())
