"""What the verifier must never take for the same, however near an embedding puts it."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.caching.semantic.verifier import LearnedVerifier
from support.traps import REWORDED, TRAPS

EMBEDDERS = ("wordllama", "minilm", "any")
LOOSEST = 0.2
PLACES = ("Paris", "london", "Rome", "vienna", "Oslo", "madrid", "china", "Peru", "Boston")
NOUNS = ("cat", "dog", "lion", "tiger", "book", "house", "car", "river", "teacher", "student")
FRAMES = (
    "How do I get from {a} to {b}?",
    "Is {a} nearer to us than {b}?",
    "Does the {a} chase the {b}?",
    "How many {a}s are there to a {b}?",
    "Why is a {a} not a {b}?",
    "What can a {a} teach a {b}?",
)


def served(asked: str, stored: str, *, embedder: str = "any", delta: float = LOOSEST) -> bool:
    verifier = LearnedVerifier(embedder, delta)
    return verifier.judge(verifier.prepare(asked), verifier.prepare(stored), 1.0).served


@pytest.mark.parametrize("embedder", EMBEDDERS)
@pytest.mark.parametrize(
    ("kind", "a", "b"), TRAPS, ids=lambda text: text if len(text) < 40 else text[:40]
)
def test_what_wants_another_answer_is_never_served(
    kind: str, a: str, b: str, embedder: str
) -> None:
    assert kind
    assert not served(a, b, embedder=embedder)
    assert not served(b, a, embedder=embedder)


@pytest.mark.parametrize("embedder", EMBEDDERS)
def test_what_is_only_reworded_is_mostly_served(embedder: str) -> None:
    """So that nothing above can pass by refusing everything."""
    found = sum(served(b, a, embedder=embedder, delta=0.01) for a, b in REWORDED)
    assert found >= 0.75 * len(REWORDED)


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("words", [PLACES, NOUNS], ids=["places", "nouns"])
def test_no_two_fillings_of_a_frame_are_the_same(frame: str, words: tuple[str, ...]) -> None:
    verifier = LearnedVerifier("any", LOOSEST)
    texts = [frame.format(a=a, b=b) for a, b in permutations(words, 2)]
    prepared = [verifier.prepare(text) for text in texts]
    wrong = [
        (texts[i], texts[j])
        for i, j in permutations(range(len(texts)), 2)
        if i % 7 == j % 7 and verifier.judge(prepared[i], prepared[j], 1.0).served
    ]
    assert wrong == []


@settings(max_examples=300, deadline=None)
@given(
    frame=st.sampled_from(
        [
            "How do I cook {} eggs?",
            "What is {} percent of 80?",
            "Who was king in {}?",
            "Is {} mg of it safe?",
            "List {} reasons to travel",
            "How far is {} km?",
        ]
    ),
    numbers=st.lists(st.integers(0, 3000), min_size=2, max_size=2, unique=True),
)
def test_no_two_numbers_are_the_same(frame: str, numbers: list[int]) -> None:
    a, b = (frame.format(n) for n in numbers)
    assert not served(a, b)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60))
def test_any_two_texts_can_be_compared(a: str, b: str) -> None:
    served(a, b)
    assert served(a, a) is (LearnedVerifier("any").prepare(a).unfit is None)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([b for pair in REWORDED for b in pair]), st.data())
def test_a_word_put_in_changes_the_answer_unless_it_is_an_empty_one(
    question: str, data: st.DataObject
) -> None:
    words = question.split()
    at = data.draw(st.integers(1, len(words)))
    word = data.draw(
        st.sampled_from(["not", "never", "only", "seven", "Portuguese", "without", "zirconium"])
    )
    other = " ".join([*words[:at], word, *words[at:]])
    assert not served(other, question)
