"""Bodies that are not what they should be."""

from __future__ import annotations

import json

import pytest

from headrace.api.body import parse_object
from headrace.core.errors import InvalidRequest
from support.app import MODEL, refusal_of, site

pytestmark = pytest.mark.anyio

NESTED = b"[" * 20_000 + b"]" * 20_000
CHAT = b'{"model":"scripted","messages":[{"role":"user","content":%s}],"stream":%s%s}'


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize(
    ("content", "more"),
    [
        pytest.param(rb'"\ud800"', b"", id="lone surrogate"),
        pytest.param(rb'"\udc00\ud800"', b"", id="swapped pair"),
        pytest.param(b'"\xff"', b"", id="byte that is not UTF-8"),
        pytest.param(b'"hi"', rb',"stop":"\ud800"', id="lone surrogate in stop"),
        pytest.param(b'"hi"', rb',"ignored":"\ud800"', id="lone surrogate in an ignored field"),
        pytest.param(b'"hi"', b',"temperature":NaN', id="NaN"),
        pytest.param(b'"hi"', b',"temperature":1e400', id="infinite number"),
        pytest.param(b'"hi"', b',"temperature":-Infinity', id="Infinity"),
        pytest.param(b'"hi"', b',"n":1,"n":1', id="key twice"),
        pytest.param(b'"hi"', b',"metadata":{"a":1,"\\u0061":2}', id="key twice, spelt apart"),
        pytest.param(NESTED, b"", id="nested content"),
        pytest.param(b'"hi"', b',"ignored":' + NESTED, id="nested ignored field"),
        pytest.param(b'"hi"', b',"seed":' + b"9" * 5000, id="very long number"),
        pytest.param(b'"hi"', b"}", id="trailing text"),
    ],
)
async def test_broken_json_is_400_before_anything_runs(
    content: bytes, more: bytes, stream: bytes
) -> None:
    async with site() as s:
        response = await s.post("/v1/chat/completions", CHAT % (content, stream, more))
        assert refusal_of(response, 400)["code"] == "invalid_json"
        assert s.backend.counters.requests == []


@pytest.mark.parametrize(
    "body", [b"", b"hi", b"[]", b"null", b'"a"', b"1", b"\x00", b"\xef\xbb\xbf{}"]
)
async def test_what_is_no_object_is_400(body: bytes) -> None:
    async with site() as s:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            refusal_of(await s.post(path, body), 400)


async def test_a_surrogate_pair_is_an_emoji() -> None:
    async with site() as s:
        response = await s.post("/v1/chat/completions", CHAT % (rb'"\ud83d\ude00"', b"false", b""))
        assert response.status_code == 200
        messages = s.backend.counters.requests[0].messages
        assert messages is not None
        assert messages[0].content == "\U0001f600"


async def test_a_long_body_is_parsed_to_the_same_request() -> None:
    text = "word " * 100_000
    async with site(server={"max_body_bytes": 10**6}) as s:
        response = await s.post("/tokenize", json.dumps({"prompt": text}).encode())
        assert response.json()["count"] == len(text) + 1
        broken = json.dumps({"prompt": text, "model": 1}).encode()
        assert refusal_of(await s.post("/tokenize", broken), 400)["param"] == "model"


async def test_many_faults_are_one_complaint() -> None:
    body = json.dumps({"model": MODEL, "messages": [1] * 300_000}).encode()
    async with site() as s:
        error = refusal_of(await s.post("/v1/chat/completions", body), 400)
        assert error["param"] == "messages.0"
        assert error["message"] == "'messages.0' should be an object."


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_web_page_cannot_post_without_asking_first(kind: str) -> None:
    body = CHAT % (b'"hi"', b"false", b"")
    headers = {"content-type": kind, "origin": "http://evil.example"}
    async with site() as s:
        refusal_of(await s.post("/v1/chat/completions", body, **headers), 400)
        del headers["origin"]
        assert (await s.post("/v1/chat/completions", body, **headers)).status_code == 200


def test_parse_object_keeps_what_is_fine() -> None:
    assert parse_object(b'{"a":{"a":1},"b":[{"a":2},{"a":3}]}') == {
        "a": {"a": 1},
        "b": [{"a": 2}, {"a": 3}],
    }


@pytest.mark.parametrize("depth", [*range(900, 1030, 10), 1100, 30_000])
def test_no_depth_breaks_the_parser(depth: int) -> None:
    body = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
    result: object = None
    try:
        result = set(parse_object(body))
    except InvalidRequest as error:
        result = error.code
    assert result in (["invalid_json"] if depth > 1030 else [{"a"}, "invalid_json"])
