"""A real redis-server, servers that only pretend to be one, and who uses them."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.caching import Epochs
from headrace.caching.entry import Entry
from headrace.caching.remote import Remote, RemoteSettings
from headrace.core.clock import SystemClock

__all__ = [
    "BOUND_S",
    "MUCH_MORE_S",
    "SECRET",
    "RedisServer",
    "assert_prompt",
    "entry",
    "free_port",
    "key",
    "pretending",
    "redis_server",
    "remote",
    "sent",
    "took",
    "until",
]

SECRET = b"s" * 32
BOUND_S = 0.05
MUCH_MORE_S = 0.5
"""What a wait of at most BOUND_S is measured with on a busy machine."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RedisServer:
    """In a folder of its own, without persistence. Blocks while it starts and stops."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.folder = folder
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            if os.environ.get("CI"):
                pytest.fail("there is no redis-server")
            pytest.skip("there is no redis-server")
        self.folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [
                binary,
                *("--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                *("--appendonly", "no", "--dir", str(self.folder), *self.options),
            ],
            stdout=subprocess.DEVNULL,
        )
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 0.2) as sock:
                    sock.sendall(b"PING\r\n")
                    if sock.recv(64).startswith((b"+PONG", b"-NOAUTH")):
                        return
            except OSError:
                time.sleep(0.02)
        pytest.fail("redis-server did not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def run(self, *words: str) -> str:
        """What redis-cli says."""
        done = subprocess.run(
            ["redis-cli", "-p", str(self.port), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def pretending(behaviour: Behaviour) -> AsyncIterator[str]:
    """The URL of a server whose connections do as told."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await behaviour(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a cancelled handler makes a noise in asyncio
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def entry(text: str = "x", ttl: float = 100.0) -> Entry:
    now = time.time()
    return Entry(text.encode(), False, now, now + ttl, 1.0, 1, 1)


@asynccontextmanager
async def remote(
    url: str,
    *,
    secret: bytes = SECRET,
    epochs: Epochs | None = None,
    patient: bool = True,
    **more: object,
) -> AsyncIterator[Remote]:
    """`patient` is for tests of what is done, not of how long it may take."""
    settings = RemoteSettings(url, timeout_s=2.0 if patient else BOUND_S)
    settings = replace(settings, **more)  # type: ignore[arg-type]
    made = Remote(
        settings,
        secret,
        Epochs() if epochs is None else epochs,
        clock=SystemClock(),
        rng=random.Random(1),
    )
    await made.start()
    own = [*made.bulletin._tasks, made.epochs._task, made._task]
    try:
        yield made
        assert not any(task is None or task.done() for task in own), "each runs until the end"
    finally:
        await made.close()
        assert not made.link._tasks
        assert all(task is not None and task.done() for task in own)


async def until(true: Callable[[], bool | Awaitable[bool]], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            result = true()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.005)


async def sent(made: Remote) -> None:
    await until(lambda: not made._waiting)


async def took(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def assert_prompt(made: Remote, count: int = 12) -> None:
    for n in range(count):
        assert await took(made.get(key(n))) < MUCH_MORE_S
        made.put(key(n), entry())
        made.remove(key(n + 1000))
        made.bulletin.publish("k", b"x")
    assert await took(made.leases.held(key(1))) < MUCH_MORE_S
    taken = await made.leases.take(key(1), 1.0)
    assert taken is not None
    await taken()
