"""Tables of the simulation, by the workload of data/noisy-neighbour.md and other public traces.

    python -m benchmarks.scheduling --data DIR [--seeds N] [--out FILE]

DIR holds `traces/` (or set HEADRACE_DATA). A virtual clock, so only the seeds decide the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.scheduling import traces
from benchmarks.scheduling.drivers import BASELINES, run
from benchmarks.scheduling.engine import Job
from benchmarks.scheduling.measures import fleet_measures, measures
from benchmarks.scheduling.variants import VARIANTS, Make
from benchmarks.scheduling.workload import lengths, noisy_neighbour

SCALES = (0.5, 0.8, 1.1)
NEAR_CAPACITY = 0.8
FEW_SEEDS = 3
COMPARED = ("ours", "learnt step budget", "no admission")
WORST = ("vip_p99", "short_p99", "batch_max_wait", "shed_others")
Row = dict[str, Any]


def averaged(found: Sequence[dict[str, float]], worst: Sequence[str] = ()) -> Row:
    row: Row = {name: round(mean(m[name] for m in found), 4) for name in found[0]}
    for name in worst:
        row[f"{name}_worst_seed"] = round(max(m[name] for m in found), 4)
    return row


def neighbours(data: Path, seeds: int) -> list[Row]:
    rows = lengths(data)
    table = []
    for scale in SCALES:
        near = scale == NEAR_CAPACITY
        makes: dict[str, Make] = dict(BASELINES)
        makes |= {n: m for n, m in VARIANTS.items() if near or n in COMPARED}
        used = range(1, (seeds if near else min(seeds, FEW_SEEDS)) + 1)
        for name, make in makes.items():
            found = []
            for seed in used:
                jobs = noisy_neighbour(rows, scale, seed)
                found.append(measures(jobs, run(jobs, make)))
            row = {"scale": scale, "policy": name, "seeds": len(used), **averaged(found, WORST)}
            table.append(row)
            print(_line(row), flush=True)
    return table


def others(data: Path) -> list[Row]:
    makes: dict[str, Make] = dict(BASELINES)
    makes |= {name: VARIANTS[name] for name in COMPARED}
    workloads: dict[str, Callable[[], list[Job]]] = {
        "mooncake conversation": lambda: traces.mooncake(data),
        "vtc arena, 27 clients": lambda: traces.arena(data),
        "servegen m-mid": lambda: traces.servegen(data, "language/m-mid", 1),
        "servegen m-large": lambda: traces.servegen(data, "language/m-large", 1),
        "servegen deepseek-r1": lambda: traces.servegen(data, "reason/deepseek-r1", 1),
    }
    table = []
    for workload, draw in workloads.items():
        for name, make in makes.items():
            jobs = draw()
            row = {"trace": workload, "policy": name, **fleet_measures(jobs, run(jobs, make))}
            table.append(row)
            print(_line(row), flush=True)
    return table


def _line(row: Row) -> str:
    cells = []
    for name, value in row.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        cells.append(f"{name}={shown}")
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulates the scheduler on public traces.")
    default = os.environ.get("HEADRACE_DATA")
    parser.add_argument("--data", type=Path, default=default, required=default is None)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    found = {
        "command": f"python -m benchmarks.scheduling --data DIR --seeds {args.seeds}",
        "python": platform.python_version(),
        "noisy_neighbour": neighbours(args.data, args.seeds),
        "traces": others(args.data),
    }
    print(f"{time.monotonic() - began:.0f} s")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
