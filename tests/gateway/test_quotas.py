"""Limits of a tenant at work: refused before anything is done, and given back in every state."""

from __future__ import annotations

import pytest

from headrace.config import LimitSettings, Settings, TenantSettings
from headrace.core.clock import VirtualClock
from headrace.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    QuotaExceeded,
)
from headrace.core.request import PriorityClass
from headrace.gateway import Gateway
from headrace.gateway.claims import Terms
from headrace.telemetry import Metrics
from support.backend import FakeBackend, request
from support.gateway import Client, assert_nothing_left, outcomes, quiet

pytestmark = pytest.mark.anyio

IDS = (1, 2, 3, 4)


def limited(backend: FakeBackend, clock: VirtualClock, **limits: object) -> Gateway:
    tenant = TenantSettings.model_validate({"name": "default", **limits})
    settings = Settings(tenants=(tenant,), limits=LimitSettings(max_queue=8))
    return Gateway([backend], settings, clock=clock, metrics=Metrics())


async def test_a_limit_refuses_with_the_exact_time_and_others_are_not_asked(
    backend: FakeBackend, clock: VirtualClock
) -> None:
    gateway = limited(backend, clock, requests_per_minute=2)
    tenant = gateway.authenticate(None)
    backend.auto = True
    for _ in range(2):
        client = Client(gateway, request(IDS), tenant)
        await client.done()
        assert client.error is None
    beyond = Client(gateway, request("a" * 100_000), tenant)
    await beyond.done()
    assert isinstance(beyond.error, QuotaExceeded)
    assert beyond.error.retry_after_s == pytest.approx(30)
    assert beyond.error.reason == "requests_per_minute"
    assert backend.codec is not None
    assert backend.codec.threads == [], "refused before tokenising"
    limits = gateway.ratelimit(tenant)
    assert limits is not None
    assert (limits.limit_requests, limits.remaining_requests) == (2, 0)
    assert outcomes(gateway) == {"stop": 2, "refused_quota": 1}
    await gateway.close()


@pytest.mark.parametrize("end", ["answer", "leave early", "leave late", "break"])
async def test_what_was_not_used_is_given_back_however_it_ends(
    backend: FakeBackend, clock: VirtualClock, end: str
) -> None:
    gateway = limited(backend, clock, tokens_per_minute=1000, max_concurrency=1)
    tenant = gateway.authenticate(None)
    client = Client(gateway, request(IDS, sampling={"max_tokens": 100}), tenant)
    await quiet()
    during = gateway.ratelimit(tenant)
    assert during is not None
    assert during.remaining_tokens is not None
    assert during.remaining_tokens < 1000 - len(IDS)
    (call,) = backend.calls
    if end != "leave early":
        call.start()
        call.token()
    if end == "answer":
        call.finish()
        await client.done()
    elif end == "break":
        call.say(RuntimeError("broken"))
        await client.done()
    else:
        await quiet()
        await client.leave()
    after = gateway.ratelimit(tenant)
    assert after is not None
    used = 0 if end == "leave early" else len(IDS) + 1
    assert after.remaining_tokens == pytest.approx(1000 - used)
    assert gateway._quotas.concurrency("default") == 0
    assert_nothing_left(gateway, backend)
    await gateway.close()


async def test_a_refusal_at_overload_does_not_count_against_the_tenant(
    backend: FakeBackend, clock: VirtualClock
) -> None:
    gateway = limited(backend, clock, requests_per_minute=100)
    tenant = gateway.authenticate(None)
    clients = [Client(gateway, request(IDS), tenant) for _ in range(14)]
    await quiet()
    held = [client for client in clients if not client.task.done()]
    assert len(held) < len(clients)
    limits = gateway.ratelimit(tenant)
    assert limits is not None
    assert limits.remaining_requests == 100 - len(held)
    for client in held:
        await client.leave()
    assert_nothing_left(gateway, backend)
    await gateway.close()


@pytest.mark.parametrize(("requests", "choices"), [(3, 3), (1, 5), (2, 6)])
async def test_a_call_that_can_never_pass_whole_is_told_so(
    backend: FakeBackend, clock: VirtualClock, requests: int, choices: int
) -> None:
    gateway = limited(backend, clock, requests_per_minute=2, max_concurrency=4)
    tenant = gateway.authenticate(None)
    gateway.require_possible(tenant, 2, 4)
    with pytest.raises(InvalidRequest) as refusal:
        gateway.require_possible(tenant, requests, choices)
    assert refusal.value.code == "exceeds_quota"
    await gateway.close()


async def test_a_model_that_is_not_allowed_does_not_exist(
    backend: FakeBackend, clock: VirtualClock
) -> None:
    gateway = limited(backend, clock, models=["other"])
    tenant = gateway.authenticate(None)
    assert gateway.models(tenant) == ()
    with pytest.raises(ModelNotFound):
        gateway.model(tenant, "fake")
    client = Client(gateway, request(IDS), tenant)
    await client.done()
    assert isinstance(client.error, ModelNotFound)
    with pytest.raises(ModelNotFound):
        await gateway.detokenize(tenant, "fake", [1])
    await gateway.close()


async def test_terms_become_the_engines_order(backend: FakeBackend, clock: VirtualClock) -> None:
    gateway = limited(backend, clock, highest_class="system")
    tenant = gateway.authenticate(None)
    backend.max_running = 8
    backend.auto = True
    for terms, wanted in (
        (Terms(priority=-2), PriorityClass.SYSTEM),
        (Terms(x_priority="batch"), PriorityClass.BATCH),
        (Terms(), PriorityClass.STANDARD),
    ):
        client = Client(gateway, request(IDS, priority=5), tenant, terms)
        await client.done()
        assert backend.calls[-1].request.priority == wanted
    await gateway.close()


async def test_a_deadline_that_has_passed_is_refused_at_once(
    backend: FakeBackend, clock: VirtualClock
) -> None:
    gateway = limited(backend, clock)
    clock.advance(10)
    client = Client(
        gateway, request(IDS, arrival=0.0), gateway.authenticate(None), Terms(timeout_s=5)
    )
    await client.done()
    assert isinstance(client.error, DeadlineExceeded)
    assert backend.calls == []
    await gateway.close()
