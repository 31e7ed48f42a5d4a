"""The official client, as users have it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import openai
import pytest
from starlette.types import Send

from headrace.api.sse import PING, EventStream
from headrace.backends.script import Line, Script, pieces
from headrace.backends.scripted import ScriptedBackend
from headrace.core.errors import BackendFailed
from headrace.core.events import FinishReason
from headrace.core.request import Request
from support.app import HELLO, MODEL, listening, site

pytestmark = pytest.mark.anyio

T = TypeVar("T")
TWO = Script((Line(pieces("one", " two")), Line(pieces("three"), FinishReason.LENGTH)))


@asynccontextmanager
async def asynchronous(
    backend: ScriptedBackend | Script = HELLO, **server: object
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        site(backend, server={"api_keys": ["sk-1"], **server}) as s,
        listening(s) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="sk-1", max_retries=0) as client,
    ):
        yield client


async def synchronous(work: Callable[[openai.OpenAI], T], script: Script = HELLO) -> T:
    """Runs `work` with a blocking client in a thread of its own."""
    async with site(script) as s, listening(s) as url:

        def run() -> T:
            with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
                return work(client)

        return await asyncio.to_thread(run)


async def test_chat() -> None:
    async with asynchronous() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        assert answer.object == "chat.completion"
        assert isinstance(answer.created, int)
        assert answer.choices[0].message.content == "Hello world"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 31
        assert answer._request_id


async def test_chat_stream_with_two_choices() -> None:
    async with asynchronous(TWO) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts, finishes, usage = {0: "", 1: ""}, {}, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    finishes[choice.index] = choice.finish_reason
        assert texts == {0: "one two", 1: "three"}
        assert finishes == {0: "stop", 1: "length"}
        assert usage is not None
        assert usage.completion_tokens == len("one twothree")


async def test_chat_logprobs() -> None:
    async with asynchronous() as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            logprobs=True,
            top_logprobs=2,
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert "".join(entry.token for entry in logprobs.content) == "Hello world"
        assert {len(entry.top_logprobs) for entry in logprobs.content} == {2}


async def test_a_pause_longer_than_the_keep_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    pinged = asyncio.Event()
    put = EventStream._put

    async def noted(self: EventStream, send: Send, body: bytes, *, more: bool = True) -> None:
        await put(self, send, body, more=more)
        if body == PING:
            pinged.set()

    async def pace(_request: Request, step: int) -> None:
        if step == 1:
            await pinged.wait()

    monkeypatch.setattr(EventStream, "_put", noted)

    async with asynchronous(ScriptedBackend(HELLO, pace=pace), sse_keep_alive=0.01) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "Hello world"
        assert pinged.is_set()


async def test_errors_have_their_classes() -> None:
    async with asynchronous() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(
                model="nope", messages=[{"role": "user", "content": "hi"}]
            )
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], temperature=9
            )
        assert bad.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-2").models.list()


async def test_a_failure_in_mid_stream() -> None:
    script = Script(HELLO.lines, fail=BackendFailed("It broke."), fail_after=2)
    async with asynchronous(ScriptedBackend(script)) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        texts: list[str | None] = []

        async def read() -> None:
            async for chunk in stream:
                texts.extend(choice.delta.content for choice in chunk.choices)

        with pytest.raises(openai.APIError, match=r"It broke\."):
            await read()
        assert texts == ["", "Hel", "lo"]


async def test_blocking_chat() -> None:
    def work(client: openai.OpenAI) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        return answer.choices[0].message.content

    assert await synchronous(work) == "Hello world"


async def test_blocking_stream() -> None:
    def work(client: openai.OpenAI) -> str:
        with client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        ) as stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await synchronous(work) == "Hello world"


async def test_blocking_completions() -> None:
    def work(client: openai.OpenAI) -> None:
        answer = client.completions.create(model=MODEL, prompt="A", echo=True, logprobs=1, n=2)
        choice = answer.choices[1]
        assert choice.text == "AHello world"
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == 13
        parts = client.completions.create(model=MODEL, prompt="A", stream=True)
        assert "".join(part.choices[0].text for part in parts) == "Hello world"

    await synchronous(work)


async def test_blocking_models() -> None:
    def work(client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "headrace"

    await synchronous(work)
