"""What only shows on a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import pytest

from headrace.api.server import MAX_HEAD_BYTES, uvicorn_config
from headrace.backends.script import Line, Piece, Script
from headrace.backends.scripted import ScriptedBackend
from headrace.config import Settings
from headrace.core.request import Request
from support.app import HELLO, MODEL, Site, listening, site, until

pytestmark = pytest.mark.anyio

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LONG = Script((Line((Piece("x" * 1000, (1,)),) * 100_000),))


class Gate:
    """Lets a backend take a number of steps, then holds it."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.taken = 0
        self.held = 0

    async def __call__(self, _request: Request, _step: int) -> None:
        if self.taken >= self.steps:
            self.held += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.held -= 1
        self.taken += 1
        await asyncio.sleep(0)


class Caller:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def head(self, length: bytes) -> None:
        request = b"POST /v1/chat/completions HTTP/1.1"
        self.writer.write(b"\r\n".join((request, b"host: h", length, b"", b"")))

    def post(self, body: object) -> None:
        content = json.dumps(body).encode()
        self.head(b"content-length: %d" % len(content))
        self.writer.write(content)

    async def status(self) -> int:
        """Reads one answer's head."""
        async with asyncio.timeout(5):
            head = await self.reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1])

    async def rest(self) -> bytes:
        async with asyncio.timeout(5):
            return await self.reader.read()

    def hang_up(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def call(url: str, *, receive_buffer: int | None = None) -> AsyncIterator[Caller]:
    address = urlsplit(url)
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
    try:
        yield Caller(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def idle(s: Site) -> bool:
    return not s.gateway._active and s.backend.load().running == 0


async def test_hanging_up_ends_a_stream() -> None:
    gate = Gate(3)
    async with site(ScriptedBackend(LONG, pace=gate)) as s, listening(s) as url:
        async with call(url) as caller:
            caller.post({**CHAT, "stream": True})
            assert await caller.status() == 200
            await until(lambda: gate.held)
            caller.hang_up()
            await until(lambda: idle(s), 2)
        assert s.backend.counters.cancelled == 1
        gate.steps += 100
        async with call(url) as caller:
            caller.post({**CHAT, "max_tokens": 1})
            assert await caller.status() == 200


async def test_hanging_up_ends_an_answer_that_is_not_streamed() -> None:
    gate = Gate(3)
    async with site(ScriptedBackend(LONG, pace=gate)) as s, listening(s) as url:
        async with call(url) as caller:
            caller.post(CHAT)
            await until(lambda: gate.held)
            caller.hang_up()
            await until(lambda: idle(s), 2)
        assert s.backend.counters.cancelled == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_leaves_the_queue(stream: bool) -> None:
    gate = Gate(3)
    async with (
        site(ScriptedBackend(LONG, pace=gate, max_running=1)) as s,
        listening(s) as url,
        call(url) as first,
        call(url) as second,
    ):
        first.post({**CHAT, "stream": True})
        await until(lambda: gate.held)
        second.post({**CHAT, "stream": stream, "user": "second"})
        await until(lambda: len(s.gateway._active) == 2)
        second.hang_up()
        await until(lambda: len(s.gateway._active) == 1, 2)
        first.hang_up()
        await until(lambda: idle(s), 2)
        assert s.backend.counters.started == 1


async def test_a_reader_that_never_reads_is_bounded_and_dropped() -> None:
    gate = Gate(10**9)
    server = {"stalled_reader_timeout": 0.3}
    async with (
        site(ScriptedBackend(LONG, pace=gate), server=server) as s,
        listening(s) as url,
        call(url, receive_buffer=4096) as sleeper,
        call(url) as other,
    ):
        sleeper.post({**CHAT, "stream": True})
        await until(lambda: gate.taken > 10)
        other.post({**CHAT, "max_tokens": 3})
        assert await other.status() == 200
        await until(lambda: s.backend.counters.cancelled == 1)
        sent = gate.taken * 1000
        assert sent < 20_000_000, "the server must not read ahead of its client"
        await until(lambda: idle(s), 2)


async def test_the_body_limit_answers_a_client_that_is_still_sending() -> None:
    async with site(server={"max_body_bytes": 100_000}) as s, listening(s) as url:
        async with call(url) as caller:
            caller.head(b"content-length: 100000000")
            assert await caller.status() == 413
            assert b"payload_too_large" in await caller.rest()
        async with call(url) as caller:
            caller.head(b"transfer-encoding: chunked")
            for _ in range(30):
                caller.writer.write(b"2710\r\n" + b" " * 10_000 + b"\r\n")
            assert await caller.status() == 413
            assert b"payload_too_large" in await caller.rest()


async def test_a_slow_body_is_timed_out() -> None:
    async with site(server={"body_timeout": 0.1}) as s, listening(s) as url, call(url) as caller:
        caller.head(b"content-length: 50")
        caller.writer.write(b"{")
        assert await caller.status() == 408
        assert b"request_timeout" in await caller.rest()


async def test_a_chunked_body_is_a_body() -> None:
    async with site(HELLO) as s, listening(s) as url, aiohttp.ClientSession() as session:

        async def parts() -> AsyncIterator[bytes]:
            for byte in json.dumps(CHAT).encode():
                yield bytes([byte])

        async with session.post(url + "/v1/chat/completions", data=parts()) as response:
            assert response.status == 200


async def test_one_connection_serves_many() -> None:
    connector = aiohttp.TCPConnector(limit=1)
    async with (
        site(HELLO) as s,
        listening(s) as url,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        ports = set()
        for body, status in ((CHAT, 200), ({}, 400), ({**CHAT, "stream": True}, 200)) * 3:
            async with session.post(url + "/v1/chat/completions", json=body) as response:
                assert response.status == status
                assert response.connection is None or response.connection.transport is not None
                if response.connection is not None and response.connection.transport is not None:
                    ports.add(response.connection.transport.get_extra_info("sockname"))
                await response.read()
        assert len(ports) == 1


async def test_a_head_without_end_is_refused() -> None:
    async with site(HELLO) as s, listening(s) as url, call(url) as caller:
        caller.writer.write(b"GET /livez HTTP/1.1\r\nhost: h\r\nx-junk: ")
        caller.writer.write(b"x" * (MAX_HEAD_BYTES + 1) + b"\r\n\r\n")
        assert await caller.status() == 400


async def test_a_long_key_is_no_error() -> None:
    async with site(server={"api_keys": ["k"]}) as s, listening(s) as url, call(url) as caller:
        caller.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: h\r\nauthorization: Bearer \xe9")
        caller.writer.write(b"x" * 100_000 + b"\r\n\r\n")
        assert await caller.status() == 401


def test_idle_connections_outlive_client_pools() -> None:
    async def app(*_args: object) -> None: ...

    settings = Settings()
    config = uvicorn_config(app, settings.server)
    assert config.timeout_keep_alive == settings.server.idle_timeout > 75
    short = Settings.model_validate({"server": {"idle_timeout": 5}})
    assert uvicorn_config(app, short.server).timeout_keep_alive == 5
    assert uvicorn_config(app, settings.server, port=1).port == 1
