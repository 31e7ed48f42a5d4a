"""A fresh server used with the clients people have: curl and the OpenAI SDK."""

from __future__ import annotations

import json
import subprocess
import typing

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from support.server import Server

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

MODEL = "smollm2-135m-instruct"
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
]


@pytest.fixture
def client(server: Server) -> typing.Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def ask(client: openai.OpenAI, **more: typing.Any) -> typing.Any:
    return client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=24, **more
    )


def test_curl_streams_an_answer(server: Server) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "stream": True}
    done = subprocess.run(
        ["curl", "-sSN", "-i", f"{server.url}/v1/chat/completions", "--json", json.dumps(body)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    head, _, stream = done.stdout.replace("\r\n", "\n").partition("\n\n")
    assert head.startswith("HTTP/1.1 200")
    assert "content-type: text/event-stream" in head.lower()
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert "Paris" in text
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]


def test_the_sdk_gets_a_sensible_answer_with_exact_usage(client: openai.OpenAI) -> None:
    reply = ask(client)
    choice = reply.choices[0]
    assert "Paris" in choice.message.content
    assert "<|im_end|>" not in choice.message.content
    assert choice.finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.model == MODEL


def test_the_sdk_streams_the_same_text(client: openai.OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    last = chunks[-1]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_repeated_prompt_is_read_from_the_prefix_cache(client: openai.OpenAI) -> None:
    ask(client)
    reply = ask(client)
    cached = reply.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < reply.usage.prompt_tokens
    assert cached % 16 == 0


@pytest.mark.anyio
async def test_the_async_sdk_streams(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as sdk:
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count from one to five."}],
            temperature=0,
            max_tokens=16,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 3


def test_logprobs_describe_the_text(client: openai.OpenAI) -> None:
    reply = ask(client, logprobs=True, top_logprobs=3)
    entries = reply.choices[0].logprobs.content
    joined = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert joined.removesuffix("<|im_end|>") == reply.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
        best = max(top.logprob for top in entry.top_logprobs)
        assert entry.logprob == best, "greedy takes the most probable token"


def test_two_choices_differ_and_repeat_by_their_seed(client: openai.OpenAI) -> None:
    def sample() -> list[str]:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story about a dog."}],
            n=2,
            seed=7,
            temperature=1.0,
            max_tokens=16,
        )
        assert [choice.index for choice in reply.choices] == [0, 1]
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 32
        return [choice.message.content or "" for choice in reply.choices]

    first, second = sample(), sample()
    assert first == second
    assert first[0] != first[1]


def test_completions_take_text_and_token_ids_alike(client: openai.OpenAI, server: Server) -> None:
    text = "The quick brown fox"
    reply = client.post(
        server.url + "/tokenize", body={"model": MODEL, "prompt": text}, cast_to=object
    )
    ids = typing.cast("dict[str, list[int]]", reply)["tokens"]
    answers = client.completions.create(
        model=MODEL, prompt=[text, text], temperature=0, max_tokens=8
    )
    by_ids = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=8)
    assert [choice.index for choice in answers.choices] == [0, 1]
    assert answers.choices[0].text == answers.choices[1].text == by_ids.choices[0].text
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == len(ids)


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="Paris is the capital of France", echo=True, logprobs=1, max_tokens=0
    )
    choice = reply.choices[0]
    assert choice.text == "Paris is the capital of France"
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset or [])
    first, *rest = typing.cast("list[float | None]", scores.token_logprobs)
    assert first is None
    assert all(score is not None and score < 0 for score in rest)
    assert "".join(scores.tokens) == choice.text


def test_a_refusal_is_an_sdk_error_of_the_right_kind(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools") as refused:
        ask(client, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert refused.value.param == "tools"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=QUESTION)
    assert missing.value.code == "model_not_found"
