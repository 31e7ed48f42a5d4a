"""What a stored answer costs: over HTTP on one core, and in the cache alone.

    python -m benchmarks.caching.hits --out benchmarks/results/caching_hits.json

Starts the server on core 0, has one answer computed and stored, then asks for it again from core
1: a chat of 2 KB, non-streamed and streamed, one client and many. Every answer is read whole and
checked to be a hit. The client is a plain socket per connection, so that it can keep up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from benchmarks.closed_loop import free_port, machine, percentile, wait_ready

from headrace.caching import KeyMaker, MemoryTier
from headrace.caching.entry import entry_of
from headrace.core.clock import SystemClock
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, Usage
from headrace.core.request import Endpoint, Message, Request, SamplingParams

MODEL = "smollm2-135m-instruct"
QUESTION = "Which of these fruits keep longest? " + "Apples, pears, quinces and medlars. " * 54
SERVER_CORE, CLIENT_CORE = 0, 1


def body(*, stream: bool) -> bytes:
    return json.dumps(
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "You are a grocer."},
                {"role": "user", "content": QUESTION},
            ],
            "temperature": 0,
            "max_tokens": 64,
            "stream": stream,
        }
    ).encode()


def message(*, stream: bool) -> bytes:
    data = body(stream=stream)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Connection(asyncio.Protocol):
    """Sends the message again as soon as the answer is whole, until told to stop."""

    def __init__(self, data: bytes, done: asyncio.Event) -> None:
        self.data = data
        self.done = done
        self.times: list[float] = []
        self.hits = 0
        self._buffer = b""
        self._sent = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._sent = time.perf_counter()
        self._transport.write(self.data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lowered = head.lower()
        if b"transfer-encoding: chunked" in lowered:
            if not rest.endswith(b"0\r\n\r\n"):
                return
        else:
            length = int(lowered.partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
            if len(rest) < length:
                return
        self.times.append(time.perf_counter() - self._sent)
        self.hits += b"x-cache: hit" in lowered and head.startswith(b"HTTP/1.1 200")
        self._buffer = b""
        if not self.done.is_set():
            self._send()


async def load(port: int, clients: int, seconds: float, *, stream: bool) -> dict[str, Any]:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    pairs = [
        await loop.create_connection(
            lambda: Connection(message(stream=stream), done), "127.0.0.1", port
        )
        for _ in range(clients)
    ]
    started = time.perf_counter()
    await asyncio.sleep(seconds)
    done.set()
    elapsed = time.perf_counter() - started
    await asyncio.sleep(0.2)
    for transport, _ in pairs:
        transport.close()
    times = [t for _, connection in pairs for t in connection.times]
    hits = sum(connection.hits for _, connection in pairs)
    assert hits == len(times), f"{len(times) - hits} answers were not hits"
    p50, p99 = percentile(times, 50), percentile(times, 99)
    assert p50 is not None
    assert p99 is not None
    return {
        "clients": clients,
        "stream": stream,
        "hits_per_s": round(hits / elapsed),
        "p50_ms": round(1e3 * p50, 3),
        "p99_ms": round(1e3 * p99, 3),
    }


@contextlib.contextmanager
def served(settle: float) -> Iterator[int]:
    port = free_port()
    command = [str(Path(sys.executable).with_name("headrace")), "serve", "--port", str(port)]
    os.sched_setaffinity(0, {SERVER_CORE})  # the server inherits it
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    os.sched_setaffinity(0, {CLIENT_CORE})
    try:
        wait_ready(f"http://127.0.0.1:{port}")
        time.sleep(settle)  # the engine populates its KV memory meanwhile
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(40)
        except subprocess.TimeoutExpired:
            server.kill()


async def first(port: int) -> None:
    """Computes the answer that is asked for from then on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message(stream=False).replace(b"host: x", b"host: x\r\nconnection: close"))
    answer = await reader.read()
    assert b"x-cache: MISS" in answer, answer[:500]
    writer.close()


def look_up() -> dict[str, float]:
    """Microseconds for the key of the request and its entry in memory."""
    request = Request(
        id="r",
        endpoint=Endpoint.CHAT,
        model=MODEL,
        sampling=SamplingParams(temperature=0.0, max_tokens=64),
        arrival=0.0,
        messages=(Message("system", "You are a grocer."), Message("user", QUESTION)),
    )
    keys, memory = KeyMaker(b"0" * 32), MemoryTier(1 << 24, SystemClock())
    scope = ("tenant", MODEL, "engine abc", "", 0, 0, 0, 0, 0)
    events: list[Event] = [
        Start(MODEL, "engine", 600, 0),
        Delta(0, "x" * 300),
        Finish(0, FinishReason.STOP),
    ]
    entry = entry_of([*events, Usage(600, 64)], created=0.0, ttl_s=1e12, saved_s=2.0)
    assert entry is not None
    memory.put(keys.key(request, scope), entry)
    times = []
    for _ in range(20_000):
        started = time.perf_counter()
        found = memory.look(keys.key(request, scope))
        times.append(time.perf_counter() - started)
        assert found is not None
    p50, p99 = percentile(times, 50), percentile(times, 99)
    assert p50 is not None
    assert p99 is not None
    return {"p50_us": round(1e6 * p50, 1), "p99_us": round(1e6 * p99, 1)}


async def run(port: int, seconds: float) -> list[dict[str, Any]]:
    await first(port)
    rows = []
    for stream in (False, True):
        for clients in (1, 16, 64):
            await load(port, clients, 1.0, stream=stream)
            rows.append(await load(port, clients, seconds, stream=stream))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--settle", type=float, default=25.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with served(args.settle) as port:
        rows = asyncio.run(run(port, args.seconds))
    result = {
        "command": " ".join(["python -m benchmarks.caching.hits", *sys.argv[1:]]),
        "machine": machine(),
        "body_bytes": len(body(stream=False)),
        "http": rows,
        "key_and_memory": look_up(),
    }
    print(result["key_and_memory"])
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
