"""What one decision costs with many requests queued.

    python -m benchmarks.scheduling.decision_cost [--queued N] [--flows N] [--out FILE]

A decision is one turn given, with the queue kept full: a choice finishes, the next turn is given, a
new request comes in its place. CPU time of the thread, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.scheduling.engine import quantile

from headrace.core.clock import VirtualClock
from headrace.core.request import Endpoint, PriorityClass, Request, SamplingParams
from headrace.scheduling.base import Claim, Cost, StepSample
from headrace.scheduling.entry import Entry
from headrace.scheduling.forecast import FixedForecaster, Forecaster
from headrace.scheduling.heart import Heart
from headrace.scheduling.lengths import LengthEstimator
from headrace.scheduling.policy import SchedulingPolicy

REQUEST = Request(
    id="r", endpoint=Endpoint.CHAT, model="m", sampling=SamplingParams(max_tokens=512), arrival=0.0
)


TURN_S = 0.01
"""Between turns, and as long between arrivals: what comes in goes out."""


def ignore(error: Exception | None = None) -> None:
    del error


def measure(queued: int, flows: int, turns: int, forecaster: str) -> dict[str, float]:
    rng = random.Random(1)
    clock = VirtualClock()
    running: list[Entry] = []
    forecasts: Forecaster = LengthEstimator(clock) if forecaster == "learnt" else FixedForecaster()
    policy = replace(
        SchedulingPolicy(), auto_targets=False, shed=False, max_queue=10**6, max_queued_tokens=10**9
    )
    heart = Heart(
        policy,
        capacity=lambda: 64,
        clock=clock,
        rng=rng,
        forecaster=forecasts,
        timer=time.thread_time,
    )

    def come() -> None:
        claim = Claim(
            f"flow{rng.randrange(flows)}",
            rng.choice((1.0, 2.0)),
            rng.choice(tuple(PriorityClass)),
        )
        cost = Cost(1, rng.randint(10, 4000), 512, exact=True)
        entry: Entry

        def wake() -> None:
            running.append(entry)

        entry = heart.admit(REQUEST, cost, claim, ignore, wake)
        heart.ask(entry, cost)

    for _ in range(queued + 66):
        come()
        clock.advance(TURN_S)
    heart.observe_step(StepSample(0.05, 512, 30))
    for entry in running:
        heart.started(entry)
        heart.generated(entry, 1)
    counters = heart.books.counters
    counters.decisions, counters.decision_seconds = 0, 0.0
    whole, turn, coming, decisions = [], [], [], []
    gc.collect()
    gc.freeze()
    for _ in range(turns):
        clock.advance(TURN_S)
        spent = counters.decision_seconds
        began = time.thread_time()
        done = running.pop(0)
        before = len(running)
        heart.choice_finished(done)
        middle = time.thread_time()
        decided = counters.decision_seconds
        come()
        ended = time.thread_time()
        heart.observe_step(StepSample(0.05, 512, 60))
        for entry in running[before:]:
            heart.started(entry)
            heart.generated(entry, 1)
        decisions.append(decided - spent)
        turn.append(middle - began)
        coming.append(ended - middle)
        whole.append(ended - began)
    micro = 1e6
    return {
        "queued": sum(heart.books.backlog.choices),
        "flows": flows,
        "decision_mean_us": micro * counters.decision_seconds / counters.decisions,
        "turn_mean_us": micro * sum(decisions) / turns,
        "turn_p50_us": micro * quantile(decisions, 0.5),
        "turn_p99_us": micro * quantile(decisions, 0.99),
        "finish_and_next_turn_p50_us": micro * quantile(turn, 0.5),
        "finish_and_next_turn_p99_us": micro * quantile(turn, 0.99),
        "arrival_p50_us": micro * quantile(coming, 0.5),
        "arrival_p99_us": micro * quantile(coming, 0.99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What one decision of the scheduler costs.")
    parser.add_argument("--queued", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--flows", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for forecaster in ("fixed", "learnt"):
        for queued in args.queued:
            row = measure(queued, args.flows, args.turns, forecaster)
            results.append({"forecaster": forecaster, **row})
            print(forecaster, " ".join(f"{name}={value:.0f}" for name, value in row.items()))
    if args.out is not None:
        found = {
            "command": "python -m benchmarks.scheduling.decision_cost",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "results": results,
        }
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
