"""Stored and shared answers, from the gateway's side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headrace.caching import CachePolicy, Controls, ResponseCache, Scope
from headrace.core.clock import VirtualClock
from headrace.core.errors import (
    BackendFailed,
    BackendUnavailable,
    DeadlineExceeded,
    HeadraceError,
    NotCached,
    Overloaded,
    QuotaExceeded,
    UnsupportedField,
)
from headrace.core.events import CacheNote, Delta, Event, Finish, FinishReason, Start, Usage
from headrace.core.health import State
from headrace.core.request import Message, PriorityClass, Request
from headrace.gateway import DEFAULT_TENANT, Gateway, Tenant
from headrace.gateway.claims import Terms
from headrace.scheduling.quotas import TenantLimits
from support.backend import FakeBackend, request
from support.gateway import (
    Client,
    assert_nothing_left,
    outcomes,
    quiet,
    samples,
    small_cache,
    small_gateway,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def cache(clock: VirtualClock) -> ResponseCache:
    return small_cache(clock)


@pytest.fixture
async def gateway(
    backend: FakeBackend, clock: VirtualClock, cache: ResponseCache
) -> AsyncIterator[Gateway]:
    gateway = small_gateway(backend, clock, cache=cache)
    yield gateway
    assert_nothing_left(gateway, backend)
    assert not gateway._answers.flights
    await gateway.close()


def greedy(prompt: Any = "hello", **changes: Any) -> Request:
    changes["sampling"] = {"temperature": 0.0, **changes.get("sampling", {})}
    return request(prompt, **changes)


def asking(**controls: Any) -> Terms:
    return Terms(cache=Controls(**controls))


def note(client: Client) -> CacheNote:
    start = client.events[0]
    assert isinstance(start, Start)
    assert start.cache is not None
    return start.cache


def bare(events: list[Event]) -> list[Event]:
    """Without what is each client's own."""
    return [
        msgspec.structs.replace(e, queue_s=None, cache=None)
        if isinstance(e, Start)
        else msgspec.structs.replace(e, timings=None)
        if isinstance(e, Usage)
        else e
        for e in events
    ]


async def answered(client: Client) -> Client:
    await client.done()
    assert client.error is None
    return client


async def test_the_second_time_it_is_a_hit(gateway: Gateway, backend: FakeBackend) -> None:
    backend.auto = True
    first = await answered(Client(gateway, greedy()))
    second = await answered(Client(gateway, greedy(id="req-2")))
    assert len(backend.calls) == 1
    assert bare(first.events) == bare(second.events)
    assert note(first) == CacheNote("miss")
    hit = note(second)
    assert (hit.status, hit.tier, hit.age_s) == ("hit", "memory", 0.0)
    assert outcomes(gateway) == {"stop": 2}


async def test_a_hit_is_served_at_overload_and_while_the_backend_is_away(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.auto = True
    await answered(Client(gateway, greedy("kept")))
    backend.auto = False
    crowd = [Client(gateway, request((1, 2))) for _ in range(7)]
    await quiet()
    backend.state = State.RESTARTING
    assert isinstance(crowd[6].error, Overloaded)
    hit = await answered(Client(gateway, greedy("kept")))
    assert note(hit).status == "hit"
    for client in crowd:
        await client.leave()


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7}, {"temperature": 2.0, "top_p": 0.5}], ids=str
)
async def test_what_is_drawn_by_chance_is_not_reused(
    gateway: Gateway, backend: FakeBackend, sampling: dict[str, Any]
) -> None:
    backend.auto = True
    for _ in range(2):
        client = await answered(Client(gateway, request("hello", sampling=sampling)))
        assert note(client).status == "bypass"
    assert len(backend.calls) == 2


@pytest.mark.parametrize("sampling", [{"seed": 7}, {"top_k": 1}, {"temperature": 0.0}], ids=str)
async def test_what_has_to_come_out_the_same_is_reused(
    gateway: Gateway, backend: FakeBackend, sampling: dict[str, Any]
) -> None:
    backend.auto = True
    for _ in range(2):
        await answered(Client(gateway, request("hello", sampling=sampling)))
    assert len(backend.calls) == 1


async def test_samples_keep_their_variety(backend: FakeBackend, clock: VirtualClock) -> None:
    """Of three kept answers each is served now and then, and no fourth is computed."""
    cache = small_cache(clock, CachePolicy(samples=3))
    gateway = small_gateway(backend, clock, cache=cache)
    said: list[str] = []
    for number in range(60):
        client = Client(gateway, request("hello"))
        await quiet()
        if backend.open:
            (call,) = backend.open
            call.start()
            call.say(Delta(0, f"answer {number}", (1,)), Finish(0, FinishReason.STOP), Usage(6, 1))
        await answered(client)
        said.append("".join(e.text for e in client.events if isinstance(e, Delta)))
    assert len(backend.calls) == 3
    assert len(set(said[30:])) == 3
    await gateway.close()


BROKEN: dict[str, list[Event | Exception]] = {
    "an error": [BackendFailed("x")],
    "the end without a finish": [StopAsyncIteration()],
    "a bug": [ValueError()],
    "usage without a finish": [Usage(6, 3)],
    "a content filter": [Finish(0, FinishReason.CONTENT_FILTER), Usage(6, 3)],
    "a tool call": [Finish(0, FinishReason.TOOL_CALLS), Usage(6, 3)],
}


@pytest.mark.parametrize("end", BROKEN)
async def test_only_complete_answers_are_kept(
    gateway: Gateway, backend: FakeBackend, end: str
) -> None:
    client = Client(gateway, greedy())
    await quiet()
    backend.calls[-1].start()
    backend.calls[-1].say(Delta(0, "hel", (1, 2, 3)), *BROKEN[end])
    await client.done()
    backend.auto = True
    again = await answered(Client(gateway, greedy()))
    assert note(again).status == "miss"
    assert len(backend.calls) == 2


async def test_an_answer_whose_client_left_is_not_kept(
    gateway: Gateway, backend: FakeBackend
) -> None:
    client = Client(gateway, greedy())
    await quiet()
    backend.calls[0].start()
    backend.calls[0].token()
    await quiet()
    await client.leave()
    await quiet()
    assert backend.calls[0].closed
    backend.auto = True
    assert note(await answered(Client(gateway, greedy()))).status == "miss"


async def test_a_cut_answer_is_kept_for_the_same_limit_only(
    gateway: Gateway, backend: FakeBackend
) -> None:
    for limit in (3, 4, 3):
        client = Client(gateway, greedy(sampling={"max_tokens": limit}))
        await quiet()
        for call in backend.open:
            call.start()
            call.say(Delta(0, "x" * limit, (1,) * limit))
            call.say(Finish(0, FinishReason.LENGTH), Usage(6, limit))
        await answered(client)
    assert len(backend.calls) == 2


# What callers ask of it.


@pytest.mark.parametrize("controls", [{"no_store": True}, {"mode": "off"}], ids=str)
async def test_who_wants_none_of_it_gets_none_of_it(
    gateway: Gateway, backend: FakeBackend, controls: dict[str, Any]
) -> None:
    backend.auto = True
    for terms in (asking(**controls), Terms(), asking(**controls)):
        await answered(Client(gateway, greedy(), terms=terms))
    assert len(backend.calls) == 3


async def test_no_cache_computes_anew_and_replaces(
    gateway: Gateway, backend: FakeBackend, clock: VirtualClock
) -> None:
    backend.auto = True
    await answered(Client(gateway, greedy()))
    clock.advance(100.0)
    await answered(Client(gateway, greedy(), terms=asking(no_cache=True)))
    assert len(backend.calls) == 2
    hit = note(await answered(Client(gateway, greedy())))
    assert (hit.status, hit.age_s) == ("hit", 0.0)


async def test_no_entry_is_older_than_asked_for(
    gateway: Gateway, backend: FakeBackend, clock: VirtualClock
) -> None:
    backend.auto = True
    await answered(Client(gateway, greedy()))
    clock.advance(100.0)
    hit = await answered(Client(gateway, greedy(), terms=asking(max_age_s=101.0)))
    assert note(hit).age_s == pytest.approx(100.0)
    miss = await answered(Client(gateway, greedy(), terms=asking(max_age_s=99.0)))
    assert note(miss).status == "miss"


async def test_a_hit_does_not_prolong_an_entry_and_a_caller_only_shortens_it(
    gateway: Gateway, backend: FakeBackend, clock: VirtualClock, cache: ResponseCache
) -> None:
    backend.auto = True
    day = cache.policy.ttl_s
    for ttl_s, prompt, lives in ((None, "a", day), (60.0, "b", 60.0), (9 * day, "c", day)):
        before = len(backend.calls)
        await answered(Client(gateway, greedy(prompt), terms=asking(ttl_s=ttl_s)))
        for _ in range(3):
            clock.advance(0.3 * lives)
            await answered(Client(gateway, greedy(prompt)))
        assert len(backend.calls) == before + 1
        clock.advance(0.11 * lives)
        await answered(Client(gateway, greedy(prompt)))
        assert len(backend.calls) == before + 2


async def test_only_if_cached_computes_nothing(gateway: Gateway, backend: FakeBackend) -> None:
    backend.auto = True
    terms = asking(only_if_cached=True)
    refused = Client(gateway, greedy(), terms=terms)
    await refused.done()
    assert isinstance(refused.error, NotCached)
    assert not backend.calls
    await answered(Client(gateway, greedy()))
    assert note(await answered(Client(gateway, greedy(), terms=terms))).status == "hit"
    assert outcomes(gateway) == {"stop": 2, "refused_not_cached": 1}


async def test_namespaces_tenants_and_sub_tenants_share_nothing(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.auto = True
    trusted = Tenant("proxy", trusted=True)
    askers = (
        (DEFAULT_TENANT, Terms()),
        (DEFAULT_TENANT, asking(namespace="a")),
        (DEFAULT_TENANT, asking(namespace="b")),
        (Tenant("other"), Terms()),
        (trusted, Terms()),
        (trusted, Terms(fairness_id="one")),
        (trusted, Terms(fairness_id="two")),
    )
    for status in ("miss", "hit"):
        for tenant, terms in askers:
            client = await answered(Client(gateway, greedy(), tenant, terms))
            assert note(client).status == status
    assert len(backend.calls) == len(askers)


async def test_a_hit_counts_as_a_request_and_costs_no_tokens(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.auto = True
    tenant = Tenant("t", limits=TenantLimits(requests_per_minute=3, tokens_per_minute=100))
    await answered(Client(gateway, greedy(), tenant))
    left = gateway.ratelimit(tenant)
    for _ in range(2):
        await answered(Client(gateway, greedy(), tenant))
    refused = Client(gateway, greedy(), tenant)
    await refused.done()
    assert isinstance(refused.error, QuotaExceeded)
    now = gateway.ratelimit(tenant)
    assert left is not None
    assert now is not None
    assert now.remaining_tokens == left.remaining_tokens


async def test_a_field_that_the_backend_lacks_is_refused_whatever_is_stored(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.auto = True
    asked = greedy(extra_fields={"tools": []})
    client = Client(gateway, asked)
    await client.done()
    assert isinstance(client.error, UnsupportedField)


async def test_what_was_invalidated_is_not_found_even_if_it_was_being_computed(
    gateway: Gateway, backend: FakeBackend, cache: ResponseCache
) -> None:
    client = Client(gateway, greedy())
    await quiet()
    cache.invalidate(Scope(tenant="default"))
    backend.calls[0].answer()
    await answered(client)
    backend.auto = True
    assert note(await answered(Client(gateway, greedy()))).status == "miss"
    assert note(await answered(Client(gateway, greedy()))).status == "hit"
    cache.invalidate(Scope(tenant="somebody else"))
    assert note(await answered(Client(gateway, greedy()))).status == "hit"
    for scope in (Scope(), Scope(model="fake"), Scope(tenant="default", model="fake")):
        cache.invalidate(scope)
        assert note(await answered(Client(gateway, greedy()))).status == "miss"


# Twins.


async def test_a_thousand_twins_are_one_generation(
    gateway: Gateway, backend: FakeBackend, cache: ResponseCache
) -> None:
    early = [Client(gateway, greedy(id=f"req-{i}")) for i in range(500)]
    await quiet()
    (call,) = backend.calls
    call.start()
    call.token()
    await quiet()
    late = [Client(gateway, greedy(id=f"req-{i}")) for i in range(500, 1000)]
    await quiet()
    call.token()
    call.finish()
    for client in (*early, *late):
        await answered(client)
    assert len(backend.calls) == 1
    whole = bare(early[0].events)
    assert all(bare(client.events) == whole for client in (*early, *late))
    statuses = [note(client).status for client in (*early, *late)]
    assert statuses.count("miss") == 1
    assert statuses.count("coalesced") == 999
    assert (cache.counters.coalesced, cache.counters.misses) == (999, 1)
    assert cache.counters.saved_completion_tokens == 999
    assert outcomes(gateway) == {"stop": 1000}
    assert samples(gateway)["headrace_generation_tokens_total"] == 1


async def test_a_leader_that_leaves_takes_nobody_along(
    gateway: Gateway, backend: FakeBackend
) -> None:
    clients = [Client(gateway, greedy()) for _ in range(3)]
    await quiet()
    (call,) = backend.calls
    call.start()
    call.token()
    await quiet()
    await clients[0].leave()
    await clients[1].leave()
    call.token()
    call.finish()
    await answered(clients[2])
    assert len([e for e in clients[2].events if isinstance(e, Delta)]) == 2
    assert note(await answered(Client(gateway, greedy()))).status == "hit"


@pytest.mark.parametrize("started", [False, True])
async def test_when_the_last_one_leaves_the_work_ends(
    gateway: Gateway, backend: FakeBackend, started: bool
) -> None:
    clients = [Client(gateway, greedy()) for _ in range(3)]
    await quiet()
    (call,) = backend.calls
    if started:
        call.start()
        call.token()
        await quiet()
    for client in clients:
        await client.leave()
    await quiet()
    assert call.closed


async def test_twins_that_all_leave_in_the_queue_leave_nothing(
    gateway: Gateway, backend: FakeBackend
) -> None:
    running = [Client(gateway, request((1, i))) for i in range(2)]
    twins = [Client(gateway, greedy()) for _ in range(4)]
    await quiet()
    for client in (*twins, *running):
        await client.leave()
    await quiet()
    assert all(call.closed for call in backend.calls)


@pytest.mark.parametrize("error", [BackendFailed("x"), BackendUnavailable("x"), ValueError("x")])
async def test_a_breakdown_before_the_first_event_is_tried_again_once(
    gateway: Gateway, backend: FakeBackend, error: Exception
) -> None:
    clients = [Client(gateway, greedy()) for _ in range(4)]
    await quiet()
    backend.calls[0].say(error)
    await quiet()
    assert len(backend.calls) == 2
    backend.calls[1].answer()
    for client in clients:
        await answered(client)
    assert len(backend.calls) == 2


async def test_a_second_breakdown_is_everyones(gateway: Gateway, backend: FakeBackend) -> None:
    clients = [Client(gateway, greedy()) for _ in range(4)]
    for number in range(2):
        await quiet()
        backend.calls[number].say(BackendFailed("broken"))
    for client in clients:
        await client.done()
        assert isinstance(client.error, BackendFailed)
    assert len({id(client.error) for client in clients}) == 4, "each has its own"
    assert len(backend.calls) == 2


async def test_a_failure_midway_is_everyones_and_nothing_is_kept(
    gateway: Gateway, backend: FakeBackend
) -> None:
    clients = [Client(gateway, greedy()) for _ in range(4)]
    await quiet()
    backend.calls[0].start()
    backend.calls[0].token()
    await quiet()
    clients.append(Client(gateway, greedy()))
    backend.calls[0].say(BackendFailed("broken"))
    for client in clients:
        await client.done()
        assert isinstance(client.error, BackendFailed)
        assert any(isinstance(event, Delta) for event in client.events)
    assert len(backend.calls) == 1
    backend.auto = True
    assert note(await answered(Client(gateway, greedy()))).status == "miss"


async def test_a_refusal_is_everyones_at_once(gateway: Gateway, backend: FakeBackend) -> None:
    long = greedy("x" * 500)
    clients = [Client(gateway, long) for _ in range(3)]
    for client in clients:
        await client.done()
        assert isinstance(client.error, HeadraceError)
        assert client.error.code == "context_length_exceeded"
    assert not backend.calls


async def test_a_slow_follower_delays_nobody(gateway: Gateway, backend: FakeBackend) -> None:
    slow = gateway.generate(greedy(), DEFAULT_TENANT)
    fast = Client(gateway, greedy())
    await quiet()
    (call,) = backend.calls
    call.start()
    await slow.__anext__()
    for _ in range(3):
        call.token()
    call.finish()
    await answered(fast)
    assert len([event async for event in slow]) == len(fast.events) - 1


async def test_the_urgent_do_not_join_what_waits_behind_them(
    backend: FakeBackend, clock: VirtualClock
) -> None:
    gateway = small_gateway(backend, clock, cache=small_cache(clock))
    tenant = replace(DEFAULT_TENANT, highest_class=PriorityClass.SYSTEM)
    running = [Client(gateway, request((1, i))) for i in range(2)]
    patient = [Client(gateway, greedy(), tenant, Terms(x_priority="batch")) for _ in range(2)]
    urgent = [Client(gateway, greedy(), tenant, Terms(x_priority="system")) for _ in range(2)]
    patient.append(Client(gateway, greedy(), tenant, Terms(x_priority="batch")))
    await quiet()
    await running[0].leave()
    await quiet()
    assert len(backend.calls) == 3
    assert backend.calls[2].request.priority == PriorityClass.SYSTEM
    backend.calls[2].answer()
    for client in (*urgent, patient[2]):
        await answered(client)
    for client in (*patient, running[1]):
        await client.leave()
    await gateway.close()


async def test_each_twin_has_its_own_deadline(
    gateway: Gateway, backend: FakeBackend, clock: VirtualClock
) -> None:
    hasty = Client(gateway, greedy(arrival=clock.monotonic()), terms=Terms(timeout_s=0.01))
    calm = Client(gateway, greedy(arrival=clock.monotonic()))
    await hasty.done()
    assert isinstance(hasty.error, DeadlineExceeded)
    backend.calls[0].answer()
    await answered(calm)
    assert len(backend.calls) == 1


async def test_twins_drawn_by_chance_are_not_shared_unless_allowed(
    backend: FakeBackend, clock: VirtualClock
) -> None:
    for coalesce, calls in (("deterministic", 2), ("off", 2), ("all", 1)):
        policy = CachePolicy(coalesce=coalesce)  # type: ignore[arg-type]  # one of the literals
        gateway = small_gateway(backend, clock, cache=small_cache(clock, policy))
        backend.calls.clear()
        clients = [Client(gateway, request("hello")) for _ in range(2)]
        await quiet()
        assert len(backend.calls) == calls
        for call in backend.calls:
            call.answer()
        for client in clients:
            await answered(client)
        await gateway.close()
        backend.state = State.READY


async def test_two_tenants_share_no_generation(gateway: Gateway, backend: FakeBackend) -> None:
    clients = [Client(gateway, greedy(), Tenant(name)) for name in ("a", "b")]
    await quiet()
    assert len(backend.calls) == 2
    for call in backend.calls:
        call.answer()
    for client in clients:
        await answered(client)


async def test_a_drain_lets_twins_finish_and_then_ends_them(
    gateway: Gateway, backend: FakeBackend
) -> None:
    clients = [Client(gateway, greedy(messages=(Message("user", "hi"),))) for _ in range(3)]
    await quiet()
    backend.calls[0].start()
    backend.calls[0].token()
    await quiet()
    await gateway.drain(0.0)
    for client in clients:
        await client.done()
        assert isinstance(client.error, HeadraceError)
    await quiet()
    assert backend.calls[0].closed
