"""How often the semantic cache is wrong, and how much it finds, beside a plain cosine threshold.

    python -m benchmarks.semantic.evaluate --data ../shared/data \\
        --out benchmarks/results/semantic_quora.json

Quora Question Pairs, 12,000 labelled pairs, none of which was used to fit anything. In stream mode:
for each pair in order, `a` is asked and stored unless it is stored already, then `b` is asked and
stored. Only the best candidate counts, as in the server. A hit of `b` on its own `a` is right or
wrong by the pair's label; a hit on any other entry has no label and is counted apart. The plain
threshold is tuned on these very pairs, to the rate of false hits that the verifier reached here,
so that both are compared at one rate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.closed_loop import machine, percentile
from benchmarks.semantic.data import EMBEDDERS, nearest, vectors
from numpy.typing import NDArray

from headrace.caching.semantic.bounds import rate_interval
from headrace.caching.semantic.forms import Form, form_of
from headrace.caching.semantic.verifier import LearnedVerifier

DELTAS = (0.01, 0.02, 0.05)
LATENCY_ROWS = 20_000


@dataclass(slots=True)
class Pairs:
    texts: list[str]
    pairs: list[tuple[int, int, bool]]
    """Rows of a and b in `texts`, and whether they ask the same."""


def load(path: Path) -> Pairs:
    rows: dict[str, int] = {}
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        a, b = (rows.setdefault(item[side], len(rows)) for side in ("a", "b"))
        pairs.append((a, b, bool(item["same"])))
    return Pairs(list(rows), pairs)


def stream(
    pairs: Pairs, forms: list[Form], matrix: NDArray[np.float32], verifier: LearnedVerifier
) -> dict[str, Any]:
    """Served `b`s, by what they hit. Questions are stored in the order in which they first come,
    so that the first n rows are what is stored when n have come."""
    right = wrong = others = true = 0
    stored = 0
    for a, b, same in pairs.pairs:
        true += same
        stored = max(stored, a + 1)
        if b == a:
            continue
        best: tuple[float, int] | None = None
        for row, similarity in nearest(matrix, b, max(stored, min(b, stored))):
            if row == b:
                continue
            judgement = verifier.judge(forms[b], forms[row], similarity)
            if judgement.served and (best is None or judgement.lower > best[0]):
                best = (judgement.lower, row)
        stored = max(stored, b + 1)
        if best is None:
            continue
        if best[1] != a:
            others += 1
        elif same:
            right += 1
        else:
            wrong += 1
    served = right + wrong
    low, high = rate_interval(wrong, right)
    return {
        "served": served,
        "wrong": wrong,
        "false_hit_rate": round(wrong / served, 4) if served else None,
        "interval": [round(low, 4), round(high, 4)],
        "true_pairs_served": round(right / true, 4),
        "hits_on_other_entries": others,
    }


def plain_threshold(pairs: Pairs, matrix: NDArray[np.float32], rate: float) -> dict[str, Any]:
    """The cosine threshold that serves the most of these pairs at a rate of at most `rate`."""
    scored = sorted(
        ((float(matrix[a] @ matrix[b]), same) for a, b, same in pairs.pairs if a != b),
        reverse=True,
    )
    true = sum(same for _, _, same in pairs.pairs)
    best = {"threshold": 1.01, "served": 0, "wrong": 0, "true_pairs_served": 0.0}
    right = wrong = 0
    for cosine, same in scored:
        right += same
        wrong += not same
        if wrong <= rate * (right + wrong):
            best = {
                "threshold": round(cosine, 5),
                "served": right + wrong,
                "wrong": wrong,
                "true_pairs_served": round(right / true, 4),
            }
    return best


def latency(forms: list[Form], texts: list[str], matrix: NDArray[np.float32]) -> dict[str, Any]:
    """One core, among 20,000 entries: index, guards and verifier, without the embedding."""
    verifier = LearnedVerifier("any")
    spent = []
    for row in range(LATENCY_ROWS, min(len(texts), LATENCY_ROWS + 1_000)):
        started = time.perf_counter()
        asked = form_of(texts[row])
        if asked.unfit is None:
            for other, similarity in nearest(matrix, row, LATENCY_ROWS):
                verifier.judge(asked, forms[other], similarity)
        spent.append(time.perf_counter() - started)
    p50, p99 = percentile(spent, 50), percentile(spent, 99)
    assert p50 is not None
    assert p99 is not None
    return {"entries": LATENCY_ROWS, "p50_ms": round(1e3 * p50, 2), "p99_ms": round(1e3 * p99, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vectors", type=Path, help="folder in which vectors are kept")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.sched_setaffinity(0, {0})
    pairs = load(args.data / "question_pairs.jsonl")
    forms = [form_of(text) for text in pairs.texts]
    result: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.semantic.evaluate", *sys.argv[1:]]),
        "machine": machine(),
        "pairs": len(pairs.pairs),
        "true_pairs": sum(same for _, _, same in pairs.pairs),
        "embedders": {},
    }
    for name in EMBEDDERS:
        matrix = vectors(name, pairs.texts, args.vectors)
        rows = {}
        for delta in DELTAS:
            found = stream(pairs, forms, matrix, LearnedVerifier(name, delta))
            at = found["false_hit_rate"] or 0.0
            rows[str(delta)] = {
                **found,
                "threshold_at_the_same_rate": plain_threshold(pairs, matrix, at),
                "threshold_at_delta": plain_threshold(pairs, matrix, delta),
            }
            print(name, delta, json.dumps(rows[str(delta)]), flush=True)
        result["embedders"][name] = {
            "by_delta": rows,
            "look_up": latency(forms, pairs.texts, matrix),
        }
        print(name, result["embedders"][name]["look_up"], flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
