"""How both generation endpoints refuse and fail, end to end."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from headrace.backends.base import Capabilities
from headrace.backends.script import Line, Script, pieces
from headrace.backends.scripted import ScriptedBackend
from headrace.core.errors import BackendFailed, DeadlineExceeded, Overloaded, QuotaExceeded
from headrace.core.events import FinishReason
from headrace.core.request import Endpoint
from support.app import HELLO, Site, events_of, refusal_of, site, text_of

pytestmark = pytest.mark.anyio

TWO = Script((Line(pieces("a", "b")), Line(pieces(*"cdefgh"), FinishReason.LENGTH)))
EMOJI = "\U0001f600".encode()
SPLIT = Script((Line(pieces("x", EMOJI[:1], EMOJI[1:3], EMOJI[3:], " y")),))


async def ask(s: Site, endpoint: str, **fields: Any) -> httpx2.Response:
    return await (s.chat(**fields) if endpoint == "chat" else s.complete(**fields))


ENDPOINTS = pytest.mark.parametrize("endpoint", ["chat", "completions"])


@ENDPOINTS
@pytest.mark.parametrize("n", [0, -1, 99])
async def test_a_bad_stream_is_refused_as_json(endpoint: str, n: int) -> None:
    async with site() as s:
        error = refusal_of(await ask(s, endpoint, stream=True, n=n), 400)
        assert error["param"] == "n"


@ENDPOINTS
@pytest.mark.parametrize("error", [BackendFailed("It broke."), ZeroDivisionError("secret")])
async def test_a_failure_after_three_tokens(endpoint: str, error: Exception) -> None:
    script = Script((Line(pieces(*"abcdef")),), fail=error, fail_after=3)
    async with site(script) as s:
        response = await ask(s, endpoint, stream=True)
        assert response.status_code == 200
        *said, last = events_of(response.text)
        assert text_of([json.loads(event) for event in said]) == "abc"
        body = json.loads(last)
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == "backend_failed"
        for word in ("[DONE]", "secret", "ZeroDivision", "Traceback", '"stop"'):
            assert word not in response.text
        refusal_of(await ask(s, endpoint), 500)


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (Overloaded("Full.", retry_after_s=1.5), 503, ("2", "1500")),
        (QuotaExceeded("Too many.", retry_after_s=0.02), 429, ("1", "20")),
        (DeadlineExceeded("Too late."), 504, (None, None)),
    ],
)
async def test_a_refusal_is_a_status_in_both_modes(
    endpoint: str,
    stream: bool,
    error: Exception,
    status: int,
    headers: tuple[str | None, str | None],
) -> None:
    async with site(Script((), refuse=error)) as s:
        response = await ask(s, endpoint, stream=stream)
        refusal_of(response, status)
        found = (response.headers.get("retry-after"), response.headers.get("retry-after-ms"))
        assert found == headers


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "model",
    ["nope", "../../etc/passwd", "..%2f", "/abs", "http://127.0.0.1/x", "org/unknown", "a\0b"],
)
async def test_unknown_models_are_404(endpoint: str, stream: bool, model: str) -> None:
    async with site() as s:
        before = (await s.client.get("/metrics")).text.count("model_name")
        error = refusal_of(await ask(s, endpoint, model=model, stream=stream), 404)
        assert error["code"] == "model_not_found"
        assert (await s.client.get("/metrics")).text.count("model_name") == before


@ENDPOINTS
@pytest.mark.parametrize("model", ["", None, 5, "m" * 10_000])
async def test_no_models_are_400(endpoint: str, model: Any) -> None:
    async with site() as s:
        error = refusal_of(await ask(s, endpoint, model=model), 400)
        assert error["param"] == "model"
        assert "mmmm" not in error["message"]


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_for_the_context(endpoint: str, stream: bool) -> None:
    async with site(ScriptedBackend(HELLO, context_length=128)) as s:
        for prompt, limit in (("x" * 200, 1), ("x" * 120, 20)):
            fields = {"content" if endpoint == "chat" else "prompt": prompt}
            response = await ask(s, endpoint, **fields, max_tokens=limit, stream=stream)
            assert refusal_of(response, 400)["code"] == "context_length_exceeded"
        ids = [65] * 127
        assert (await s.complete(ids, max_tokens=1, stream=stream)).status_code == 200
        response = await s.complete([*ids, 65], max_tokens=1, stream=stream)
        error = refusal_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert "128" in error["message"]


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"999999999": 5}}, "logit_bias"),
        ({"logit_bias": {"260": 5}}, "logit_bias"),
        ({"stop_token_ids": [260]}, "stop_token_ids"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
async def test_what_only_the_model_can_refuse(
    endpoint: str, stream: bool, fields: dict[str, Any], param: str
) -> None:
    async with site() as s:
        assert refusal_of(await ask(s, endpoint, stream=stream, **fields), 400)["param"] == param
        assert s.backend.counters.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_are_refused_by_name(stream: bool) -> None:
    async with site() as s:
        response = await s.chat(tools=[{"type": "function"}], stream=stream)
        error = refusal_of(response, 400)
        assert (error["param"], error["code"]) == ("tools", "unsupported_field")


async def test_a_backend_with_fewer_abilities() -> None:
    able = Capabilities(frozenset({Endpoint.CHAT}), frozenset())
    async with site(ScriptedBackend(HELLO, capabilities=able)) as s:
        assert refusal_of(await s.chat(n=2), 400)["param"] == "n"
        assert refusal_of(await s.chat(logprobs=True), 400)["param"] == "logprobs"
        refusal_of(await s.complete(), 400)
        assert (await s.chat()).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("POST", "/", 404), ("GET", "/v1/chat/completions", 405)],
)
async def test_paths_and_methods(method: str, path: str, status: int) -> None:
    async with site() as s:
        refusal_of(await s.client.request(method, path), status)


async def test_the_body_of_a_refusal_names_no_values() -> None:
    async with site() as s:
        response = await s.chat(temperature="SECRET", user=["SECRET"])
        refusal_of(response, 400)
        assert "SECRET" not in response.text
