"""Fits the verifier of the semantic cache.

    python -m benchmarks.semantic.fit --data ../shared/data

Writes src/headrace/caching/semantic/verifier.json. Questions of banking77 (PolyAI, CC BY 4.0) and
CLINC150 (CC BY 3.0) are asked in one stream, in a seeded order, each against all before it. Of the
candidates that the guards let pass, the pair's label is:

* labels.json, made by reading the pairs, where it has one: all pairs short of the open step that
  two intents share, and a random sample of the open ones within an intent;
* right within an intent, for steps short of open: they differ in nothing but wording;
* right for a question typed in another way: in lower case, without an article or its final mark,
  with "what's" written out; wrong where that reads like a question of another intent;
* wrong across intents; left out for open pairs within an intent that nobody has read, and for pairs
  across the two sets, whose intents overlap.

The regression is logistic, each weight held to the sign that its feature must have. The evidence of
a step counts stored questions, each once, by the share of right ones among those served with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.semantic.data import EMBEDDERS, Question, nearest, questions, vectors
from numpy.typing import NDArray

from headrace.caching.semantic.features import SIGNS, features, step
from headrace.caching.semantic.forms import form_of
from headrace.caching.semantic.guards import difference, objection
from headrace.caching.semantic.verifier import OPEN_ABOVE

OUT = Path("src/headrace/caching/semantic/verifier.json")
LABELS = Path(__file__).with_name("labels.json")
SEED = 1
RIDGE = 1.0
ROUNDS = 4_000
RETYPED = 2_000
NAMES = tuple(SIGNS)


@dataclass(frozen=True, slots=True)
class Pair:
    stored: int
    step: str
    values: dict[str, float]
    right: bool | None
    same_intent: bool


def named(a: str, b: str) -> str:
    return hashlib.sha256("\0".join(sorted((a, b))).encode()).hexdigest()[:16]


def label(asked: Question, stored: Question, where: str, labels: dict[str, int]) -> bool | None:
    known = labels.get(named(asked.text, stored.text))
    if known is not None:
        return bool(known)
    if asked.intent == stored.intent:
        return None if where == "open" else True
    if asked.intent.partition("/")[0] != stored.intent.partition("/")[0]:
        return None
    return False


def stream(
    asked: list[Question],
    matrix: NDArray[np.float32],
    labels: dict[str, int],
    *,
    vectors_count: bool,
) -> list[Pair]:
    """The pairs that the guards let pass, but for identical ones."""
    found = []
    for row, question in enumerate(asked):
        if question.form.unfit is not None:
            continue
        for other, similarity in nearest(matrix, row, row):
            stored = asked[other]
            if stored.form.unfit is not None or stored.form.trivial == question.form.trivial:
                continue
            unlike = difference(question.form, stored.form)
            if objection(question.form, stored.form, unlike) is not None:
                continue
            where = step(question.form, stored.form, unlike)
            values = features(
                question.form, stored.form, unlike, similarity if vectors_count else 1.0
            )
            right = label(question, stored, where, labels)
            found.append(Pair(other, where, values, right, question.intent == stored.intent))
    return found


def retyped(asked: list[Question], labels: dict[str, int]) -> list[Pair]:
    """Some of the questions as somebody in a hurry types them, each against all that read the
    same."""
    rng = random.Random(SEED)
    alike: dict[str, list[int]] = defaultdict(list)
    for row, question in enumerate(asked):
        alike[question.form.surface].append(row)
    found = []
    for own in rng.sample(range(len(asked)), RETYPED):
        text = hurried(asked[own].text, rng)
        form = form_of(text)
        if form.unfit is not None or form.trivial == asked[own].form.trivial:
            continue
        question = Question(text, asked[own].intent, form)
        for other in {own, *alike[form.surface]}:
            stored = asked[other]
            unlike = difference(form, stored.form)
            if stored.form.unfit or objection(form, stored.form, unlike) is not None:
                continue
            where = step(form, stored.form, unlike)
            right = label(question, stored, where, labels)
            known = labels.get(named(asked[own].text, stored.text))
            right = bool(known) if known is not None else right
            same = question.intent == stored.intent
            if where != "open":
                values = features(form, stored.form, unlike, 1.0)
                found.append(Pair(len(asked) + other, where, values, right, same))
    return found


def hurried(text: str, rng: random.Random) -> str:
    """The same question, typed in another way."""
    text = text.lower() if rng.random() < 0.5 else text
    text = text.rstrip("?.! ") if rng.random() < 0.7 else text
    if rng.random() < 0.5:
        text = re.sub(r"\b(a|an|the) ", "", text, count=1, flags=re.IGNORECASE)
    if rng.random() < 0.5:
        text = re.sub(r"\b(what|who|where|how)'?s\b", r"\1 is", text, flags=re.IGNORECASE)
    return text


def weights_of(pairs: list[Pair]) -> list[float]:
    """Unread pairs within an intent are stood for by those that were read."""
    unread = sum(p.step == "open" and p.same_intent for p in pairs)
    read = sum(p.step == "open" and p.same_intent and p.right is not None for p in pairs)
    each = unread / max(1, read)
    return [
        0.0 if p.right is None else each if p.step == "open" and p.same_intent else 1.0
        for p in pairs
    ]


def fit(pairs: list[Pair]) -> dict[str, Any]:
    """By projected gradient descent, on features scaled to unit deviation."""
    weights = np.array(weights_of(pairs))
    x = np.array([[p.values[name] for name in NAMES] for p in pairs])
    y = np.array([float(bool(p.right)) for p in pairs])
    keep = weights > 0
    x, y, weights = x[keep], y[keep], weights[keep]
    mean = np.average(x, axis=0, weights=weights)
    scale = np.sqrt(np.average((x - mean) ** 2, axis=0, weights=weights)) + 1e-6
    z = (x - mean) / scale
    signs = np.array([SIGNS[name] for name in NAMES])
    w, bias = np.zeros(len(NAMES)), 0.0
    total = weights.sum()
    for _ in range(ROUNDS):
        p = 1 / (1 + np.exp(-(z @ w + bias)))
        off = weights * (p - y)
        w -= 0.5 * (z.T @ off + RIDGE * w) / total
        w = np.where(w * signs < 0, 0.0, w)
        bias -= 0.5 * off.sum() / total

    def table(values: NDArray[np.float64]) -> dict[str, float]:
        return {n: round(float(v), 6) for n, v in zip(NAMES, values, strict=True)}

    return {
        "bias": round(float(bias), 6),
        "weights": table(w),
        "means": table(mean),
        "scales": table(scale),
    }


def place(pair: Pair, model: dict[str, Any]) -> str:
    if pair.step != "open":
        return pair.step
    total = model["bias"] + sum(
        model["weights"][n] * (pair.values[n] - model["means"][n]) / model["scales"][n]
        for n in NAMES
    )
    probability = 1 / (1 + np.exp(-total))
    return next(f"open>{p:g}" for p in OPEN_ABOVE if probability >= p)


def evidence(pairs: list[Pair], model: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Open pairs across intents count as little as the sample of the others is small."""
    weights = weights_of(pairs)
    most = max(weights)
    groups: dict[tuple[str, int], list[tuple[bool, float]]] = defaultdict(list)
    for pair, weight in zip(pairs, weights, strict=True):
        if pair.right is not None:
            share = weight / most if pair.step == "open" else 1.0
            groups[place(pair, model), pair.stored].append((pair.right, share))
    counts: dict[str, dict[str, float]] = defaultdict(lambda: {"right": 0.0, "wrong": 0.0})
    for (where, _), outcomes in groups.items():
        share = sum(s for _, s in outcomes) / len(outcomes)
        right = sum(s for r, s in outcomes if r) / sum(s for _, s in outcomes)
        counts[where]["right"] += share * right
        counts[where]["wrong"] += share * (1 - right)
    return {k: {n: round(v, 3) for n, v in c.items()} for k, c in sorted(counts.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vectors", type=Path, help="folder in which vectors are kept")
    args = parser.parse_args()
    asked = questions(args.data)
    random.Random(SEED).shuffle(asked)
    labels = json.loads(LABELS.read_text())
    typed = retyped(asked, labels)
    models = {}
    for name in (*EMBEDDERS, "any"):
        embedder = "wordllama" if name == "any" else name
        matrix = vectors(embedder, [q.text for q in asked], args.vectors)
        pairs = stream(asked, matrix, labels, vectors_count=name != "any")
        model = fit(pairs)
        models[name] = {**model, "evidence": evidence(pairs + typed, model)}
        print(name, json.dumps(models[name], indent=1))
    about = {
        "made_by": "python -m benchmarks.semantic.fit",
        "data": [
            "banking77 (PolyAI, CC BY 4.0)",
            "CLINC150 (S. Larson et al., CC BY 3.0)",
            "benchmarks/semantic/labels.json (read by hand)",
        ],
        "seed": SEED,
    }
    OUT.write_text(json.dumps({"about": about, "models": models}, indent=1) + "\n")


if __name__ == "__main__":
    main()
