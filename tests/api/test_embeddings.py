"""POST /v1/embeddings, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import openai
import pytest

from headrace.caching.semantic.base import EmbeddingFailedError
from headrace.caching.semantic.embedders.wordllama import WordLlamaEmbedder
from support.app import MODEL, Site, listening, refusal_of, site

pytestmark = pytest.mark.anyio


@pytest.fixture
async def inner() -> AsyncIterator[Site]:
    async with site(embedders={"wordllama": WordLlamaEmbedder()}) as made:
        yield made


async def embed(inner: Site, text: Any, headers: dict[str, str] | None = None, **more: Any) -> Any:
    body = {"model": "wordllama", "input": text, **more}
    return await inner.client.post("/v1/embeddings", json=body, headers=headers or {})


def rows(answer: Any) -> np.ndarray[Any, Any]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    assert all(item["object"] == "embedding" for item in data)
    return np.array([item["embedding"] for item in data], np.float32)


async def test_each_text_has_a_unit_vector_in_its_place(inner: Site) -> None:
    texts = ["a cat sits", "the dog runs", "a cat sits"]
    answer = await embed(inner, texts)
    found = rows(answer)
    assert found.shape == (3, 256)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert (found[0] == found[2]).all()
    assert found[0] @ found[1] < 0.9
    payload = answer.json()
    assert payload["object"] == "list"
    assert payload["model"] == "wordllama"
    assert payload["usage"]["prompt_tokens"] == payload["usage"]["total_tokens"] > 6
    for n, text in enumerate(texts):
        assert rows(await embed(inner, text))[0] == pytest.approx(found[n], abs=1e-6)


async def test_tokens_stand_for_their_text(inner: Site) -> None:
    embedder = WordLlamaEmbedder()
    await embedder.start()
    ids = [embedder.encode("a cat sits"), embedder.encode("the dog runs")]
    texts = rows(await embed(inner, ["a cat sits", "the dog runs"]))
    answer = await embed(inner, ids)
    assert (rows(answer) == texts).all()
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert (rows(await embed(inner, ids[0])) == texts[:1]).all()


async def test_base64_is_the_same_vector(inner: Site) -> None:
    plain = rows(await embed(inner, "a cat"))
    answer = await embed(inner, "a cat", encoding_format="base64")
    data = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert np.frombuffer(data, "<f4") == pytest.approx(plain[0], abs=1e-7)


async def test_shorter_vectors_are_the_beginning_of_the_long_one(inner: Site) -> None:
    whole = rows(await embed(inner, "a cat"))[0]
    short = rows(await embed(inner, "a cat", dimensions=64))[0]
    assert short.shape == (64,)
    assert np.linalg.norm(short) == pytest.approx(1.0, abs=1e-5)
    assert short @ whole[:64] / np.linalg.norm(whole[:64]) == pytest.approx(1.0, abs=1e-5)
    assert rows(await embed(inner, "a cat", dimensions=256))[0] == pytest.approx(whole)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": "word " * 3000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 100}, "dimensions"),
        ({"input": "a", "dimensions": 512}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "model": MODEL}, "model"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_makes_no_sense_is_refused_by_name(
    inner: Site, body: dict[str, Any], param: str
) -> None:
    answer = await inner.client.post("/v1/embeddings", json={"model": "wordllama", **body})
    assert refusal_of(answer, 400)["param"] == param


async def test_a_model_that_is_not_there(inner: Site) -> None:
    refusal = refusal_of(await embed(inner, "a", model="nope"), 404)
    assert refusal["code"] == "model_not_found"
    async with site() as without:
        refusal_of(await embed(without, "a"), 404)


async def test_embedding_models_are_listed_and_do_not_chat(inner: Site) -> None:
    listed = [card["id"] for card in (await inner.client.get("/v1/models")).json()["data"]]
    assert listed == [MODEL, "wordllama"]
    assert (await inner.client.get("/v1/models/wordllama")).json()["id"] == "wordllama"
    body = {"model": "wordllama", "messages": [{"role": "user", "content": "hi"}]}
    refusal_of(await inner.client.post("/v1/chat/completions", json=body), 404)


async def test_it_needs_a_key_where_there_are_keys() -> None:
    embedders = {"wordllama": WordLlamaEmbedder()}
    async with site(embedders=embedders, server={"api_keys": ["sk-one"]}) as inner:
        refusal_of(await embed(inner, "a"), 401)
        rows(await embed(inner, "a", {"authorization": "Bearer sk-one"}))


async def test_many_at_once_each_get_their_own(inner: Site) -> None:
    alone = rows(await embed(inner, [f"text number {n}" for n in range(300)]))
    together = await asyncio.gather(*(embed(inner, f"text number {n}") for n in range(300)))
    for n, answer in enumerate(together):
        assert rows(answer)[0] == pytest.approx(alone[n], abs=1e-6)


async def test_the_sdk_gets_floats(inner: Site) -> None:
    async with (
        listening(inner) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as sdk,
    ):
        made = await sdk.embeddings.create(model="wordllama", input=["a cat", "a dog"])
        assert [item.index for item in made.data] == [0, 1]
        assert len(made.data[0].embedding) == 256
        assert made.usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError):
            await sdk.embeddings.create(model="wordllama", input="")


class Broken(WordLlamaEmbedder):
    async def embed_ids(self, ids: Sequence[Sequence[int]]) -> list[Any]:
        assert ids
        raise EmbeddingFailedError("too many texts wait for the embedder")


async def test_an_embedder_that_cannot_answer_is_a_503() -> None:
    async with site(embedders={"wordllama": Broken()}) as inner:
        answer = await embed(inner, "a")
        refusal_of(answer, 503)
        assert answer.headers["retry-after"] == "1"


async def test_it_is_counted(inner: Site) -> None:
    await embed(inner, ["a cat", "a dog"])
    text = (await inner.client.get("/metrics")).text
    assert 'headrace_embedding_texts_total{model_name="wordllama"} 2.0' in text
    assert 'headrace_embedding_requests_total{model_name="wordllama"} 1.0' in text
