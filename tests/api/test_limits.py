"""The rate limit headers, and the count of every call of a generation endpoint."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import httpx2
import pytest

from headrace.api.generation import LIMIT_HEADERS, GenerationCalls
from headrace.backends.script import Script
from headrace.backends.scripted import ScriptedBackend
from headrace.core.errors import BackendFailed, Overloaded, QuotaExceeded
from headrace.gateway import DEFAULT_TENANT
from support.app import HELLO, MODEL, Site, listening, refusal_of, site, until
from support.gateway import outcomes
from support.overseen import Limits, OverseenGateway

pytestmark = pytest.mark.anyio

PATHS = ("/v1/chat/completions", "/v1/completions")
ENDPOINTS = pytest.mark.parametrize("endpoint", ["chat", "complete"])
BOTH = pytest.mark.parametrize("stream", [False, True])


def limits_of(response: httpx2.Response) -> dict[str, str]:
    return {k: v for k, v in response.headers.items() if k.startswith("x-ratelimit-")}


ONE_TAKEN = {
    "x-ratelimit-limit-requests": "10",
    "x-ratelimit-remaining-requests": "9",
    "x-ratelimit-reset-requests": "6s",
}
NONE_TAKEN = {
    "x-ratelimit-limit-requests": "10",
    "x-ratelimit-remaining-requests": "10",
    "x-ratelimit-reset-requests": "0s",
}


@ENDPOINTS
@BOTH
async def test_answers_tell_what_is_left_after_them(endpoint: str, stream: bool) -> None:
    async with site(kind=OverseenGateway) as s:
        assert limits_of(await getattr(s, endpoint)(stream=stream)) == ONE_TAKEN
        second = await getattr(s, endpoint)(stream=stream)
        assert second.headers["x-ratelimit-remaining-requests"] == "8"
        assert second.headers["x-ratelimit-reset-requests"] == "12s"


@ENDPOINTS
@BOTH
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QuotaExceeded("Too many.", retry_after_s=3), 429),
        (Overloaded("Full."), 503),
        (BackendFailed("Broke."), 500),
        (ZeroDivisionError("secret"), 500),
    ],
)
async def test_refusals_and_failures_tell_it_too(
    endpoint: str, stream: bool, error: Exception, status: int
) -> None:
    async with site(Script((), refuse=error), kind=OverseenGateway) as s:
        response = await getattr(s, endpoint)(stream=stream)
        refusal_of(response, status)
        assert limits_of(response) == ONE_TAKEN


async def test_so_do_refusals_of_the_edge_which_take_nothing() -> None:
    async with site(server={"max_body_bytes": 1000}, kind=OverseenGateway) as s:
        for response in (
            await s.chat(n=0),
            await s.chat(model="nope"),
            await s.post(PATHS[0], b"{"),
            await s.chat("x" * 2000),
        ):
            assert response.status_code in {400, 404, 413}
            assert limits_of(response) == NONE_TAKEN


async def test_a_fault_of_ours_tells_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(kind=OverseenGateway) as s:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(s.gateway, "model", broken)
        response = await s.chat()
        refusal_of(response, 500)
        assert limits_of(response) == NONE_TAKEN
        assert outcomes(s.gateway) == {"failed": 1}


async def test_nobody_else_gets_them() -> None:
    async with site(server={"api_keys": ["sk-1"]}, kind=OverseenGateway) as s:
        assert limits_of(await s.chat()) == {}, "401: whose limits?"
        s.client.headers["authorization"] = "Bearer sk-1"
        for path in ("/v1/models", "/livez", "/scheduler/queue", PATHS[0]):
            assert limits_of(await s.client.get(path)) == {}
        assert limits_of(await s.chat()) == ONE_TAKEN
        assert set(cast("OverseenGateway", s.gateway).asked) == {"key-1"}


async def test_without_limits_there_are_none() -> None:
    async with site(kind=OverseenGateway) as s:
        cast("OverseenGateway", s.gateway).limited = False
        assert limits_of(await s.chat()) == {}


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        (Limits(), {}),
        (Limits(limit_tokens=5), {"x-ratelimit-limit-tokens": "5"}),
        (
            Limits(60, 59.9, 0.02, 1000, -0.5, 360.0),
            {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-remaining-requests": "59",
                "x-ratelimit-reset-requests": "20ms",
                "x-ratelimit-limit-tokens": "1000",
                "x-ratelimit-remaining-tokens": "0",
                "x-ratelimit-reset-tokens": "6m0s",
            },
        ),
    ],
)
async def test_each_limit_has_three_headers(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, wanted: dict[str, str]
) -> None:
    async with site(kind=OverseenGateway) as s:
        monkeypatch.setattr(s.gateway, "ratelimit", lambda _tenant: limits)
        scope = {"path": PATHS[0], "method": "POST", "state": {"tenant": DEFAULT_TENANT}}
        headers = GenerationCalls(s.gateway).headers(scope)
        assert {k.decode(): v.decode() for k, v in headers} == wanted
        assert set(wanted) <= set(LIMIT_HEADERS)


async def test_browsers_may_read_them() -> None:
    async with site(kind=OverseenGateway) as s:
        response = await s.client.post(
            PATHS[0],
            json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
            headers={"origin": "https://app.example"},
        )
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {*LIMIT_HEADERS, "server-timing"} <= set(exposed)


# Counting.


async def counted(s: Site, *calls: Any) -> dict[str, float]:
    for call in calls:
        await call
    return outcomes(s.gateway)


@ENDPOINTS
async def test_every_refusal_of_the_edge_is_counted_once(endpoint: str) -> None:
    server = {"api_keys": ["sk-1"], "max_body_bytes": 1000}
    async with site(server=server) as s:
        ask = getattr(s, endpoint)
        assert await counted(s, ask(), ask(stream=True)) == {"refused_unauthorized": 2}
        s.client.headers["authorization"] = "Bearer sk-1"
        path = PATHS[endpoint == "complete"]
        twice = [(b"x-priority", b"1"), (b"x-priority", b"2")]
        await s.client.post(path, json={"model": MODEL}, headers=twice)
        await counted(
            s,
            ask(n=0),
            ask(temperature="SECRET"),
            s.post(path, b"{"),
            s.post(path, b'{"model": "SECRET"}'),
            ask(model="SECRET"),
            ask(model="SECRET", stream=True),
            ask("x" * 2000),
        )
        assert outcomes(s.gateway) == {
            "refused_unauthorized": 2,
            "refused_invalid": 5,
            "refused_model_not_found": 2,
            "refused_too_large": 1,
        }
        assert b"SECRET" not in s.gateway.exposition()


@ENDPOINTS
@BOTH
async def test_what_the_gateway_refuses_is_not_counted_twice(endpoint: str, stream: bool) -> None:
    async with site(Script(HELLO.lines, refuse=Overloaded("Full."))) as s:
        ask = getattr(s, endpoint)
        assert await counted(s, ask(stream=stream)) == {"refused_overloaded": 1}
        await ask(logit_bias={"99999": 1}, stream=stream)
        assert outcomes(s.gateway) == {"refused_overloaded": 1, "refused_invalid": 1}


async def test_answers_are_counted_once_for_each_prompt() -> None:
    async with site() as s:
        found = await counted(s, s.chat(), s.complete(stream=True), s.complete(["a", "b"]))
        assert found == {"stop": 4}


async def test_other_endpoints_and_methods_are_not_counted() -> None:
    async with site(server={"api_keys": ["sk-1"]}) as s:
        await s.client.get("/v1/models")
        await s.client.get(PATHS[0])
        s.client.headers["authorization"] = "Bearer sk-1"
        await s.client.get("/nothing")
        await s.client.get(PATHS[0])
        await s.client.post("/tokenize", json={"model": "nope", "prompt": "x"})
        assert outcomes(s.gateway) == {}


async def test_a_body_that_does_not_come_is_counted_by_its_end() -> None:
    async with site(server={"body_timeout": 0.05}) as s, listening(s) as url:
        host, port = re.findall(r"//(.+):(\d+)", url)[0]
        head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n".encode()
        _, slow = await asyncio.open_connection(host, int(port))
        slow.write(head)
        await until(lambda: outcomes(s.gateway).get("refused_body_timeout"))
        slow.close()
    async with site() as s, listening(s) as url:
        host, port = re.findall(r"//(.+):(\d+)", url)[0]
        _, gone = await asyncio.open_connection(host, int(port))
        gone.write(head)
        await until(
            lambda: "headrace_http_requests_in_flight 1.0" in s.gateway.exposition().decode()
        )
        gone.close()
        await until(lambda: outcomes(s.gateway).get("cancelled"))
        assert outcomes(s.gateway) == {"cancelled": 1}


@BOTH
async def test_a_client_that_leaves_is_the_gateways_to_count(stream: bool) -> None:
    async def pace(_request: object, step: int) -> None:
        if step == 1:
            await asyncio.Event().wait()

    async with site(ScriptedBackend(pace=pace)) as s:
        async with listening(s) as url, httpx2.AsyncClient(base_url=url) as client:
            body = {"model": MODEL, "prompt": "x", "stream": stream}
            call = asyncio.create_task(client.post(PATHS[1], json=body))
            await until(lambda: s.backend.counters.started)
            call.cancel()
            await asyncio.wait([call])
            await until(lambda: outcomes(s.gateway).get("cancelled"))
        assert outcomes(s.gateway) == {"cancelled": 1}
