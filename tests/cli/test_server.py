"""The serving process: its port, its stages, its signals. Real sockets, a backend on a leash."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from headrace.api import create_app
from headrace.cli.embedded import ModelNotFetched
from headrace.cli.server import CannotListen, Process, bind
from headrace.config import ServerSettings, Settings
from headrace.core.clock import SystemClock
from headrace.core.errors import BackendUnavailable, HeadraceError
from headrace.core.health import Health, Stage, StageProgress, State
from headrace.gateway import Gateway
from headrace.telemetry import Metrics
from support.backend import Call, FakeBackend

pytestmark = pytest.mark.anyio

LIMIT_S = 20.0


class SlowStart(FakeBackend):
    """Ready when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State.STARTING
        self.may_start = asyncio.Event()
        self.error: HeadraceError | None = None

    async def start(self) -> None:
        await self.may_start.wait()
        if self.error is not None:
            raise self.error
        await super().start()

    def health(self) -> Health:
        stage = StageProgress(Stage.LOAD_WEIGHTS, 0.5, 1.0, "half of it")
        return Health(self.state, "loading", (stage,))


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Asks until it holds or the limit is over."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)


@dataclass
class Running:
    """A process under test, with a client that keeps its connections."""

    backend: SlowStart
    out: io.StringIO
    task: asyncio.Task[int]
    url: str
    http: aiohttp.ClientSession

    async def status(self, path: str) -> int:
        async with self.http.get(self.url + path) as response:
            return response.status

    async def until(self, path: str, status: int) -> None:
        async def reached() -> bool:
            return await self.status(path) == status

        await eventually(reached)

    async def ready(self) -> None:
        async def greeted() -> bool:
            return "the banner" in self.out.getvalue()

        self.backend.may_start.set()
        await self.until("/readyz", 200)
        await eventually(greeted)

    async def call(self, number: int) -> Call:
        """The backend's call of that number, once it has come."""

        async def come() -> bool:
            return len(self.backend.calls) > number

        await eventually(come)
        return self.backend.calls[number]

    def post(self, *, stream: bool) -> Any:
        body = {"model": "fake", "prompt": "hi", "stream": stream}
        return self.http.post(self.url + "/v1/completions", json=body)

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[tuple[aiohttp.StreamReader, Call]]:
        """A stream whose first token has arrived. Headers come with the backend's first word."""
        posting = asyncio.ensure_future(self.post(stream=True))
        call = await self.call(len(self.backend.calls))
        call.start()
        call.token(text="one")
        async with await posting as response:
            assert b"one" in await response.content.readuntil(b"\n\n")
            yield response.content, call

    async def exit(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.shield(self.task)


@asynccontextmanager
async def running(drain_timeout: float = 60.0) -> AsyncIterator[Running]:
    backend = SlowStart()
    settings = Settings(server=ServerSettings(drain_timeout=drain_timeout))
    clock = SystemClock()
    gateway = Gateway([backend], settings, clock=clock, metrics=Metrics())
    app = create_app(gateway, settings, clock=clock, version="0", manage_gateway=False)
    out = io.StringIO()
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    process = Process(gateway, app, settings.server, lambda: "the banner", out)
    task = asyncio.create_task(process.run(sock))
    async with aiohttp.ClientSession() as http:
        try:
            yield Running(backend, out, task, url, http)
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


def send(number: int) -> None:
    os.kill(os.getpid(), number)


async def test_the_port_answers_while_the_backend_starts() -> None:
    async with running() as server:
        await server.until("/livez", 200)
        async with server.http.get(server.url + "/readyz") as response:
            assert response.status == 503
            stages = (await response.json())["stages"]
        assert stages[0]["stage"] == "load_weights"
        assert stages[0]["fraction"] == 0.5
        assert "the banner" not in server.out.getvalue()
        await server.ready()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_lets_a_stream_end_and_refuses_new_requests(number: int) -> None:
    async with running() as server:
        await server.ready()
        async with server.streaming() as (stream, call):
            send(number)
            await server.until("/readyz", 503)
            assert await server.status("/livez") == 200
            async with server.post(stream=False) as refused:
                assert refused.status == 503
                assert "retry-after" in refused.headers
                assert (await refused.json())["error"]["code"] == "shutting_down"
            call.token(text="two")
            call.finish()
            rest = await stream.read()
        assert b"two" in rest
        assert rest.rstrip().endswith(b"data: [DONE]")
        assert await server.exit() == 0
        assert server.backend.closed


async def test_what_runs_past_the_drain_timeout_gets_an_error_and_the_exit_is_clean() -> None:
    async with running(drain_timeout=0.1) as server:
        await server.ready()
        async with server.streaming() as (stream, call):
            send(signal.SIGTERM)
            rest = await stream.read()
        assert b"shutting down" in rest
        assert b"[DONE]" not in rest
        assert await server.exit() == 0
        assert call.closed


async def test_a_second_signal_ends_at_once() -> None:
    async with running(drain_timeout=3600.0) as server:
        await server.ready()
        async with server.streaming() as (stream, call):
            send(signal.SIGTERM)
            await server.until("/readyz", 503)
            assert server.backend.open == [call]
            send(signal.SIGINT)
            rest = await stream.read()
        assert b"shutting down" in rest
        assert await server.exit() == 128 + signal.SIGINT
        assert call.closed
        assert server.backend.closed


async def test_an_idle_server_leaves_at_once_also_with_idle_connections() -> None:
    async with running(drain_timeout=3600.0) as server:
        await server.ready()
        assert await server.status("/livez") == 200
        send(signal.SIGTERM)
        assert await server.exit() == 0


async def test_a_signal_while_starting_leaves_cleanly() -> None:
    async with running() as server:
        await server.until("/livez", 200)
        send(signal.SIGTERM)
        assert await server.exit() == 0
        assert server.backend.closed
        assert "the banner" not in server.out.getvalue()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BackendUnavailable("the architecture Foo is not supported"), 1),
        (ModelNotFetched("the hub cannot be reached"), 2),
    ],
)
async def test_a_start_that_fails_is_a_sentence(error: HeadraceError, status: int) -> None:
    async with running() as server:
        server.backend.error = error
        server.backend.may_start.set()
        assert await server.exit() == status
        assert server.out.getvalue().strip().endswith(f"headrace: {error.message}")
        assert server.backend.closed


async def test_the_port_is_free_again_afterwards() -> None:
    async with running() as server:
        await server.ready()
        send(signal.SIGTERM)
        await server.exit()
    port = int(server.url.rpartition(":")[2])
    bind("127.0.0.1", port).close()


def test_a_bound_port_listens_before_anything_serves() -> None:
    with bind("127.0.0.1", 0) as sock:
        socket.create_connection(sock.getsockname(), timeout=5).close()


def test_a_taken_port_is_told() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(CannotListen, match=rf"port {port} on 127\.0\.0\.1 is taken.*--port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no such host", "203.0.113.7", "\udcff", "x" * 300])
def test_an_address_that_is_not_ours_is_told(host: str) -> None:
    with pytest.raises(CannotListen, match="no address"):
        bind(host, 0)


def test_ipv6_is_an_address_too() -> None:
    with bind("::1", 0) as sock:
        assert sock.family is socket.AF_INET6
