"""Other traces: their arrivals and lengths, at a load that this one engine is nearly full with."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scheduling.engine import Job

LOAD = 1.0
MOST = 1500
LONGEST_PROMPT = 16_000
OUTPUT_CAP = 1500
SERVEGEN_SHARE = 12
PREFILL_S, DECODE_S = 9e-5, 6e-4
"""Accelerator seconds of a token with half of the slots full."""


def at_load(jobs: Sequence[Job], load: float = LOAD) -> list[Job]:
    """The same arrivals, faster or slower, so that the work in them takes `load` of the time."""
    work = sum(PREFILL_S * (job.prompt - job.shared) + DECODE_S * job.output for job in jobs)
    first = jobs[0].arrival
    factor = work / load / (jobs[-1].arrival - first)
    return [
        replace(job, number=i, arrival=(job.arrival - first) * factor) for i, job in enumerate(jobs)
    ]


def mooncake(data: Path) -> list[Job]:
    """One tenant whose prompts share prefixes, which count as cached. Long prompts are cut."""
    jobs = []
    with (data / "traces" / "mooncake_conversation_lengths.csv").open() as file:
        for row in csv.DictReader(file):
            prompt = min(int(row["prompt_tokens"]), LONGEST_PROMPT)
            shared = min(int(row["shared_prefix_tokens"]), prompt - 1)
            output = min(max(1, int(row["output_tokens"])), OUTPUT_CAP)
            job = Job(0, "all", 1, float(row["arrival_s"]), prompt, output, max(0, shared))
            jobs.append(job)
    return at_load(jobs[:MOST])


def arena(data: Path) -> list[Job]:
    """27 tenants, a few of which send most."""
    jobs = []
    with (data / "traces" / "vtc_arena_27clients.csv").open() as file:
        for row in csv.DictReader(file):
            output = min(max(1, int(row["output_tokens"])), OUTPUT_CAP)
            prompt = max(1, int(row["prompt_tokens"]))
            jobs.append(Job(0, row["tenant"], 1, float(row["arrival_s"]), prompt, output))
    return at_load(jobs, 1.3 * LOAD)


def servegen(data: Path, pool: str, seed: int) -> list[Job]:
    """The busiest clients of a pool, their lengths drawn from the published quantiles."""
    clients: list[dict[str, Any]] = []
    with (data / "traces" / "servegen_clients.jsonl").open() as file:
        for line in file:
            client = json.loads(line)
            if client["pool"] == pool:
                clients.append(client)
    clients.sort(key=lambda client: -client["rate_rps"])
    clients = clients[:SERVEGEN_SHARE]
    rng = random.Random(seed)
    total = sum(client["rate_rps"] for client in clients)
    jobs: list[Job] = []
    for client in clients:
        count = max(5, round(MOST * client["rate_rps"] / total))
        at = 0.0
        shape = 1.0 / max(client["cv"], 0.3) ** 2
        for _ in range(count):
            at += rng.gammavariate(shape, 1.0 / shape) / count
            prompt = min(max(1, _drawn(client, "input_tokens_q", rng)), LONGEST_PROMPT)
            output = min(max(1, _drawn(client, "output_tokens_q", rng)), OUTPUT_CAP)
            jobs.append(Job(0, f"client-{client['client']}", 1, at, prompt, output))
    jobs.sort(key=lambda job: job.arrival)
    return at_load([job for job in jobs if job.arrival <= 1.0])


def _drawn(client: dict[str, Any], name: str, rng: random.Random) -> int:
    levels: list[float] = client["q"]
    values: list[float] = client[name]
    level = rng.uniform(0.0, 100.0)
    for i in range(1, len(levels)):
        if level <= levels[i]:
            share = (level - levels[i - 1]) / (levels[i] - levels[i - 1])
            return round(values[i - 1] + share * (values[i] - values[i - 1]))
    return round(values[-1])
