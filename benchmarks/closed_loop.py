"""Closed-loop load: N clients, each sending its next request when the last one is answered.

    python benchmarks/closed_loop.py --out benchmarks/results/closed_loop.json

Without --url a server is started for the run and stopped after it; it is left alone for --settle
seconds first, in which it populates its KV memory. Prompts are random token ids,
all different, so no prefix is shared; answers ignore the end token, so every request costs the
same. Token counts are the server's own (continuous usage), never chunks. The first wave of each
level warms the server up and is thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

READY_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 600.0
PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Sample:
    """One request. Times are monotonic seconds; `arrivals` pairs a time with tokens so far."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    done: float = 0.0
    error: str | None = None

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.sent

    def gaps(self) -> list[float]:
        """Inter-token latencies; a chunk of k tokens counts as k equal gaps."""
        result: list[float] = []
        for (t0, n0), (t1, n1) in zip(self.arrivals, self.arrivals[1:], strict=False):
            if n1 > n0:
                result += [(t1 - t0) / (n1 - n0)] * (n1 - n0)
        return result


def percentile(values: list[float], q: float) -> float | None:
    """Linear interpolation between closest ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread(values: list[float]) -> dict[str, float | int | None]:
    """Percentiles in milliseconds, with how many values they rest on."""
    row: dict[str, float | int | None] = {"n": len(values)}
    for q in PERCENTILES:
        value = percentile(values, q)
        row[f"p{q}_ms"] = None if value is None else round(value * 1e3, 2)
    return row


async def one_request(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], output: int
) -> Sample:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    sample = Sample(sent=time.monotonic())
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                sample.error = f"{response.status}: {(await response.text())[:200]}"
                return sample
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                event = json.loads(line[6:])
                if "error" in event:
                    sample.error = event["error"]["message"]
                    return sample
                count = (event.get("usage") or {}).get("completion_tokens", 0)
                if event["choices"] and count > sample.tokens:
                    sample.arrivals.append((now, count))
    except (aiohttp.ClientError, TimeoutError) as exc:
        sample.error = f"{type(exc).__name__}: {exc}"
    sample.done = time.monotonic()
    if sample.error is None and sample.tokens != output:
        sample.error = f"{sample.tokens} tokens where {output} were asked for"
    return sample


async def level(
    url: str, model: str, concurrency: int, waves: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One concurrency level: a warm-up wave, then `waves` requests a client, measured."""
    rng = random.Random(args.seed * 1000 + concurrency)

    def prompt() -> list[int]:
        return [rng.randrange(args.low_id, args.high_id) for _ in range(args.input)]

    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=args.headers, read_bufsize=1 << 20
    ) as session:
        warm = [one_request(session, url, model, prompt(), 8) for _ in range(concurrency)]
        await asyncio.gather(*warm)

        async def client() -> list[Sample]:
            return [
                await one_request(session, url, model, prompt(), args.output) for _ in range(waves)
            ]

        start = time.monotonic()
        answered = await asyncio.gather(*(client() for _ in range(concurrency)))
        wall = time.monotonic() - start
    samples = [sample for own in answered for sample in own]
    good = [s for s in samples if s.error is None]
    tokens = sum(s.tokens for s in good)
    return {
        "concurrency": concurrency,
        "requests": len(samples),
        "errors": sorted({s.error for s in samples if s.error is not None}),
        "wall_s": round(wall, 3),
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / wall, 2),
        "requests_per_s": round(len(good) / wall, 3),
        "ttft": spread([s.ttft for s in good]),
        "itl": spread([gap for s in good for gap in s.gaps()]),
        "e2e": spread([s.done - s.sent for s in good]),
    }


def machine() -> dict[str, Any]:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    flags: set[str] = set()
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "simd": [name for name in wanted if name in flags],
        "python": platform.python_version(),
        "system": platform.system(),
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_ready(url: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"{url} was not ready within {READY_TIMEOUT_S:.0f} s")


@contextlib.contextmanager
def served(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[str]:
    """The URL to load: the one given, or a server started here and stopped afterwards."""
    if args.url is not None:
        wait_ready(args.url)
        yield args.url
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["headrace", "serve", "--port", str(port), *shlex.split(args.serve_args)]
    result["server_command"] = shlex.join(command)
    command[0] = str(Path(sys.executable).with_name("headrace"))
    started = time.monotonic()
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_ready(url)
        result["ready_after_s"] = round(time.monotonic() - started, 2)
        result["settled_for_s"] = args.settle
        time.sleep(args.settle)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


async def first_model(url: str, headers: dict[str, str]) -> str:
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{url}/v1/models") as response,
    ):
        return str((await response.json())["data"][0]["id"])


async def run(url: str, args: argparse.Namespace, result: dict[str, Any]) -> None:
    model = args.model or await first_model(url, args.headers)
    result["model"] = model
    result["levels"] = []
    for concurrency in args.concurrency:
        waves = args.waves or max(2, 4 // concurrency)
        row = await level(url, model, concurrency, waves, args)
        result["levels"].append(row)
        print(show(row), flush=True)
        if row["errors"]:
            raise SystemExit(f"the run is not valid: {row['errors']}")
    first = result["levels"][0]["output_tokens_per_s"]
    result["speedup"] = {
        str(row["concurrency"]): round(row["output_tokens_per_s"] / first, 2)
        for row in result["levels"]
    }
    print("throughput over the first level:", result["speedup"])


def show(row: dict[str, Any]) -> str:
    ttft, itl = row["ttft"], row["itl"]
    return (
        f"concurrency {row['concurrency']:>3}  {row['output_tokens_per_s']:>8.1f} tok/s"
        f"  TTFT p50 {ttft['p50_ms']} p99 {ttft['p99_ms']} ms"
        f"  ITL p50 {itl['p50_ms']} p99 {itl['p99_ms']} ms  ({row['requests']} requests)"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="server to load; without it one is started")
    parser.add_argument("--serve-args", default="", help="further arguments of `headrace serve`")
    parser.add_argument("--settle", type=float, default=20.0)
    parser.add_argument("--model")
    parser.add_argument("--api-key")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--waves", type=int, help="requests a client at each level")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--low-id", type=int, default=100)
    parser.add_argument("--high-id", type=int, default=49000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    return args


def main() -> None:
    args = parse_args()
    result: dict[str, Any] = {
        "benchmark": "closed_loop",
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "workload": {
            "input_tokens": args.input,
            "output_tokens": args.output,
            "prompts": "random token ids, no shared prefix",
            "sampling": "greedy, ignore_eos",
            "seed": args.seed,
        },
    }
    with served(args, result) as url:
        asyncio.run(run(url, args, result))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        print(f"saved {args.out}")


if __name__ == "__main__":
    main()
