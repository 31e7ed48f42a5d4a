"""Requests to simulate, from the trace slices in DIR/traces."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scheduling.engine import Job

DURATION_S = 420.0
OUTPUT_CAP = 1500

Rows = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    cls: int
    lengths: str
    rate: float
    start: float = 0.0
    end: float = DURATION_S


NOISY_NEIGHBOUR = (
    Tenant("vip", 0, "azure2023_conv", 0.3),
    Tenant("chat0", 1, "azure2023_conv", 0.5),
    Tenant("chat1", 1, "azure2023_conv", 0.5),
    Tenant("chat2", 1, "azure2023_conv", 0.5),
    Tenant("code", 1, "azure2023_code", 1.0),
    Tenant("noisy", 1, "sharegpt_8k_lengths", 2.2, 120.0, 240.0),
    Tenant("batch", 2, "arxiv_summarization_lengths", 0.5),
)


def lengths(data: Path) -> dict[str, Rows]:
    names = {tenant.lengths for tenant in NOISY_NEIGHBOUR}
    found = {}
    for name in names:
        with (data / "traces" / f"{name}.csv").open() as file:
            found[name] = [
                (int(row["prompt_tokens"]), int(row["output_tokens"]))
                for row in csv.DictReader(file)
            ]
    return found


def noisy_neighbour(rows: dict[str, Rows], scale: float, seed: int) -> list[Job]:
    rng = random.Random(seed)
    jobs = []
    for tenant in NOISY_NEIGHBOUR:
        at = tenant.start
        while True:
            at += rng.expovariate(tenant.rate * scale)
            if at >= tenant.end:
                break
            prompt, output = rng.choice(rows[tenant.lengths])
            output = min(max(1, output), OUTPUT_CAP)
            jobs.append(Job(0, tenant.name, tenant.cls, at, max(1, prompt), output))
    jobs.sort(key=lambda job: job.arrival)
    for number, job in enumerate(jobs):
        job.number = number
    return jobs
