"""Signals, crashes and silence, on servers of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import aiohttp
import pytest

from support.server import Server, alive, serve

pytestmark = [pytest.mark.model, pytest.mark.anyio, pytest.mark.timeout(180)]

BODY = {
    "model": "smollm2-135m-instruct",
    "prompt": "Once upon a time",
    "ignore_eos": True,
    "stream": True,
}


async def read_events(response: aiohttp.ClientResponse) -> list[str]:
    raw = (await response.read()).decode()
    return [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: ")]


async def eventually_status(server: Server, path: str, expected: int, limit: float) -> float:
    """Seconds until `path` answers with `expected`."""
    start = time.monotonic()
    while await asyncio.to_thread(server.status, path) != expected:
        assert time.monotonic() - start < limit, f"{path} never became {expected}"
    return time.monotonic() - start


async def test_sigterm_lets_a_running_stream_finish(tmp_path: Path) -> None:
    with serve(tmp_path / "log") as server:
        async with (
            aiohttp.ClientSession(server.url) as session,
            session.post("/v1/completions", json={**BODY, "max_tokens": 100}) as running,
        ):
            await running.content.readline()
            server.process.send_signal(signal.SIGTERM)
            await eventually_status(server, "/readyz", 503, 2)
            async with session.post("/v1/completions", json={**BODY, "max_tokens": 4}) as late:
                assert late.status == 503
                assert "Retry-After" in late.headers
            events = await read_events(running)
            assert events[-1] == "[DONE]"
        assert await asyncio.to_thread(server.process.wait, 10) == 0


async def test_a_short_grace_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    with serve(tmp_path / "log", env={"HEADRACE__SERVER__DRAIN_TIMEOUT": "1"}) as server:
        async with (
            aiohttp.ClientSession(server.url) as session,
            session.post("/v1/completions", json={**BODY, "max_tokens": 2000}) as running,
        ):
            await running.content.readline()
            server.process.send_signal(signal.SIGTERM)
            events = await read_events(running)
        assert "error" in json.loads(events[-1])
        assert await asyncio.to_thread(server.process.wait, 10) == 0


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with serve(tmp_path / "log") as server:
        engine = server.engine_pid()
        async with (
            aiohttp.ClientSession(server.url) as session,
            session.post("/v1/completions", json={**BODY, "max_tokens": 2000}) as running,
        ):
            await running.content.readline()
            server.process.send_signal(signal.SIGTERM)
            await eventually_status(server, "/readyz", 503, 2)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.process.wait, 5)
        assert not alive(engine)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP], ids=["crash", "hang"])
async def test_a_dead_engine_is_told_and_replaced(tmp_path: Path, kind: signal.Signals) -> None:
    with serve(tmp_path / "log", env={"HEADRACE__ENGINE__HANG_TIMEOUT": "2"}) as server:
        engine = server.engine_pid()
        async with aiohttp.ClientSession(server.url) as session:
            async with session.post("/v1/completions", json={**BODY, "max_tokens": 2000}) as run:
                await run.content.readline()
                os.kill(engine, kind)
                events = await read_events(run)
            error = json.loads(events[-1])["error"]
            assert error["type"] == "server_error"
            assert "Traceback" not in error["message"]
            assert server.status("/livez") == 200
            assert server.status("/readyz") == 503
            async with session.post("/v1/completions", json={**BODY, "max_tokens": 4}) as refused:
                assert refused.status == 503
                assert "Retry-After" in refused.headers
            await eventually_status(server, "/readyz", 200, 60)
            async with session.post("/v1/completions", json={**BODY, "max_tokens": 4}) as again:
                assert (await read_events(again))[-1] == "[DONE]"
        assert not alive(engine)
        server.settle()


async def test_the_engine_goes_when_the_front_is_killed(tmp_path: Path) -> None:
    with serve(tmp_path / "log") as server:
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 10
        while alive(engine):
            assert time.monotonic() < deadline, "the engine outlived its front"
