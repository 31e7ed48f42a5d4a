"""A server process of our own, started as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STARTUP_LIMIT_S = 90.0
SETTLE_LIMIT_S = 10.0


@dataclass(frozen=True)
class Server:
    """A running `headrace serve`; `url` has no trailing slash."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name, label sets added up."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            text = response.read().decode()
        result: dict[str, float] = {}
        for line in text.splitlines():
            match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", line)
            if match is not None:
                name, value = match.groups()
                result[name] = result.get(name, 0.0) + float(value)
        return result

    def busy(self) -> dict[str, float]:
        """The gauges that must return to zero, as far as they have not."""
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        )
        sample = self.metrics()
        return {name: sample[name] for name in names if sample[name] != 0}

    def settle(self) -> None:
        """Waits until nothing runs, nothing waits and every KV block is free."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while busy := self.busy():
            assert time.monotonic() < deadline, f"did not return to zero: {busy}"

    def engine_pid(self) -> int:
        """The only child that runs the engine."""
        pids = descendants(self.process.pid)
        engines = [pid for pid in pids if b"engine" in cmdline(pid)]
        assert len(engines) == 1, f"engine processes: {engines} of {pids}"
        return engines[0]


def descendants(pid: int) -> list[int]:
    result = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            result += [int(child), *descendants(int(child))]
    return result


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def serve(log: Path, *args: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """`headrace serve` with further arguments, until ready; stopped with all it started."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("headrace")), "serve", "--port", str(port), *args]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env={**os.environ, **(env or {})}
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        deadline = time.monotonic() + STARTUP_LIMIT_S
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"not ready in time:\n{log.read_text()}"
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                if server.status("/readyz") == 200:
                    break
        yield server
    finally:
        children = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
        left = [pid for pid in children if alive(pid)]
        assert not left, f"processes left behind: {left}"
