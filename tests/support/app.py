"""The app over a scripted backend: in process, or on a socket of its own."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI

from headrace.api import create_app
from headrace.api.server import uvicorn_config
from headrace.backends.script import Line, Script, pieces
from headrace.backends.scripted import ScriptedBackend
from headrace.caching import ResponseCache
from headrace.caching.semantic.base import LocalEmbedder
from headrace.config import Settings
from headrace.core.clock import Clock, SystemClock
from headrace.gateway import Gateway
from headrace.telemetry import Metrics

MODEL = "scripted"
HELLO = Script((Line(pieces("Hel", "lo", " world")),))


@dataclass(frozen=True)
class Site:
    """A served backend and a client of it."""

    client: httpx2.AsyncClient
    gateway: Gateway
    app: FastAPI
    backend: ScriptedBackend
    settings: Settings

    async def chat(self, content: Any = "hi", **fields: Any) -> httpx2.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx2.Response:
        body = {"model": MODEL, "prompt": prompt, **fields}
        return await self.client.post("/v1/completions", json=body)

    async def post(self, path: str, content: bytes, **headers: str) -> httpx2.Response:
        headers = {"content-type": "application/json", **headers}
        return await self.client.post(path, content=content, headers=headers)


@asynccontextmanager
async def site(
    backend: ScriptedBackend | Script = HELLO,
    *,
    server: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    cache: ResponseCache | None = None,
    embedders: Mapping[str, LocalEmbedder] | None = None,
    started: bool = True,
    kind: type[Gateway] = Gateway,
    address: tuple[str, int] = ("127.0.0.1", 123),
    host: str = "test",
) -> AsyncIterator[Site]:
    """In process, without sockets: answers arrive whole. `address` is the client's, `host` what it
    calls the server."""
    if isinstance(backend, Script):
        backend = ScriptedBackend(backend)
    clock = clock or SystemClock()
    settings = Settings.model_validate({"server": server or {}, "limits": limits or {}})
    gateway = kind(
        [backend], settings, clock=clock, metrics=Metrics(), cache=cache, embedders=embedders
    )
    app = create_app(gateway, settings, clock=clock, version="1", manage_gateway=False)
    if started:
        await gateway.start()
    transport = httpx2.ASGITransport(app, client=address)
    try:
        async with httpx2.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            yield Site(client, gateway, app, backend, settings)
    finally:
        await gateway.close()


class _Quiet(uvicorn.Server):
    """Leaves the signals to the test run."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(inner: Site, **overrides: Any) -> AsyncIterator[str]:
    """The site's app on a loopback port; its URL."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(256)
        config = uvicorn_config(
            inner.app,
            inner.settings.server,
            loop="none",
            lifespan="off",
            timeout_graceful_shutdown=1,
            **overrides,
        )
        server = _Quiet(config)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait({task})


def events_of(body: str) -> list[str]:
    """The data of each server-sent event, by the letter: one data line and a blank one each."""
    found = []
    blocks = body.split("\n\n")
    assert blocks.pop() == "", "the body ends after an event"
    for block in blocks:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        assert len(lines) == 1, block
        assert lines[0].startswith("data: ")
        found.append(lines[0].removeprefix("data: "))
    return found


def chunks_of(body: str) -> list[dict[str, Any]]:
    """The JSON objects of a complete stream."""
    *events, last = events_of(body)
    assert last == "[DONE]"
    assert "[DONE]" not in events
    return [json.loads(event) for event in events]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """What a client puts together for one choice."""
    text = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


def refusal_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error object of a refusal, whose shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()
    assert set(body) == {"error"}
    more = {"reason", "queue_position", "retry_after_ms"}
    assert set(body["error"]) - more == {"message", "type", "param", "code"}
    assert None not in [body["error"].get(name, 0) for name in more]
    waits = response.headers.get("retry-after-ms")
    assert body["error"].get("retry_after_ms") == (None if waits is None else int(waits))
    assert "Traceback" not in response.text
    assert "Error" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


async def until(condition: Any, limit: float = 5.0) -> None:
    """Returns once `condition()` is true, letting other tasks run in between."""
    async with asyncio.timeout(limit):
        while not condition():  # noqa: ASYNC110 - anything may make it true
            await asyncio.sleep(0)
