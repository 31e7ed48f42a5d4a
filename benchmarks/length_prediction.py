"""How well answer lengths are foretold, online and without looking ahead, on public traces.

    python benchmarks/length_prediction.py --data DIR --out FILE

DIR holds the trace slices (or set HEADRACE_DATA). Each request is forecast when it arrives; its
answer is learnt when it has ended, at 50 tokens a second. The ServeGen clients come as quantiles
of their lengths only, so their requests are drawn from those: 20,000 a pool, clients by their rate,
20 a second (the recorded rates are those of whole clusters). Rank accuracy is the share of pairs
put in the right order, of any two requests of a trace (by chance) and of any two within 200 in a
row; `rank_ceiling` that of forecasts that know each ServeGen client's median. Where lengths are a
few tokens, ties lift a coverage over its level: then the share strictly below is the other bound.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

from headrace.core.clock import VirtualClock
from headrace.core.request import Endpoint, Request, SamplingParams
from headrace.scheduling.base import Claim
from headrace.scheduling.lengths import Forecast, LengthEstimator

TOKENS_PER_S = 50.0
SERVEGEN_REQUESTS = 20_000
SERVEGEN_RPS = 20.0
PAIRS = 200_000
WINDOW = 200
CAP = 256
"""Where the capped run cuts answers off."""


@dataclass(frozen=True, slots=True)
class Row:
    arrival: float
    flow: str
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Outcome:
    forecast: Forecast
    length: int


def azure(data: Path) -> list[Row]:
    rows = [
        Row(float(r["arrival_s"]), flow, int(r["prompt_tokens"]), int(r["output_tokens"]))
        for flow in ("conv", "code")
        for r in _csv(data / f"azure2023_{flow}.csv")
    ]
    return sorted(rows, key=lambda row: row.arrival)


def arena(data: Path) -> list[Row]:
    return [
        Row(float(r["arrival_s"]), r["tenant"], int(r["prompt_tokens"]), int(r["output_tokens"]))
        for r in _csv(data / "vtc_arena_27clients.csv")
    ]


def servegen(data: Path, seed: int) -> Iterator[tuple[str, list[Row]]]:
    clients = [json.loads(line) for line in (data / "servegen_clients.jsonl").open()]
    for pool in sorted({client["pool"] for client in clients}):
        members = [client for client in clients if client["pool"] == pool]
        shares = [client["rate_rps"] for client in members]
        rng = random.Random(seed)
        arrival = 0.0
        rows = []
        for client in rng.choices(members, shares, k=SERVEGEN_REQUESTS):
            arrival += rng.expovariate(SERVEGEN_RPS)
            prompt = _draw(rng, client["q"], client["input_tokens_q"])
            output = _draw(rng, client["q"], client["output_tokens_q"])
            rows.append(Row(arrival, str(client["client"]), prompt, output))
        yield f"servegen {pool}", rows


def _csv(path: Path) -> Iterable[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _draw(rng: random.Random, percents: list[float], values: list[float]) -> int:
    """From the distribution with these quantiles, linear between them."""
    percent = rng.uniform(0.0, 100.0)
    points = list(zip(percents, values, strict=True))
    for (p0, v0), (p1, v1) in pairwise(points):
        if percent <= p1:
            return max(1, round(v0 + (v1 - v0) * (percent - p0) / (p1 - p0)))
    return max(1, round(values[-1]))


def replay(rows: list[Row], *, cap: int | None = None, by_flow: bool = True) -> list[Outcome]:
    """Forecasts as they would have been made; answers are learnt as they end."""
    clock = VirtualClock()
    estimator = LengthEstimator(clock)
    ending: list[tuple[float, int]] = []
    requests = [
        (
            Request(
                id=str(i),
                endpoint=Endpoint.CHAT,
                model="m",
                sampling=SamplingParams(max_tokens=cap),
                arrival=row.arrival,
            ),
            Claim(flow=row.flow if by_flow else "all"),
        )
        for i, row in enumerate(rows)
    ]
    outcomes = []
    for i, row in enumerate(rows):
        while ending and ending[0][0] <= row.arrival:
            done, j = heapq.heappop(ending)
            clock.advance(max(0.0, done - clock.monotonic()))
            length = rows[j].output if cap is None else min(rows[j].output, cap)
            natural = length == rows[j].output
            estimator.observe(*requests[j], rows[j].prompt, length, natural=natural)
        clock.advance(max(0.0, row.arrival - clock.monotonic()))
        forecast = estimator.forecast(*requests[i], row.prompt, cap)
        outcomes.append(Outcome(forecast, row.output if cap is None else min(row.output, cap)))
        heapq.heappush(ending, (row.arrival + row.output / TOKENS_PER_S, i))
    return outcomes


def score(outcomes: list[Outcome], seed: int = 1) -> dict[str, float]:
    rng = random.Random(seed)
    near = [
        pair
        for start in range(0, len(outcomes), WINDOW)
        for pair in combinations(outcomes[start : start + WINDOW], 2)
    ]
    far = ((rng.choice(outcomes), rng.choice(outcomes)) for _ in range(PAIRS))
    count = len(outcomes)
    return {
        "requests": count,
        "rank_accuracy": _ranked(far),
        "rank_accuracy_near": _ranked(near),
        "q80_coverage": round(sum(o.length <= o.forecast.q80 for o in outcomes) / count, 3),
        "q90_coverage": round(sum(o.length <= o.forecast.q90 for o in outcomes) / count, 3),
        "q80_below": round(sum(o.length < o.forecast.q80 for o in outcomes) / count, 3),
        "q90_below": round(sum(o.length < o.forecast.q90 for o in outcomes) / count, 3),
    }


def _ranked(pairs: Iterable[tuple[Outcome, Outcome]]) -> float:
    total = right = 0.0
    for a, b in pairs:
        if a.length == b.length:
            continue
        total += 1
        if a.forecast.mean == b.forecast.mean:
            right += 0.5
        else:
            right += (a.forecast.mean < b.forecast.mean) == (a.length < b.length)
    return round(right / total, 3)


def ceiling(rows: list[Row]) -> float:
    lengths: dict[str, list[int]] = {}
    for row in rows:
        lengths.setdefault(row.flow, []).append(row.output)
    medians = {flow: statistics.median(known) for flow, known in lengths.items()}
    outcomes = [Outcome(Forecast(medians[row.flow], 0, 0), row.output) for row in rows]
    rng = random.Random(1)
    return _ranked((rng.choice(outcomes), rng.choice(outcomes)) for _ in range(PAIRS))


def cost_us(rows: list[Row]) -> dict[str, float]:
    """Microseconds a call, over the trace with each answer learnt at once."""
    estimator = LengthEstimator(VirtualClock())
    spent = {"forecast_us": 0.0, "observe_us": 0.0}
    for row in rows:
        request = Request(
            id="r", endpoint=Endpoint.CHAT, model="m", sampling=SamplingParams(), arrival=0.0
        )
        claim = Claim(flow=row.flow)
        t0 = time.perf_counter()
        estimator.forecast(request, claim, row.prompt, None)
        t1 = time.perf_counter()
        estimator.observe(request, claim, row.prompt, row.output, natural=True)
        spent["forecast_us"] += t1 - t0
        spent["observe_us"] += time.perf_counter() - t1
    return {name: round(s / len(rows) * 1e6, 1) for name, s in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("HEADRACE_DATA"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.data is None:
        parser.error("--data or HEADRACE_DATA must name the folder of the traces")
    conv_code = azure(Path(args.data))
    results = {
        "azure conv+code": score(replay(conv_code)),
        "azure conv+code, one flow": score(replay(conv_code, by_flow=False)),
        f"azure conv+code, capped at {CAP}": score(replay(conv_code, cap=CAP)),
        "vtc arena": score(replay(arena(Path(args.data)))),
    }
    for name, rows in servegen(Path(args.data), args.seed):
        results[name] = score(replay(rows)) | {"rank_ceiling": ceiling(rows)}
    for name, result in results.items():
        print(f"{name:34}", *(f"{key} {value}" for key, value in result.items()), sep="  ")
    cost = cost_us(conv_code)
    print(cost)
    if args.out:
        report = {
            "python": platform.python_version(),
            "seed": args.seed,
            "traces": results,
            "cost": cost,
        }
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
