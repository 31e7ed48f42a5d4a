"""Both generation endpoints end to end, over a scripted backend."""

from __future__ import annotations

import math
from typing import Any

import httpx2
import pytest

from headrace.backends.script import Line, Piece, Script, pieces
from headrace.backends.scripted import ScriptedBackend
from headrace.core.clock import VirtualClock
from headrace.core.errors import BackendFailed
from headrace.core.events import FinishReason, TokenLogprob
from headrace.core.request import Request
from support.app import HELLO, Site, chunks_of, events_of, refusal_of, site, text_of

pytestmark = pytest.mark.anyio

TWO = Script((Line(pieces("a", "b")), Line(pieces(*"cdefgh"), FinishReason.LENGTH)))
EMOJI = "\U0001f600".encode()
SPLIT = Script((Line(pieces("x", EMOJI[:1], EMOJI[1:3], EMOJI[3:], " y")),))


async def ask(s: Site, endpoint: str, **fields: Any) -> httpx2.Response:
    return await (s.chat(**fields) if endpoint == "chat" else s.complete(**fields))


ENDPOINTS = pytest.mark.parametrize("endpoint", ["chat", "completions"])


async def test_a_chat_reply() -> None:
    async with site(HELLO, clock=VirtualClock(epoch=1_700_000_000.5)) as s:
        response = await s.chat("hi")
        assert response.headers["content-type"] == "application/json"
        assert response.headers["openai-version"] == "2020-10-01"
        assert response.headers["openai-processing-ms"] == "0"
        body = response.json()
        assert body.pop("id").startswith("chatcmpl-")
        assert body == {
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": "scripted",
            "system_fingerprint": None,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ],
            "usage": {
                "prompt_tokens": 20,
                "completion_tokens": 11,
                "total_tokens": 31,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "timings": {
                "queue_ms": 0,
                "prefill_ms": 0,
                "decode_ms": 0,
                "total_ms": 0,
                "cached_tokens": 0,
            },
        }


@ENDPOINTS
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
)
async def test_usage_in_a_stream(
    endpoint: str, options: dict[str, bool] | None, wanted: bool
) -> None:
    async with site(Script(HELLO.lines, cached_tokens=2)) as s:
        whole = (await ask(s, endpoint, max_tokens=5)).json()
        response = await ask(s, endpoint, max_tokens=5, stream=True, stream_options=options)
        chunks = chunks_of(response.text)
        with_usage = [chunk for chunk in chunks if chunk.get("usage") is not None]
        if not wanted:
            assert with_usage == []
        else:
            assert with_usage == [chunks[-1]]
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"] == whole["usage"]
            assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@ENDPOINTS
async def test_both_modes_say_the_same(endpoint: str) -> None:
    for script in (HELLO, TWO, SPLIT):
        async with site(script) as s:
            whole = (await ask(s, endpoint, n=2)).json()
            chunks = chunks_of((await ask(s, endpoint, n=2, stream=True)).text)
            for i, choice in enumerate(whole["choices"]):
                text = choice["text"] if "text" in choice else choice["message"]["content"]
                assert text == text_of(chunks, i) != ""
            assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


@ENDPOINTS
async def test_choices_of_different_length(endpoint: str) -> None:
    async with site(TWO) as s:
        options = {"include_usage": True}
        response = await ask(s, endpoint, n=2, stream=True, stream_options=options)
        *pieces_, last = chunks_of(response.text)
        finishes = [
            (choice["index"], choice["finish_reason"])
            for chunk in pieces_
            for choice in chunk["choices"]
            if choice["finish_reason"]
        ]
        assert finishes == [(0, "stop"), (1, "length")]
        assert text_of(pieces_, 0) == "ab"
        assert text_of(pieces_, 1) == "cdefgh"
        assert last["usage"]["completion_tokens"] == 8
        one = (await ask(s, endpoint)).json()["usage"]["prompt_tokens"]
        assert last["usage"]["prompt_tokens"] == one


async def test_chat_logprobs() -> None:
    async with site(SPLIT) as s:
        plain = (await s.chat(logprobs=True)).json()["choices"][0]
        entries = plain["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in entries] == [[]] * 7
        joined = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert joined.decode() == plain["message"]["content"] == "x\U0001f600 y"
        best = (await s.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
        for entry in best["logprobs"]["content"]:
            assert len(entry["top_logprobs"]) == 2
            assert math.isfinite(entry["logprob"])
        response = await s.chat(logprobs=True, top_logprobs=2, stream=True)
        streamed = [
            entry
            for chunk in chunks_of(response.text)
            for choice in chunk["choices"]
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert streamed == best["logprobs"]["content"]
        assert refusal_of(await s.chat(top_logprobs=2), 400)["param"] == "top_logprobs"
        assert refusal_of(await s.chat(logprobs=True, top_logprobs=21), 400)


async def test_numbers_that_json_has_not_never_reach_it() -> None:
    scored = TokenLogprob(97, "a", b"a", -math.inf, (TokenLogprob(98, "b", b"b", math.nan),))
    async with site(Script((Line((Piece("a", (97,), (scored,)),)),))) as s:
        for stream in (False, True):
            for response in (
                await s.chat(logprobs=True, top_logprobs=1, stream=stream),
                await s.complete(logprobs=1, stream=stream),
            ):
                assert response.status_code == 200
                assert '"logprob":null' not in response.text
                assert "-9999" in response.text


async def test_echo_with_scores() -> None:
    async with site(HELLO) as s:
        fields: dict[str, Any] = {"prompt": "A B C", "echo": True, "logprobs": 1}
        body = (await s.complete(**fields, max_tokens=0)).json()
        (choice,) = body["choices"]
        assert choice["text"] == "A B C"
        assert choice["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 0
        scores = choice["logprobs"]
        lengths = {name: len(values) for name, values in scores.items()}
        assert set(lengths.values()) == {body["usage"]["prompt_tokens"]}
        assert scores["token_logprobs"][0] is None
        assert None not in scores["token_logprobs"][1:]
        chunks = chunks_of((await s.complete(**fields, max_tokens=1, stream=True)).text)
        assert text_of(chunks) == "A B CH"
        streamed: dict[str, list[Any]] = {name: [] for name in scores}
        for chunk in chunks:
            for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
                streamed[name] += values
        whole = (await s.complete(**fields, max_tokens=1)).json()["choices"][0]
        assert streamed == whole["logprobs"]
        assert whole["text"] == "A B CH"


async def test_several_prompts() -> None:
    async with site(ScriptedBackend()) as s:
        whole = (await s.complete(["a b", "c"], n=2, max_tokens=50)).json()
        assert [choice["text"] for choice in whole["choices"]] == ["a b", "a b", "c", "c"]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert whole["usage"]["prompt_tokens"] == (1 + 3) + (1 + 1)
        assert whole["usage"]["completion_tokens"] == 2 * 3 + 2 * 1
        options = {"include_usage": True}
        response = await s.complete(["a b", "c"], n=2, stream=True, stream_options=options)
        chunks = chunks_of(response.text)
        assert [text_of(chunks, i) for i in range(4)] == ["a b", "a b", "c", "c"]
        assert chunks[-1]["usage"] == whole["usage"]
        ids = (await s.complete([[97], [98, 99]])).json()
        assert [choice["text"] for choice in ids["choices"]] == ["a", "bc"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_bad_prompt_refuses_the_call(stream: bool) -> None:
    async with site(ScriptedBackend(context_length=64)) as s:
        response = await s.complete(["a", "x" * 100, "b"], stream=stream)
        assert refusal_of(response, 400)["code"] == "context_length_exceeded"
        assert s.backend.load().running == 0


async def test_one_prompt_that_fails_later_ends_the_stream() -> None:
    def script(request: Request) -> Script:
        bad = request.prompt == "bad"
        return Script((Line(pieces("a", "b")),), fail=BackendFailed("Broke.") if bad else None)

    async with site(ScriptedBackend(script)) as s:
        response = await s.complete(["good", "bad"], stream=True)
        assert '"backend_failed"' in events_of(response.text)[-1]
        assert "[DONE]" not in response.text
        assert s.backend.load().running == 0


async def test_explicit_nulls_and_unknown_fields_change_nothing() -> None:
    names = ["seed", "temperature", "top_p", "stop", "max_tokens", "n", "logit_bias", "tools"]
    names.append("stream_options")
    async with site(ScriptedBackend()) as s:
        plain = (await s.chat("one two")).json()["choices"]
        nulls = (await s.chat("one two", **dict.fromkeys(names))).json()["choices"]
        extra = await s.chat("one two", foo=1, store=True, metadata={}, user="u")
        assert plain == nulls == extra.json()["choices"]


async def test_a_replayed_tool_call_renders() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"city":"X"}'}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
    ]
    async with site(ScriptedBackend()) as s:
        assert (await s.chat(messages=messages)).json()["choices"][0]["message"]["content"] == "sun"
        ids = s.backend.counters.requests[0].prompt_token_ids
        assert ids is not None
        assert "city=X" in s.backend.codec.decode(ids)
