"""The bound that an answer is served by."""

from __future__ import annotations

import math

import pytest

from headrace.caching.semantic.features import SIGNS
from headrace.caching.semantic.verifier import Evidence, LearnedVerifier, Model, load_model

A, B = "How do I learn Python?", "How can I learn Python?"


def model(**evidence: tuple[float, float]) -> Model:
    zeros = dict.fromkeys(SIGNS, 0.0)
    ones = dict.fromkeys(SIGNS, 1.0)
    return Model(0.0, zeros, zeros, ones, {k: Evidence(*v) for k, v in evidence.items()})


def judged(verifier: LearnedVerifier, a: str = A, b: str = B, delta: float | None = None) -> bool:
    return verifier.judge(verifier.prepare(a), verifier.prepare(b), 0.9, delta).served


def test_a_step_is_served_once_its_evidence_bears_the_bound() -> None:
    """No error among n: the lower bound at 95 % is 0.05 ** (1 / n)."""
    for n in (100, 297, 300, 1000):
        verifier = LearnedVerifier("x", 0.01, model=model(surface=(1e9, 0), wording=(n, 0)))
        assert judged(verifier) is (0.05 ** (1 / n) >= 0.99)
        assert verifier.bounds()["wording"] == pytest.approx(0.05 ** (1 / n), abs=1e-6)


def test_without_evidence_only_the_same_wording_is_served() -> None:
    verifier = LearnedVerifier("x", 0.2, model=model())
    assert not judged(verifier)
    assert judged(verifier, A, "how do I learn Python")


def test_a_farther_step_is_never_above_a_nearer_one() -> None:
    verifier = LearnedVerifier("x", 0.01, model=model(surface=(50, 0), wording=(1e6, 0)))
    bounds = list(verifier.bounds().values())
    assert bounds == sorted(bounds, reverse=True)
    assert not judged(verifier)


def test_a_caller_can_only_be_stricter() -> None:
    verifier = LearnedVerifier("x", 0.02, model=model(surface=(1e9, 0), wording=(200, 0)))
    assert judged(verifier)
    assert not judged(verifier, delta=0.001)
    assert judged(verifier, delta=0.5)
    assert not judged(LearnedVerifier("x", 0.01, model=model(wording=(200, 0))), delta=0.5)


def test_live_errors_close_a_step_and_live_successes_open_it() -> None:
    verifier = LearnedVerifier("x", 0.01, model=model(surface=(1e9, 0), wording=(2000, 1)))
    a, b = verifier.prepare("How do I bake bread?"), verifier.prepare("How can I bake bread?")
    assert judged(verifier)
    for _ in range(8):
        verifier.observe(a, b, 0.9, right=False)
    assert not judged(verifier)
    for _ in range(3000):
        verifier.observe(a, b, 0.9, right=True)
    assert judged(verifier)


def test_an_entry_that_was_wrong_is_trusted_less_than_its_step() -> None:
    verifier = LearnedVerifier("x", 0.05, model=model(surface=(1e9, 0), wording=(1e5, 0)))
    a, b = verifier.prepare(A), verifier.prepare(B)
    verifier.observe(a, b, 0.9, right=False)
    verifier.observe(a, b, 0.9, right=False)
    assert not verifier.judge(a, b, 0.9).served
    assert judged(verifier, "How do I bake bread?", "How can I bake bread?")


@pytest.mark.parametrize("similarity", [math.nan, math.inf, -math.inf])
def test_a_similarity_that_is_none_serves_nothing(similarity: float) -> None:
    verifier = LearnedVerifier("wordllama", 0.2)
    a, b = verifier.prepare(A), verifier.prepare(B)
    assert not verifier.judge(a, b, similarity).served


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan])
def test_a_delta_that_makes_no_sense(delta: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        LearnedVerifier("x", delta)


@pytest.mark.parametrize("name", ["wordllama", "minilm", "any"])
def test_what_ships_is_whole(name: str) -> None:
    shipped = load_model(name)
    assert set(shipped.weights) == set(shipped.means) == set(shipped.scales) == set(SIGNS)
    assert all(weight * SIGNS[name] >= 0 for name, weight in shipped.weights.items())
    assert all(scale > 0 for scale in shipped.scales.values())
    bounds = LearnedVerifier(name, 0.01).bounds()
    assert bounds["wording"] >= 0.99
    assert bounds["open>0"] < 0.5
    assert judged(LearnedVerifier(name, 0.01))


def test_an_unknown_embedder_has_the_model_that_ignores_vectors() -> None:
    assert load_model("text-embedding-3-small") == load_model("any")
    assert load_model("wordllama-l2-supercat-256-abc") == load_model("wordllama")
