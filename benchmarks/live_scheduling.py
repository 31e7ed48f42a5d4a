"""The scheduler on the real model: does urgent work stay prompt, and is overload refused well?

    python -m benchmarks.live_scheduling --out benchmarks/results/live_scheduling.json

Starts a server with three tenants and runs, one after the other:

* head_of_line: a batch tenant keeps 2,000-token prompts queued, a second one sends short
  interactive requests; once first come, first served (the same server, order and admission
  switched off), once as shipped.
* flood: a tenant's steady requests, 0.4 a second, alone, then beside another tenant's flood of the
  same class: 96 clients that ask again as soon as they are answered.
* itl: streams while prompts arrive, with an absolute target, then with a loose one.
* overload: five times the capacity is offered for a minute.

Times are seconds. Prompts are random token ids, all different.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.closed_loop import free_port, machine, percentile, wait_ready

STEADY_PER_S = 0.4
ADMIN, BATCH, STEADY, FLOOD = "sk-admin", "sk-batch", "sk-steady", "sk-flood"
CONFIG = """
[[tenants]]
name = "operator"
api_keys = ["sk-admin"]
admin = true

[[tenants]]
name = "nightly"
api_keys = ["sk-batch"]
default_class = "batch"

[[tenants]]
name = "steady"
api_keys = ["sk-steady"]

[[tenants]]
name = "flood"
api_keys = ["sk-flood"]
"""

FIRST_COME = {
    "kappa": 0.0,
    "window_s": 1e6,
    "late_lane": False,
    "guard_every": 0,
    "express": 0.0,
    "shortest_first": False,
    "partials": 1,
    "prefill_ahead_s": 0.0,
    "revoke_margin_s": -1.0,
    "preemption": False,
    "size_bias": 0.0,
    "share_bias": 0.0,
    "shed": False,
    "push_out": False,
    "classes": {
        name: {"slack_s": 0.0, "slots": 1.0}
        for name in ("system", "interactive", "standard", "batch")
    },
}
"""Turns in order of arrival, one prompt after the other, as a server without a scheduler does it;
all requests are sent as one class then, as the engine too puts the more urgent class first."""


@dataclass(slots=True)
class Sample:
    """One request, and after how many seconds a refused one may come back."""

    sent: float
    status: int = 0
    answered: float = 0.0
    retry_after_s: float = 0.0
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.sent if self.times else None

    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._rng = random.Random(7)

    async def ask(self, key: str, prompt: int, output: int, priority: str | None = None) -> Sample:
        headers = {"authorization": f"Bearer {key}"}
        if priority is not None:
            headers["x-priority"] = priority
        body = {
            "model": self._model,
            "prompt": [self._rng.randrange(100, 49000) for _ in range(prompt)],
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        sample = Sample(time.monotonic())
        async with self._session.post(
            f"{self._url}/v1/completions", json=body, headers=headers
        ) as response:
            sample.status = response.status
            if response.status != 200:
                await response.read()
                sample.retry_after_s = float(response.headers.get("retry-after-ms", 0)) / 1000
            else:
                async for line in response.content:
                    if line.startswith(b"data: {") and b'"error"' not in line[:16]:
                        sample.times.append(time.monotonic())
        sample.answered = time.monotonic()
        return sample

    async def configure(self, changes: dict[str, Any]) -> dict[str, Any]:
        async with self._session.patch(
            f"{self._url}/scheduler/config",
            json=changes,
            headers={"authorization": f"Bearer {ADMIN}"},
        ) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise SystemExit(f"the configuration was refused: {answer}")
            return answer

    async def config(self) -> dict[str, Any]:
        async with self._session.get(
            f"{self._url}/scheduler/config", headers={"authorization": f"Bearer {ADMIN}"}
        ) as response:
            answer: dict[str, Any] = await response.json()
            return answer

    async def ttft_target(self, priority_class: str) -> float:
        """Seconds, as the server's metrics tell."""
        async with self._session.get(
            f"{self._url}/metrics", headers={"authorization": f"Bearer {ADMIN}"}
        ) as response:
            for line in (await response.text()).splitlines():
                if "ttft_target_seconds{" in line and f'"{priority_class}"' in line:
                    return float(line.rsplit(" ", 1)[1])
        raise SystemExit("the server tells no target")

    async def trace(self) -> list[dict[str, Any]]:
        async with self._session.get(
            f"{self._url}/scheduler/trace", headers={"authorization": f"Bearer {ADMIN}"}
        ) as response:
            answer = await response.json()
            return list(answer["steps"] if isinstance(answer, dict) else answer)


async def closed(
    clients: int, seconds: float, ask: Callable[[], Awaitable[Sample]]
) -> list[Sample]:
    """`clients` send their next request when the last one is answered, until time is up."""
    end = time.monotonic() + seconds
    samples: list[Sample] = []

    async def one() -> None:
        while time.monotonic() < end:
            sample = await ask()
            samples.append(sample)
            # Who is refused comes back when told to, as the SDKs do.
            await asyncio.sleep(min(sample.retry_after_s, max(0.0, end - time.monotonic())))

    await asyncio.gather(*(one() for _ in range(clients)))
    return samples


async def offered(
    rate: float, seconds: float, ask: Callable[[], Awaitable[Sample]], seed: int
) -> list[Sample]:
    """Poisson arrivals, whatever the answers do."""
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    tasks = []
    while time.monotonic() < end:
        await asyncio.sleep(rng.expovariate(rate))
        tasks.append(asyncio.create_task(_awaited(ask())))
    return list(await asyncio.gather(*tasks))


async def _awaited(sample: Awaitable[Sample]) -> Sample:
    return await sample


@contextlib.asynccontextmanager
async def beside(work: Awaitable[list[Sample]]) -> AsyncIterator[asyncio.Task[list[Sample]]]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def spread(values: list[float]) -> dict[str, float | int | None]:
    row: dict[str, float | int | None] = {"n": len(values)}
    for q in (50, 90, 99):
        value = percentile(values, q)
        row[f"p{q}_s"] = None if value is None else round(value, 3)
    return row


def ttfts(samples: list[Sample]) -> list[float]:
    return [sample.ttft for sample in samples if sample.ttft is not None]


async def head_of_line(client: Client, seconds: float) -> dict[str, Any]:
    default = await client.config()
    result: dict[str, Any] = {}
    for name, config, urgent in (
        ("first_come", FIRST_COME, "batch"),
        ("headrace", default, "interactive"),
    ):
        await client.configure(config)
        batch = closed(12, seconds, lambda: client.ask(BATCH, 2000, 32))
        async with beside(batch) as load:
            await asyncio.sleep(5.0)
            ask = partial(client.ask, STEADY, 64, 16, urgent)
            short = await offered(0.5, seconds - 10.0, ask, 3)
            heavy = await load
        span = max(s.answered for s in heavy) - min(s.sent for s in heavy)
        tokens = sum(2000 + len(s.times) for s in heavy if s.times)
        result[name] = {
            "interactive_ttft": spread(ttfts(short)),
            "batch_ttft": spread(ttfts(heavy)),
            "refused": sum(s.status != 200 for s in (*short, *heavy)),
            "batch_tokens_per_s": round(tokens / span, 1),
        }
    old, new = (result[k]["interactive_ttft"]["p99_s"] for k in ("first_come", "headrace"))
    result["interactive_p99_gain"] = round(old / new, 1)
    result["batch_throughput_ratio"] = round(
        result["headrace"]["batch_tokens_per_s"] / result["first_come"]["batch_tokens_per_s"], 3
    )
    return result


async def flood(client: Client, seconds: float) -> dict[str, Any]:
    def steady() -> Awaitable[list[Sample]]:
        return offered(STEADY_PER_S, seconds, lambda: client.ask(STEADY, 128, 48), 7)

    rng = random.Random(3)
    alone = await steady()
    # Of different lengths: equal ones would end in waves, with no slot free for seconds on end.
    async with beside(
        closed(96, seconds + 25.0, lambda: client.ask(FLOOD, 128, rng.randint(16, 80)))
    ):
        await asyncio.sleep(25.0)
        crowded = await steady()
    a, b = spread(ttfts(alone)), spread(ttfts(crowded))
    step = max((float(row["predicted_s"]) for row in await client.trace()), default=0.0)
    return {
        "alone_ttft": a,
        "beside_flood_ttft": b,
        "refused": sum(s.status != 200 for s in crowded),
        "longest_step_s": round(step, 3),
        "bound_p99_s": None if a["p99_s"] is None else round(1.5 * a["p99_s"] + step, 3),
    }


async def itl(client: Client, seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for target in (0.2, 2.0):
        await client.configure({"itl_target_s": target})
        async with beside(offered(0.5, seconds, lambda: client.ask(BATCH, 512, 8), 5)):
            streams = await closed(48, seconds, lambda: client.ask(STEADY, 32, 96))
        gaps = [gap for s in streams for gap in s.gaps()]
        last = (await client.trace())[-1]
        result[f"target_{target}_s"] = {
            "itl": spread(gaps),
            "p99_over_target": round((percentile(gaps, 99) or 0.0) / target, 3),
            "max_running": last["max_running"],
            "max_step_tokens": last["max_step_tokens"],
        }
    await client.configure({"itl_target_s": "auto"})
    return result


async def overload(client: Client, seconds: float, pid: int) -> dict[str, Any]:
    warm = await closed(64, seconds, lambda: client.ask(STEADY, 128, 32))
    span = max(s.answered for s in warm) - min(s.sent for s in warm)
    capacity = len(warm) / span
    before = rss(pid)
    samples = await offered(
        5 * capacity, 60.0, lambda: client.ask(STEADY, 128, 32, "interactive"), 11
    )
    target = await client.ttft_target("interactive")
    after = rss(pid)
    ended = time.monotonic()
    await asyncio.sleep(max(0.0, 5.0 - (time.monotonic() - ended)))
    probe = await client.ask(STEADY, 128, 8, "interactive")
    refused = [s for s in samples if s.status in (429, 503)]
    return {
        "capacity_per_s": round(capacity, 2),
        "offered": len(samples),
        "admitted": len(samples) - len(refused),
        "refused": len(refused),
        "other_errors": sum(s.status not in (200, 429, 503) for s in samples),
        "interactive_target_s": round(target, 3),
        "admitted_ttft": spread(ttfts(samples)),
        "within_target": round(
            sum(ttft <= target for ttft in ttfts(samples)) / max(1, len(ttfts(samples))), 4
        ),
        "refusal": spread([s.answered - s.sent for s in refused]),
        "front_rss_mb": [before, after],
        "ttft_5_s_after": None if probe.ttft is None else round(probe.ttft, 3),
    }


def rss(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


@contextlib.contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "headrace.toml"
        config.write_text(CONFIG)
        command = [
            str(Path(sys.executable).with_name("headrace")),
            *("serve", "--port", str(port), "--config", str(config)),
            *shlex.split(args.serve_args),
        ]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_ready(f"http://127.0.0.1:{port}")
            time.sleep(args.settle)
            yield f"http://127.0.0.1:{port}", server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(40)
            except subprocess.TimeoutExpired:
                server.kill()


async def run(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=1 << 20
    ) as session:
        async with session.get(
            f"{url}/v1/models", headers={"authorization": f"Bearer {ADMIN}"}
        ) as response:
            model = (await response.json())["data"][0]["id"]
        client = Client(session, url, model)
        await closed(8, 8.0, lambda: client.ask(STEADY, 128, 32))  # warm, and measured
        scenarios: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "head_of_line": lambda: head_of_line(client, args.seconds),
            "flood": lambda: flood(client, args.seconds),
            "itl": lambda: itl(client, args.seconds / 2),
            "overload": lambda: overload(client, args.seconds / 2, pid),
        }
        result = {}
        for name in args.only or scenarios:
            result[name] = await scenarios[name]()
            print(name, json.dumps(result[name], indent=1), flush=True)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve-args", default="", help="further arguments of `headrace serve`")
    parser.add_argument("--seconds", type=float, default=90.0, help="length of a scenario's part")
    parser.add_argument("--settle", type=float, default=20.0)
    parser.add_argument("--only", nargs="+", choices=("head_of_line", "flood", "itl", "overload"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "live_scheduling",
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
    }
    with served(args) as (url, pid):
        result |= asyncio.run(run(url, pid, args))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        print(f"saved {args.out}")


if __name__ == "__main__":
    main()
