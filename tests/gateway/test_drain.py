"""Shutting down: those inside may finish, those outside are sent away."""

from __future__ import annotations

import asyncio

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.errors import ShuttingDown
from headrace.core.events import Usage
from headrace.core.health import State
from headrace.gateway import DEFAULT_TENANT, Gateway
from support.backend import FakeBackend, request
from support.gateway import Client, assert_nothing_left, outcomes, quiet, small_gateway

pytestmark = pytest.mark.anyio


async def test_who_runs_or_waits_may_finish_within_the_grace(
    gateway: Gateway, backend: FakeBackend
) -> None:
    inside = [Client(gateway, request()) for _ in range(6)]
    await quiet()
    drained = asyncio.create_task(gateway.drain(60))
    await quiet()
    assert gateway.draining
    assert gateway.health().state is not State.READY

    late = Client(gateway, request())
    await late.done()
    assert isinstance(late.error, ShuttingDown)
    assert late.error.status == 503
    assert late.error.retry_after_s
    with pytest.raises(ShuttingDown):
        await gateway.detokenize(DEFAULT_TENANT, "fake", [1])

    assert not drained.done()
    backend.auto = True
    for call in backend.open:
        call.answer()
    await drained
    for client in inside:
        await client.done()
        assert isinstance(client.events[-1], Usage)
    assert outcomes(gateway) == {"stop": 6, "refused_shutting_down": 1}
    assert_nothing_left(gateway, backend)


@pytest.mark.parametrize("grace", [0.0, 0.02])
async def test_after_the_grace_everybody_gets_an_error(
    gateway: Gateway, backend: FakeBackend, grace: float
) -> None:
    clients = [Client(gateway, request()) for _ in range(6)]
    await quiet()
    backend.calls[0].start()
    backend.calls[0].token()
    await quiet()
    await gateway.drain(grace)
    for client in clients:
        await client.done()
        assert isinstance(client.error, ShuttingDown)
        assert not client.task.cancelled()
    assert len(clients[0].events) == 2
    assert_nothing_left(gateway, backend)
    await gateway.close()
    assert backend.closed


async def test_a_second_call_cuts_the_first_short(gateway: Gateway, backend: FakeBackend) -> None:
    client = Client(gateway, request())
    await quiet()
    patient = asyncio.create_task(gateway.drain(600))
    await quiet()
    await gateway.drain(0)
    await patient
    assert isinstance(client.error, ShuttingDown)
    assert_nothing_left(gateway, backend)


async def test_a_reader_that_pauses_gets_the_error_when_it_comes_back(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.gateway.gateway._FAREWELL_S", 0.01)
    gateway = small_gateway(backend, VirtualClock())
    backend.auto = True
    stream = gateway.generate(request(), DEFAULT_TENANT)
    await anext(stream)
    await gateway.close()
    with pytest.raises(ShuttingDown):
        await anext(stream)
    assert outcomes(gateway) == {"failed": 1}
    assert_nothing_left(gateway, backend)


async def test_closing_twice_is_closing_once(backend: FakeBackend) -> None:
    gateway = small_gateway(backend, VirtualClock())
    await gateway.close()
    await gateway.close()
    assert gateway.draining
