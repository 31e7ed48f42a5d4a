"""How urgent, for whom and until when: headers and fields as they reach the gateway."""

from __future__ import annotations

from typing import Any, cast

import httpx2
import pytest

from headrace.gateway.claims import Terms
from support.app import MODEL, Site, refusal_of, site
from support.overseen import OverseenGateway

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
}
PATHS = pytest.mark.parametrize("path", BODIES)


async def ask(s: Site, path: str, headers: Any = None, **fields: Any) -> httpx2.Response:
    return await s.client.post(path, json={**BODIES[path], **fields}, headers=headers)


async def terms(path: str, headers: Any = None, **fields: Any) -> Terms:
    async with site(kind=OverseenGateway) as s:
        assert (await ask(s, path, headers, **fields)).status_code == 200
        (found,) = cast("OverseenGateway", s.gateway).terms
        return found


@PATHS
async def test_without_any_there_are_the_defaults(path: str) -> None:
    assert await terms(path) == Terms()
    assert await terms(path, priority=None, timeout=None) == Terms()


@PATHS
async def test_all_of_them_at_once(path: str) -> None:
    headers = {
        "X-Priority": "interactive",
        "x-gateway-inference-objective": "batch",
        "x-gateway-inference-fairness-id": "team/7",
        "X-Request-Timeout": " 2.5 ",
    }
    found = await terms(path, headers, priority=-3)
    assert found == Terms(-3, "interactive", "batch", "team/7", 2.5)


async def test_each_prompt_has_the_terms_of_the_call() -> None:
    async with site(kind=OverseenGateway) as s:
        response = await s.complete(["a", "b", "c"], priority=2, timeout=9)
        assert response.status_code == 200
        wanted = Terms(priority=2, timeout_s=9.0)
        assert cast("OverseenGateway", s.gateway).terms == [wanted] * 3


@pytest.mark.parametrize(
    ("header", "field", "wanted"),
    [
        ("5", None, 5.0),
        (None, 5, 5.0),
        (None, 0.25, 0.25),
        ("10", 3, 3.0),
        ("3", 10, 3.0),
        (".5", None, 0.5),
        ("7.", None, 7.0),
    ],
)
async def test_of_two_timeouts_the_shorter_one_counts(
    header: str | None, field: float | None, wanted: float
) -> None:
    headers = {} if header is None else {"x-request-timeout": header}
    found = await terms("/v1/completions", headers, timeout=field)
    assert found.timeout_s == wanted


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", "5"),
        ("timeout", True),
        ("timeout", [5]),
        ("timeout", 1e300),
        ("priority", 1.5),
        ("priority", "high"),
        ("priority", True),
        ("priority", 2**31),
        ("priority", -(2**31) - 1),
    ],
)
async def test_malformed_fields_are_named(
    path: str, stream: bool, field: str, value: object
) -> None:
    async with site(kind=OverseenGateway) as s:
        response = await ask(s, path, stream=stream, **{field: value})
        assert refusal_of(response, 400)["param"] == field
        assert cast("OverseenGateway", s.gateway).terms == []


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("X-Request-Timeout", value)
            for value in (b"", b"0", b"0.0", b"-1", b"soon", b"nan", b"inf", b"1e3", b"5s", b"1,5")
        ),
        ("X-Request-Timeout", b"\xb2"),
        ("X-Request-Timeout", b"."),
        ("X-Request-Timeout", b"9" * 15),
        ("X-Request-Timeout", b"9" * 10_000),
        *(
            (name, value)
            for name in (
                "X-Priority",
                "x-gateway-inference-objective",
                "x-gateway-inference-fairness-id",
            )
            for value in (b"", b"a b", b"caf\xe9", b"x" * 129, b"a\x01b")
        ),
    ],
)
async def test_malformed_headers_are_named(
    path: str, stream: bool, name: str, value: bytes
) -> None:
    async with site(kind=OverseenGateway) as s:
        response = await ask(s, path, [(name.encode(), value)], stream=stream)
        error = refusal_of(response, 400)
        assert error["param"] == name
        assert name in error["message"]
        assert cast("OverseenGateway", s.gateway).terms == []


@pytest.mark.parametrize("name", ["X-Priority", "X-Request-Timeout"])
async def test_a_header_that_comes_twice_is_refused(name: str) -> None:
    async with site(kind=OverseenGateway) as s:
        response = await ask(s, "/v1/completions", [(name, "1"), (name.lower(), "2")])
        assert refusal_of(response, 400)["param"] == name


async def test_the_docs_name_the_headers() -> None:
    async with site() as s:
        spec = (await s.client.get("/openapi.json")).json()
        for path in BODIES:
            operation = spec["paths"][path]["post"]
            assert {p["name"] for p in operation["parameters"] if p["in"] == "header"} == {
                "X-Priority",
                "X-Request-Timeout",
                "x-gateway-inference-objective",
                "x-gateway-inference-fairness-id",
                "Cache-Control",
                "x-cache-mode",
                "x-cache-ttl",
                "x-cache-namespace",
                "x-cache-min-similarity",
                "x-cache-tags",
            }
            body = operation["requestBody"]["content"]["application/json"]["schema"]
            assert {"priority", "timeout"} <= set(body["properties"])
