"""Stored and shared answers of the real model, as its users meet them."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Iterator

import openai
import pytest

from support.server import Server, serve

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def caching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With nothing set: answers are kept by default."""
    with serve(tmp_path_factory.mktemp("caching") / "log", "--dtype", "fp32") as running:
        yield running


def question(text: str) -> list[typing.Any]:
    return [{"role": "user", "content": text}]


def test_the_second_asker_is_answered_from_memory(caching: Server) -> None:
    with openai.OpenAI(base_url=caching.url + "/v1", api_key="none", max_retries=0) as sdk:
        create = sdk.chat.completions.with_raw_response.create
        ask: dict[str, typing.Any] = {
            "model": MODEL,
            "messages": question("Name a fruit."),
            "temperature": 0,
            "max_tokens": 12,
        }
        first, second = (create(**ask) for _ in range(2))
        assert [r.headers["x-cache"] for r in (first, second)] == ["MISS", "HIT"]
        one, two = first.parse(), second.parse()
        assert one.choices == two.choices
        assert one.usage == two.usage
        assert one.id != two.id
        stream = sdk.chat.completions.create(**ask, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(pieces) == one.choices[0].message.content
        fresh = create(**ask, extra_headers={"cache-control": "no-cache"})
        assert fresh.headers["x-cache"] == "MISS"
        assert fresh.parse().choices == one.choices


@pytest.mark.anyio
async def test_a_hundred_twins_are_one_generation(caching: Server) -> None:
    before = caching.metrics()

    async with openai.AsyncOpenAI(base_url=caching.url + "/v1", api_key="none") as sdk:

        async def ask() -> str:
            stream = await sdk.chat.completions.create(
                model=MODEL,
                messages=question("Tell me about the sea."),
                temperature=0,
                max_tokens=32,
                stream=True,
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        answers = await asyncio.gather(*(ask() for _ in range(100)))
    assert len(set(answers)) == 1
    assert len(answers[0]) > 20
    after = caching.metrics()
    made = {
        name: after[name] - before[name]
        for name in ("headrace_generation_tokens_total", "headrace_requests_total")
    }
    assert made == {"headrace_generation_tokens_total": 32, "headrace_requests_total": 100}
    shared = ("headrace_cache_coalesced_total", "headrace_cache_hits_total")
    assert sum(after.get(name, 0) - before.get(name, 0) for name in shared) == 99
    caching.settle()
