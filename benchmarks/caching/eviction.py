"""Which answers a full cache should keep: seconds saved by policy, over the traces.

    python -m benchmarks.caching.eviction --data ../shared/data/traces \\
        --out benchmarks/results/caching_eviction.json

A trace gives lengths; it does not say which requests were the same. So each request of a trace is
either new for good, or one of a catalogue that is asked again and again: by Zipf's law over the
catalogue, whose popular part moves on as time goes by. The catalogue's own lengths are the
trace's. A hit saves what computing takes at the measured speed of the default model on two cores;
an answer takes 2.2 bytes a token, compressed. Reported is the share of all seconds that hits
saved, and of requests that were hits.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import random
import sys
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from benchmarks.caching.policies import GDSF, LRU, S3FIFO, Policy, Shipped

PREFILL_TOKENS_PER_S, DECODE_TOKENS_PER_S = 500.0, 25.0
BYTES_PER_TOKEN = 2.2
POLICIES: dict[str, type[LRU | S3FIFO | GDSF | Shipped]] = {
    "LRU": LRU,
    "S3-FIFO": S3FIFO,
    "GDSF": GDSF,
    "Headrace": Shipped,
}
TRACES = {
    "azure conversation": "azure2023_conv.csv",
    "azure code": "azure2023_code.csv",
    "ShareGPT": "sharegpt_8k_lengths.csv",
    "Mooncake conversation": "mooncake_conversation_lengths.csv",
}
CATALOGUE = 4_000
ZIPF = 0.9
NEW = 0.5
DRIFT = 0.25
"""Share of the catalogue's ranks that are dealt anew over the run."""
BUDGETS = (0.01, 0.05, 0.1, 0.25)
"""Of the bytes of all distinct answers."""

Asked = tuple[bytes, int, float]


def lengths(path: Path) -> list[tuple[int, int]]:
    with path.open(newline="") as file:
        return [
            (int(row["prompt_tokens"]), max(1, int(row["output_tokens"])))
            for row in csv.DictReader(file)
        ]


def requests(trace: list[tuple[int, int]], count: int, seed: int) -> Iterator[Asked]:
    rng = random.Random(seed)
    catalogue = [rng.choice(trace) for _ in range(CATALOGUE)]
    ranks = list(range(CATALOGUE))
    weights = list(accumulate((r + 1) ** -ZIPF for r in range(CATALOGUE)))
    every = max(1, round(count / (DRIFT * CATALOGUE)))
    for n in range(count):
        if n % every == 0:
            a, b = rng.randrange(CATALOGUE), rng.randrange(CATALOGUE)
            ranks[a], ranks[b] = ranks[b], ranks[a]
        if rng.random() < NEW:
            key, (prompt, output) = b"n%d" % n, trace[n % len(trace)]
        else:
            item = ranks[bisect(weights, rng.random() * weights[-1])]
            key, (prompt, output) = b"c%d" % item, catalogue[item]
        key = hashlib.blake2b(key, digest_size=32).digest()
        saved_s = prompt / PREFILL_TOKENS_PER_S + output / DECODE_TOKENS_PER_S
        yield key, round(output * BYTES_PER_TOKEN) + 120, saved_s


def run(policy: Policy, asked: list[Asked]) -> dict[str, float]:
    total = saved = hits = 0.0
    for key, size, saved_s in asked:
        total += saved_s
        if policy.ask(key):
            hits += 1
            saved += saved_s
        else:
            policy.keep(key, size, saved_s)
    return {"saved": round(saved / total, 4), "hits": round(hits / len(asked), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for name, file in TRACES.items():
        trace = lengths(args.data / file)
        for seed in range(args.seeds):
            asked = list(requests(trace, args.count, seed))
            whole = sum({key: size for key, size, _ in asked}.values())
            best = {key for key, _, _ in asked}
            for share in BUDGETS:
                for label, kind in POLICIES.items():
                    figures = run(kind(round(whole * share)), asked)
                    rows.append(
                        {"trace": name, "seed": seed, "budget": share, "policy": label, **figures}
                    )
            print(f"{name}, seed {seed}: {len(best)} distinct, {whole / 1e6:.1f} MB")
    table(rows)
    if args.out:
        result = {"command": " ".join(["python -m benchmarks.caching.eviction", *sys.argv[1:]])}
        args.out.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, object]]) -> None:
    """Mean share of seconds saved over the seeds."""
    for name in TRACES:
        for share in BUDGETS:
            cells = []
            for label in POLICIES:
                own = [
                    float(str(row["saved"]))
                    for row in rows
                    if (row["trace"], row["budget"], row["policy"]) == (name, share, label)
                ]
                cells.append(f"{label} {sum(own) / len(own):.3f}")
            print(f"{name:24} {share:5.0%}  " + "  ".join(cells))


if __name__ == "__main__":
    main()
