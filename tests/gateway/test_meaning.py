"""Answers found by meaning, from the gateway's side."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from headrace.caching import Controls, ResponseCache
from headrace.caching.semantic.tier import SemanticSettings, SemanticTier
from headrace.core.clock import VirtualClock
from headrace.core.events import CacheNote, Start
from headrace.core.request import Message, Request
from headrace.gateway import DEFAULT_TENANT, Gateway
from headrace.gateway.claims import Terms
from headrace.gateway.judging import Judging
from support.backend import FakeBackend, request
from support.gateway import Client, assert_nothing_left, samples, small_cache, small_gateway
from support.meaning import ByWords, Letters

pytestmark = pytest.mark.anyio


@pytest.fixture
def tier(clock: VirtualClock) -> SemanticTier:
    settings = SemanticSettings(tenants=frozenset({"default"}), sampled=0.0)
    return SemanticTier(Letters(), ByWords(), settings, clock=clock, rng=random.Random(1))


@pytest.fixture
async def gateway(
    backend: FakeBackend, clock: VirtualClock, tier: SemanticTier
) -> AsyncIterator[Gateway]:
    cache: ResponseCache = small_cache(clock)
    cache.semantic = tier
    gateway = small_gateway(backend, clock, cache=cache)
    await gateway.start()
    backend.auto = True
    yield gateway
    assert_nothing_left(gateway, backend)
    await gateway.close()


def chat(text: str, *, system: str = "be kind", **changes: Any) -> Request:
    changes["sampling"] = {"temperature": 0.0, **changes.get("sampling", {})}
    made = request("", **changes)
    return replace(made, prompt=None, messages=(Message("system", system), Message("user", text)))


async def ask(
    gateway: Gateway, asked: Request, tenant: Any = DEFAULT_TENANT, **controls: Any
) -> CacheNote:
    client = Client(gateway, asked, tenant, Terms(cache=Controls(**controls)))
    await client.done()
    assert client.error is None
    for _ in range(30):
        await asyncio.sleep(0)
    start = client.events[0]
    assert isinstance(start, Start)
    assert start.cache is not None
    return start.cache


async def test_a_reworded_question_is_a_hit_and_says_so(
    gateway: Gateway, backend: FakeBackend
) -> None:
    assert (await ask(gateway, chat("how do birds fly?"))).status == "miss"
    found = await ask(gateway, chat("birds how do fly?"))
    assert (found.status, found.tier) == ("hit", "semantic")
    assert found.similarity == pytest.approx(1.0, abs=1e-3)
    assert len(backend.calls) == 1
    stats = gateway.cache_stats()
    assert stats["hits"] == {"semantic": 1}


async def test_everything_but_the_last_question_must_be_equal(gateway: Gateway) -> None:
    await ask(gateway, chat("how do birds fly?"))
    for other in (
        chat("birds how do fly?", system="be rude"),
        chat("birds how do fly?", sampling={"max_tokens": 3}),
        chat("birds how do fly?", n=2),
        chat("birds how do fly?", sampling={"stop": ("x",)}),
    ):
        assert (await ask(gateway, other)).status == "miss"


async def test_callers_may_want_exact_answers_only(gateway: Gateway) -> None:
    await ask(gateway, chat("how do birds fly?"))
    assert (await ask(gateway, chat("birds how do fly?"), mode="exact")).status == "miss"
    assert (await ask(gateway, chat("fly how do birds?"), min_similarity=1.1)).status == "miss"
    assert (await ask(gateway, chat("do birds fly how?"), no_cache=True)).status == "miss"
    assert (await ask(gateway, chat("birds do fly how?"), namespace="n")).status == "miss"


async def test_what_is_asked_exactly_only_is_not_learnt(gateway: Gateway) -> None:
    await ask(gateway, chat("how do birds fly?"), mode="exact")
    assert (await ask(gateway, chat("birds how do fly?"))).status == "miss"


async def test_another_tenant_finds_nothing(gateway: Gateway, tier: SemanticTier) -> None:
    everybody = frozenset({"*"})
    tier.settings = replace(tier.settings, tenants=everybody)
    await ask(gateway, chat("how do birds fly?"))
    other = replace(DEFAULT_TENANT, name="other")
    assert (await ask(gateway, chat("birds how do fly?"), other)).status == "miss"
    assert (await ask(gateway, chat("fly how do birds?"), other)).status == "hit"
    tier.settings = replace(tier.settings, tenants=frozenset({"other"}))
    assert (await ask(gateway, chat("do how birds fly?"))).status == "miss"


async def test_an_entry_that_has_gone_is_forgotten(gateway: Gateway, tier: SemanticTier) -> None:
    await ask(gateway, chat("how do birds fly?"))
    assert gateway._cache is not None
    gateway._cache.memory.clear()
    assert (await ask(gateway, chat("birds how do fly?"))).status == "miss"
    assert tier.report()["questions"] == 1


async def test_invalidation_reaches_what_is_found_by_meaning(gateway: Gateway) -> None:
    await ask(gateway, chat("how do birds fly?"))
    gateway.invalidate_cache(tenant="default")
    assert (await ask(gateway, chat("birds how do fly?"))).status == "miss"


async def test_a_wrong_pair_is_told_and_kept_apart(gateway: Gateway) -> None:
    await ask(gateway, chat("how do birds fly?"))
    found = await ask(gateway, chat("birds how do fly?"))
    assert found.pair is not None
    assert gateway.judge_cached(found.pair, good=False)
    assert (await ask(gateway, chat("birds how do fly?"))).status == "miss"
    assert not gateway.judge_cached("00" * 32, good=False)


async def test_its_state_is_among_the_metrics(gateway: Gateway) -> None:
    await ask(gateway, chat("how do birds fly?"))
    await ask(gateway, chat("how do birds swim?"))
    figures = samples(gateway)
    assert figures["headrace_cache_semantic_refusals_total{bound}"] == 1
    assert figures["headrace_cache_semantic_false_hit_rate{high}"] == 1


async def test_the_judge_is_asked_as_the_least_urgent_work(
    gateway: Gateway, backend: FakeBackend, clock: VirtualClock
) -> None:
    model = gateway.models(DEFAULT_TENANT)[0].id
    judging = Judging(model, clock)
    with pytest.raises(Exception, match="not up yet"):
        await judging.ask("same?")
    judging.gateway = gateway
    assert await judging.ask("same?")
    (call,) = backend.calls
    assert call.request.priority == 3
    assert call.request.sampling.temperature == 0
    assert call.request.tenant == "headrace"
