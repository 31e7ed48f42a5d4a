"""The response cache over HTTP: headers, both modes of an answer, and what operators undo."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.clock import VirtualClock
from support.app import MODEL, Site, chunks_of, refusal_of, site, text_of
from support.gateway import small_cache

pytestmark = pytest.mark.anyio

KEYS = {"api_keys": ["sk-one", "sk-two"]}


async def ask(inner: Site, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    return await inner.client.post(
        "/v1/chat/completions", json={**body, **fields}, headers=headers or {}
    )


async def test_one_entry_serves_both_modes() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        whole = await ask(inner)
        assert whole.headers["x-cache"] == "MISS"
        assert whole.headers["cache-status"] == "Headrace; fwd=miss"
        assert "age" not in whole.headers
        clock.advance(61.5)
        stream = await ask(inner, stream=True, stream_options={"include_usage": True})
        again = await ask(inner)
        for hit in (stream, again):
            assert hit.headers["x-cache"] == "HIT"
            assert hit.headers["x-cache-tier"] == "memory"
            assert hit.headers["age"] == "61"
            assert hit.headers["cache-status"] == f"Headrace; hit; ttl={86_400 - 62}"
            assert len(hit.headers["x-cache-entry"]) == 64
        chunks = chunks_of(stream.text)
        assert text_of(chunks) == whole.json()["choices"][0]["message"]["content"]
        assert chunks[-1]["usage"] == whole.json()["usage"]
        assert chunks[0]["id"] != whole.json()["id"] != again.json()["id"]
        same = [{**r.json(), "id": 0, "created": 0, "timings": 0} for r in (whole, again)]
        assert same[0] == same[1]


async def test_an_answer_by_chance_says_that_it_passed_by() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        answer = await ask(inner, temperature=1)
        assert answer.headers["x-cache"] == "BYPASS"
        assert answer.headers["x-cache-reason"] == "sampled"
        assert answer.headers["cache-status"] == "Headrace; fwd=bypass; detail=sampled"


async def test_without_a_cache_nothing_is_said_of_it() -> None:
    async with site() as inner:
        answer = await ask(inner)
        assert not any("cache" in name and name.startswith("x-") for name in answer.headers)
        assert refusal_of(await inner.client.get("/v1/cache/stats"), 404)["code"] == "not_found"


async def test_what_says_nothing_of_the_answer_is_not_in_the_key() -> None:
    clock = VirtualClock()
    changes: list[dict[str, Any]] = [
        {"user": "u"},
        {"metadata": {"a": 1}},
        {"priority": 1},
        {"timeout": 9},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"n": 1, "top_p": 1.0, "presence_penalty": 0},
        {"max_completion_tokens": None},
    ]
    async with site(cache=small_cache(clock), clock=clock) as inner:
        await ask(inner)
        for change in changes:
            assert (await ask(inner, **change)).headers["x-cache"] == "HIT", change


async def test_each_field_that_decides_the_answer_is_in_the_key() -> None:
    clock = VirtualClock()
    hi = {"role": "user", "content": "hi"}
    changes: list[dict[str, Any]] = [
        {"max_tokens": 7},
        {"max_tokens": 8},
        {"seed": 1},
        {"seed": 2},
        {"temperature": 0.5, "seed": 1},
        {"top_p": 0.5, "seed": 1},
        {"stop": ["x"]},
        {"stop": ["x", "y"]},
        {"presence_penalty": 0.5},
        {"n": 2},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 2},
        {"cache_salt": "a"},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": "hi "}]},
        {"messages": [{"role": "system", "content": "be brief"}, hi]},
        {"messages": [{**hi, "name": "bob"}]},
        {"messages": [hi, {"role": "assistant", "content": "x"}, hi]},
    ]
    async with site(cache=small_cache(clock), clock=clock) as inner:
        for status in ("MISS", "HIT"):
            for change in changes:
                answer = await ask(inner, **change)
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-cache"] == status, change


async def test_the_order_and_spacing_of_the_body_do_not_matter() -> None:
    clock = VirtualClock()
    other = rb"""{ "temperature" : 0.0, "messages":[{"content":"h\u0069","role":"user"}],
        "model": "scripted"}"""
    bodies = (
        b'{"model":"scripted","messages":[{"role":"user","content":"hi"}],"temperature":0}',
        other,
    )
    async with site(cache=small_cache(clock), clock=clock) as inner:
        answers = [await inner.post("/v1/chat/completions", body) for body in bodies]
    assert [answer.headers["x-cache"] for answer in answers] == ["MISS", "HIT"]


async def test_several_prompts_are_a_hit_only_if_each_of_them_is() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        await inner.complete("a", temperature=0)
        for prompts, status in ((["a", "b"], "MISS"), (["b", "a"], "HIT")):
            answer = await inner.complete(prompts, temperature=0)
            assert answer.headers["x-cache"] == status
            assert [choice["text"] for choice in answer.json()["choices"]] == ["Hello world"] * 2


# What callers ask for.


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("no-store", "BYPASS"),
        ("NO-CACHE", "MISS"),
        ("max-age=0", "MISS"),
        ("max-age=60", "HIT"),
        ("only-if-cached", "HIT"),
        ("private, something-else=3", "HIT"),
        ("", "HIT"),
    ],
)
async def test_cache_control(value: str, status: str) -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        await ask(inner)
        clock.advance(5.0)
        answer = await ask(inner, {"cache-control": value})
        assert answer.headers["x-cache"] == status


async def test_only_if_cached_is_refused_with_504() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        refusal = refusal_of(await ask(inner, {"cache-control": "only-if-cached"}), 504)
        assert refusal["code"] == "not_cached"
    async with site() as inner:
        refusal_of(await ask(inner, {"cache-control": "only-if-cached"}), 504)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Cache-Control", "max-age=soon"),
        ("Cache-Control", "max-age=-1"),
        ("x-cache-ttl", "0"),
        ("x-cache-ttl", "1e3"),
        ("x-cache-ttl", "-5"),
        ("x-cache-namespace", "a b"),
        ("x-cache-namespace", "a" * 129),
        ("x-cache-mode", "always"),
        ("x-cache-min-similarity", "1.1"),
        ("x-cache-min-similarity", "nan"),
    ],
)
async def test_a_header_that_makes_no_sense_is_refused_by_name(name: str, value: str) -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        assert refusal_of(await ask(inner, {name: value}), 400)["param"] == name


async def test_a_header_that_comes_twice_is_refused() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        answer = await inner.client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
            headers=[("x-cache-namespace", "a"), ("x-cache-namespace", "b")],
        )
        assert refusal_of(answer, 400)["param"] == "x-cache-namespace"


# What operators and callers undo.


async def test_an_entry_is_forgotten_by_its_name() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock, host="localhost") as inner:
        await ask(inner)
        entry = (await ask(inner)).headers["x-cache-entry"]
        answer = await inner.client.delete(f"/v1/cache/entries/{entry}")
        assert answer.json() == {"forgotten": True}
        assert (await ask(inner)).headers["x-cache"] == "MISS"
        body = {"entry": entry, "good": True}
        assert (await inner.client.post("/v1/cache/feedback", json=body)).status_code == 200
        assert (await ask(inner)).headers["x-cache"] == "HIT"
        await inner.client.post("/v1/cache/feedback", json={**body, "good": False})
        assert (await ask(inner)).headers["x-cache"] == "MISS"
        for wrong in ("x", entry[:-1], entry.upper(), "../" + entry):
            answer = await inner.client.delete(f"/v1/cache/entries/{wrong}")
            assert answer.status_code in (400, 404)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"good": True},
        {"good": 1, "entry": "0" * 64},
        {"good": True, "entry": "0" * 64, "pair": "0" * 64},
        {"good": True, "entry": 5},
        {"good": True, "pair": "zz"},
    ],
    ids=str,
)
async def test_feedback_that_makes_no_sense(body: dict[str, Any]) -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        refusal_of(await inner.client.post("/v1/cache/feedback", json=body), 400)


async def test_feedback_on_an_unknown_pair() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        body = {"good": False, "pair": "0" * 64}
        refusal_of(await inner.client.post("/v1/cache/feedback", json=body), 404)


async def test_a_tenant_forgets_its_own_answers_only() -> None:
    clock = VirtualClock()
    one, two = ({"authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
    async with site(cache=small_cache(clock), clock=clock, server=KEYS) as inner:

        async def statuses() -> list[str]:
            return [(await ask(inner, headers)).headers["x-cache"] for headers in (one, two)]

        assert await statuses() == ["MISS", "MISS"]
        assert await statuses() == ["HIT", "HIT"]
        answer = await inner.client.post("/v1/cache/invalidate", json={}, headers=one)
        assert answer.json()["invalidated"]["tenant"] == "key-1"
        assert await statuses() == ["MISS", "HIT"]
        for body in ({"tenant": "key-2"}, {"tenant": "key-2", "model": MODEL}):
            foreign = await inner.client.post("/v1/cache/invalidate", json=body, headers=one)
            refusal_of(foreign, 403)
        assert await statuses() == ["HIT", "HIT"]
        refusal_of(await inner.client.get("/v1/cache/stats", headers=one), 403)
        refusal_of(await inner.client.post("/v1/cache/invalidate", json={}), 401)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tenants": "a"}, "tenants"),
        ({"tenant": 5}, "tenant"),
        ({"namespace": "a"}, "namespace"),
        ({"tag": "a"}, "tag"),
        ({"tag": "a", "tenant": "default", "namespace": "b"}, "tag"),
        ({"namespace": "a", "tenant": "default", "model": "m"}, "namespace"),
    ],
)
async def test_a_scope_that_makes_no_sense(body: dict[str, Any], param: str) -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock, host="localhost") as inner:
        refusal = refusal_of(await inner.client.post("/v1/cache/invalidate", json=body), 400)
        assert refusal["param"] == param


async def test_without_keys_only_the_servers_own_machine_may_invalidate() -> None:
    clock = VirtualClock()
    async with site(
        cache=small_cache(clock), clock=clock, address=("203.0.113.9", 1), host="localhost"
    ) as inner:
        refusal_of(await inner.client.post("/v1/cache/invalidate", json={}), 403)
        refusal_of(await inner.client.delete("/v1/cache/entries/" + "0" * 64), 403)


async def test_what_it_has_saved_is_told() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        for _ in range(4):
            await ask(inner)
        await ask(inner, temperature=1)
        stats = (await inner.client.get("/v1/cache/stats")).json()
        assert stats["hits"] == {"memory": 3}
        assert (stats["misses"], stats["bypasses"], stats["stores"]) == (1, 1, 1)
        assert stats["hit_rate"] == 0.75
        assert stats["saved"]["completion_tokens"] == 3 * len("Hello world")
        assert stats["tiers"]["memory"]["entries"] == 1
        metrics = (await inner.client.get("/metrics")).text
        assert 'headrace_cache_hits_total{tenant="default",tier="memory"} 3.0' in metrics
        assert "headrace_cache_misses_total 1.0" in metrics
        assert 'headrace_cache_entries{tier="memory"} 1.0' in metrics


async def test_answers_are_forgotten_by_a_tag() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock, host="localhost") as inner:
        tagged = {"x-cache-tags": "catalogue/7, prices"}
        await ask(inner, tagged)
        await ask(inner, top_p=0.5)
        # Who asks need not know the tags.
        assert (await ask(inner)).headers["x-cache"] == "HIT"
        for tag, expected in (("other", "HIT"), ("prices", "MISS")):
            body = {"tenant": "default", "tag": tag}
            answer = await inner.client.post("/v1/cache/invalidate", json=body)
            assert answer.json()["invalidated"]["tag"] == tag
            assert (await ask(inner, tagged)).headers["x-cache"] == expected
        assert (await ask(inner)).headers["x-cache"] == "HIT"
        assert (await ask(inner, top_p=0.5)).headers["x-cache"] == "HIT"


@pytest.mark.parametrize("tags", ["", "a,,b", "a b", "x" * 129, ",".join("abcdefghi"), "é"])
async def test_tags_that_make_no_sense(tags: str) -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        headers = [(b"x-cache-tags", tags.encode("latin-1"))]
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        answer = await inner.client.post("/v1/chat/completions", json=body, headers=headers)
        assert refusal_of(answer, 400)["param"] == "x-cache-tags"


async def test_an_entry_is_shown_to_who_knows_its_name() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock) as inner:
        whole = (await ask(inner, {"x-cache-tags": "a"})).json()
        hit = await ask(inner)
        clock.advance(5.0)
        shown = (await inner.client.get("/v1/cache/entries/" + hit.headers["x-cache-entry"])).json()
        choice = whole["choices"][0]
        assert shown["choices"] == [
            {
                "index": 0,
                "text": choice["message"]["content"],
                "finish_reason": choice["finish_reason"],
            }
        ]
        assert shown["age_s"] == 5.0
        assert shown["tags"] == ["a"]
        assert shown["completion_tokens"] == whole["usage"]["completion_tokens"]
        refusal_of(await inner.client.get("/v1/cache/entries/" + "0" * 64), 404)


async def test_what_one_server_exports_another_one_takes() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock, host="localhost") as one:
        first = await ask(one)
        await ask(one, top_p=0.5)
        exported = (await one.client.get("/v1/cache/export")).text
        assert len(exported.splitlines()) == 2
    async with site(cache=small_cache(clock), clock=clock, host="localhost") as two:
        answer = await two.client.post("/v1/cache/import", content=exported)
        assert answer.json() == {"taken": 2, "skipped": 0}
        hit = await ask(two)
        assert hit.headers["x-cache"] == "HIT"
        assert hit.json()["choices"] == first.json()["choices"]
        for broken in ("{}", "x", exported + '{"key": "ff", "entry": "!"}', exported[:-30]):
            await two.client.post("/v1/cache/invalidate", json={})
            refusal_of(await two.client.post("/v1/cache/import", content=broken), 400)
            assert (await ask(two)).headers["x-cache"] == "MISS"
        clock.advance(1e6)
        answer = await two.client.post("/v1/cache/import", content=exported)
        assert answer.json() == {"taken": 0, "skipped": 2}


async def test_an_export_is_the_operators_alone() -> None:
    clock = VirtualClock()
    async with site(cache=small_cache(clock), clock=clock, server=KEYS) as inner:
        headers = {"authorization": "Bearer sk-one"}
        refusal_of(await inner.client.get("/v1/cache/export", headers=headers), 403)
        refusal_of(await inner.client.post("/v1/cache/import", headers=headers), 403)
    async with site(
        cache=small_cache(clock), clock=clock, address=("203.0.113.9", 1), host="localhost"
    ) as inner:
        refusal_of(await inner.client.get("/v1/cache/export"), 403)
        refusal_of(await inner.client.post("/v1/cache/import", content=""), 403)
