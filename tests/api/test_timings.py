"""Where the time went: in the header as far as known, complete in the body or the last chunk."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from headrace.api.frames import ChatFrames, CompletionFrames, ReplyHead, StreamShape
from headrace.api.merge import merge
from headrace.backends.script import Script
from headrace.backends.scripted import ScriptedBackend
from headrace.core.clock import VirtualClock
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, Timings, Usage
from headrace.core.request import Request
from support.app import HELLO, MODEL, chunks_of, listening, site

pytestmark = pytest.mark.anyio

HEAD = ReplyHead("id", 1, "m")
FRAMES = pytest.mark.parametrize("kind", [ChatFrames, CompletionFrames])
STOPS = (Finish(0, FinishReason.STOP), Finish(1, FinishReason.LENGTH))
USAGE = Usage(3, 2, 1, Timings(0.5, 0.25, 1.0, 1.75))
TIMINGS = {
    "queue_ms": 500.0,
    "prefill_ms": 250.0,
    "decode_ms": 1000.0,
    "total_ms": 1750.0,
    "cached_tokens": 1,
}
WHOLE = 'queue;dur=0, prefill;dur=2000, decode;dur=2000, total;dur=4000, cached;desc="2"'


def timed_site(**server: Any) -> Any:
    """Two seconds to the first of three pieces, one to each of the others."""
    clock = VirtualClock()

    async def pace(_request: Request, step: int) -> None:
        clock.advance(1.0 if step < 4 else 0.0)

    script = Script(HELLO.lines, cached_tokens=2)
    return site(ScriptedBackend(script, pace=pace), clock=clock, server=server)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_a_reply_has_all_of_it_twice(endpoint: str) -> None:
    async with timed_site() as s:
        response = await getattr(s, endpoint)()
        assert response.headers["server-timing"] == WHOLE
        assert response.json()["timings"] == {
            "queue_ms": 0,
            "prefill_ms": 2000,
            "decode_ms": 2000,
            "total_ms": 4000,
            "cached_tokens": 2,
        }


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_has_the_start_in_its_header_and_all_in_its_last_chunk(
    endpoint: str, usage: bool
) -> None:
    async with timed_site() as s:
        options = {"include_usage": usage}
        response = await getattr(s, endpoint)(stream=True, stream_options=options)
        assert response.headers["server-timing"] == 'queue;dur=0, cached;desc="2"'
        *before, last = chunks_of(response.text)
        assert all("timings" not in chunk for chunk in before)
        assert last["timings"]["prefill_ms"] == 2000
        assert last["timings"]["total_ms"] == 4000
        assert bool(last["choices"]) is not usage


async def test_errors_tell_no_times() -> None:
    async with site() as s:
        assert "server-timing" not in (await s.chat(n=0)).headers


@FRAMES
def test_without_usage_only_the_last_finish_waits_for_them(kind: Any) -> None:
    frames = kind(HEAD, StreamShape(2))
    frames.feed(Start("m", "b", 3))
    frames.feed(Delta(0, "a", (1,)))
    assert b'"finish_reason":"stop"' in frames.feed(STOPS[0])
    assert b'finish_reason":"length' not in frames.feed(STOPS[1])
    (last,) = chunks_of(frames.feed(USAGE).decode())
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["index"] == 1
    assert last["timings"] == TIMINGS


@FRAMES
def test_with_usage_they_come_in_its_chunk(kind: Any) -> None:
    frames = kind(HEAD, StreamShape(2, include_usage=True))
    frames.feed(Start("m", "b", 3))
    for stop in STOPS:
        assert b'"finish_reason":"' in frames.feed(stop)
    (last,) = chunks_of(frames.feed(USAGE).decode())
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert last["timings"] == TIMINGS


@FRAMES
@pytest.mark.parametrize("usage", [False, True])
def test_unknown_times_are_absent(kind: Any, usage: bool) -> None:
    frames = kind(HEAD, StreamShape(2, include_usage=usage))
    sent = b"".join(frames.feed(event) for event in (Start("m", "b", 3), *STOPS, Usage(3, 2)))
    assert b"timings" not in sent


@FRAMES
def test_an_answer_without_text_still_opens_before_it_closes(kind: Any) -> None:
    frames = kind(HEAD, StreamShape(1))
    sent = frames.feed(Start("m", "b", 3)) + frames.feed(STOPS[0]) + frames.feed(USAGE)
    chunks = chunks_of(sent.decode())
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    if kind is ChatFrames:
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


async def joint(*each: tuple[float | None, Timings | None]) -> tuple[Start, Usage]:
    """The Start and Usage of a call whose prompts waited so long and took so long."""

    async def stream(queue_s: float | None, timings: Timings | None) -> AsyncGenerator[Event]:
        yield Start("m", "b", 1, queue_s=queue_s)
        yield Finish(0, FinishReason.STOP)
        yield Usage(1, 1, 0, timings)

    events = [event async for event in merge([stream(*one) for one in each], 1)]
    start, usage = events[0], events[-1]
    assert isinstance(start, Start)
    assert isinstance(usage, Usage)
    return start, usage


async def test_several_prompts_are_waited_for_together() -> None:
    start, usage = await joint((1.0, Timings(1.0, 4.0, 1.0, 6.5)), (3.0, Timings(3.0, 0.5, 5.0, 9)))
    assert start.queue_s == 3.0
    # The last turn at 3, the last first token at 5, the last token at 8.5.
    assert usage.timings == Timings(3.0, 2.0, 3.5, 9)


async def test_a_prompt_without_tokens_or_turn_does_not_hide_the_others() -> None:
    start, usage = await joint((None, Timings(None, None, None, 0.5)), (1.0, Timings(1, 2, 3, 6)))
    assert start.queue_s == 1.0
    assert usage.timings == Timings(1, 2, 3, 6)
    start, usage = await joint((None, None), (None, None))
    assert (start.queue_s, usage.timings) == (None, None)
    start, usage = await joint((5, Timings(5, None, None, 5.5)), (1.0, Timings(1, 1, 1, 3)))
    assert usage.timings == Timings(5, 0, 0, 5.5)


async def test_the_official_client_sees_them() -> None:
    async with (
        timed_site() as s,
        listening(s) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client,
    ):
        ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        raw = await client.chat.completions.with_raw_response.create(**ask)
        assert raw.headers["server-timing"].startswith("queue;dur=")
        whole = raw.parse()
        assert whole.model_extra is not None
        assert whole.model_extra["timings"]["cached_tokens"] == 2
        wishes: tuple[dict[str, Any], ...] = ({}, {"stream_options": {"include_usage": True}})
        for options in wishes:
            stream = await client.chat.completions.create(**ask, **options, stream=True)
            chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
            assert chunks[-1].model_extra is not None
            assert chunks[-1].model_extra["timings"]["prefill_ms"] is not None
            finishes = [c.finish_reason for chunk in chunks for c in chunk.choices]
            assert finishes.count("stop") == 1
        async with client.chat.completions.stream(**ask) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].message.content == "Hello world"
