"""What wraps every route: ids, sizes, times, and the last net."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import httpx2
import pytest
from prometheus_client import Gauge
from starlette.types import Message, Receive, Scope, Send

from headrace.api.middleware import BodyLimit, RequestFrame
from headrace.core.clock import SystemEntropy, VirtualClock
from support.app import refusal_of, site, until

pytestmark = pytest.mark.anyio


class Inner:
    """An app that notes what it read, and answers or breaks."""

    def __init__(self, *, breaks: str = "") -> None:
        self.body = b""
        self.after: Message | None = None
        self.called = False
        self.breaks = breaks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        self.called = True
        message = await receive()
        self.body = message["body"]
        assert not message["more_body"]
        if self.breaks == "early":
            raise ZeroDivisionError("secret")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if self.breaks == "late":
            raise ZeroDivisionError("secret")
        await send({"type": "http.response.body", "body": b"ok"})
        self.after = await receive()


class Exchange:
    """One request, message by message. After the messages the client is silent, or gone."""

    def __init__(self, *messages: Message, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.messages = list(messages)
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": list(headers),
        }

    async def receive(self) -> Message:
        if self.messages:
            return self.messages.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def limited(inner: Inner, exchange: Exchange, *, size: int = 10, time: float = 60) -> None:
    async with asyncio.timeout(10):
        app = BodyLimit(inner, max_bytes=size, timeout=time)
        await app(exchange.scope, exchange.receive, exchange.send)


async def test_a_body_in_pieces_arrives_whole() -> None:
    inner, exchange = Inner(), Exchange(part(b"01234"), part(b"5678"), part(b"9", more=False))
    exchange.gone.set()
    await limited(inner, exchange)
    assert inner.body == b"0123456789"
    assert inner.after == {"type": "http.disconnect"}


async def test_a_declared_length_is_refused_unread() -> None:
    inner, exchange = Inner(), Exchange(headers=[(b"content-length", b"11")])
    task = asyncio.create_task(limited(inner, exchange))
    await anyio.wait_all_tasks_blocked()
    assert exchange.status == 413
    assert dict(exchange.sent[0]["headers"])[b"connection"] == b"close"
    assert exchange.sent[1]["more_body"]
    exchange.gone.set()
    await task
    assert not exchange.sent[-1]["more_body"]
    assert not inner.called


async def test_an_undeclared_length_is_refused_as_soon_as_it_shows() -> None:
    flood = [part(b"x" * 8) for _ in range(1000)]
    inner, exchange = Inner(), Exchange(*flood)
    task = asyncio.create_task(limited(inner, exchange))
    exchange.gone.set()
    await task
    assert exchange.status == 413
    assert not inner.called


async def test_the_largest_body_is_taken() -> None:
    inner = Inner()
    exchange = Exchange(part(b"0123456789", more=False), headers=[(b"content-length", b"10")])
    exchange.gone.set()
    await limited(inner, exchange)
    assert exchange.status == 200


async def test_a_body_that_does_not_end_is_timed_out() -> None:
    inner, exchange = Inner(), Exchange(part(b"0"))
    task = asyncio.create_task(limited(inner, exchange, time=0.02))
    await until(lambda: exchange.sent)  # without the client's doing
    exchange.gone.set()
    await task
    assert exchange.status == 408
    assert not inner.called


async def test_a_client_that_leaves_while_sending_is_not_answered() -> None:
    inner, exchange = Inner(), Exchange(part(b"0"))
    exchange.gone.set()
    await limited(inner, exchange)
    assert exchange.sent == []
    assert not inner.called


async def framed(inner: Inner, exchange: Exchange, clock: VirtualClock | None = None) -> Gauge:
    exchange.messages.append(part(b"", more=False))
    exchange.gone.set()
    gauge = Gauge("in_flight", "", registry=None)
    app = RequestFrame(inner, clock or VirtualClock(), SystemEntropy(), gauge)
    await app(exchange.scope, exchange.receive, exchange.send)
    return gauge


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"abc-123_.:/+=", True),
        (b"a" * 128, True),
        (b"a" * 129, False),
        (b"", False),
        (b"a b", False),
        (b"\xff", False),
        (b"a\nb", False),
        (None, False),
    ],
)
async def test_request_ids(given: bytes | None, kept: bool) -> None:
    exchange = Exchange(headers=[] if given is None else [(b"x-request-id", given)])
    gauge = await framed(Inner(), exchange)
    headers = dict(exchange.sent[0]["headers"])
    assert (headers[b"x-request-id"] == given) is kept
    assert kept or headers[b"x-request-id"].startswith(b"req_")
    assert exchange.scope["state"]["request_id"].encode() == headers[b"x-request-id"]
    assert headers[b"openai-version"] == b"2020-10-01"
    assert next(iter(gauge.collect())).samples[0].value == 0


async def test_processing_time_is_until_the_headers() -> None:
    clock = VirtualClock()
    inner, exchange = Inner(), Exchange()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        clock.advance(1.25)
        await inner(scope, receive, send)

    exchange.messages.append(part(b"", more=False))
    exchange.gone.set()
    gauge = Gauge("in_flight", "", registry=None)
    app = RequestFrame(slow, clock, SystemEntropy(), gauge)
    await app(exchange.scope, exchange.receive, exchange.send)
    assert dict(exchange.sent[0]["headers"])[b"openai-processing-ms"] == b"1250"


async def test_an_unforeseen_fault_is_a_plain_500(caplog: pytest.LogCaptureFixture) -> None:
    exchange = Exchange(headers=[(b"x-request-id", b"id-7")])
    await framed(Inner(breaks="early"), exchange)
    assert exchange.status == 500
    assert b"secret" not in exchange.sent[1]["body"]
    assert b"ZeroDivision" not in exchange.sent[1]["body"]
    assert "id-7" in caplog.text


async def test_a_fault_in_mid_answer_is_the_servers_to_end() -> None:
    with pytest.raises(ZeroDivisionError):
        await framed(Inner(breaks="late"), Exchange())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/nothing"])
async def test_size_and_id_hold_for_the_whole_app(path: str) -> None:
    async def flood() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    async with site(server={"max_body_bytes": 5000}) as s:
        declared = await s.client.post(path, content=b"x" * 5001)
        assert refusal_of(declared, 413)["code"] == "payload_too_large"
        undeclared = await s.client.post(path, content=flood())
        assert refusal_of(undeclared, 413)["code"] == "payload_too_large"
        assert declared.headers["x-request-id"]
        unknown = await s.client.post("/nothing", content=b"{}", headers={"x-request-id": "r1"})
        refusal_of(unknown, 404)
        assert unknown.headers["x-request-id"] == "r1"


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("credentials", [False, True])
async def test_browsers_of_listed_origins(credentials: bool) -> None:
    cors: dict[str, Any] = {"origins": ["https://app.example"], "credentials": credentials}
    server = {"api_keys": ["k"], "cors": cors}
    async with site(server=server) as s:
        ours, theirs = {"origin": "https://app.example"}, {"origin": "https://evil.example"}
        url = "/v1/chat/completions"
        preflight = await s.client.options(url, headers={**ours, **PREFLIGHT})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert "POST" in preflight.headers["access-control-allow-methods"]
        refused = await s.client.post(url, json={}, headers=ours)
        refusal_of(refused, 401)
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        allowed = refused.headers.get("access-control-allow-credentials")
        assert allowed == ("true" if credentials else None)
        other = await s.client.options(url, headers={**theirs, **PREFLIGHT})
        assert other.status_code != 401
        for response in (other, await s.client.post(url, json={}, headers=theirs)):
            assert "access-control-allow-origin" not in response.headers


async def test_browsers_of_any_origin_come_without_cookies() -> None:
    async with site(server={"api_keys": ["k"]}) as s:
        origin = {"origin": "https://any.example"}
        responses: list[httpx2.Response] = [
            await s.client.options("/v1/models", headers={**origin, **PREFLIGHT}),
            await s.client.get("/v1/models", headers=origin),
        ]
        assert [response.status_code for response in responses] == [200, 401]
        for response in responses:
            assert response.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in response.headers
