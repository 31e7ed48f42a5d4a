"""Overload is refused at once, and what is admitted is bounded."""

from __future__ import annotations

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.errors import Overloaded
from headrace.gateway import Gateway
from support.backend import FakeBackend, request
from support.gateway import Client, assert_nothing_left, outcomes, quiet, samples, small_gateway

pytestmark = pytest.mark.anyio

IDS = (1, 2, 3)
"""Of a text the cost is but estimated at first; of equal costs the newcomer is refused."""


async def test_two_running_and_four_waiting_and_the_rest_refused(
    gateway: Gateway, backend: FakeBackend
) -> None:
    clients = [Client(gateway, request(IDS, id=f"r{i}")) for i in range(50)]
    await quiet()
    refused = [client for client in clients if client.task.done()]
    assert len(refused) == 44
    assert refused == clients[6:]
    for client in refused:
        assert isinstance(client.error, Overloaded)
        assert client.error.status == 503
        assert client.error.retry_after_s is not None
        assert 1 <= client.error.retry_after_s <= 60
        assert client.events == []
    before = samples(gateway)
    assert before["vllm:num_requests_running"] == 2
    assert before["vllm:num_requests_waiting"] == 4
    assert before["headrace_requests_total{completion,refused_overloaded}"] == 44

    await clients[5].leave()
    another = Client(gateway, request(IDS, id="another"))
    beyond = Client(gateway, request(IDS, id="beyond"))
    await beyond.done()
    assert isinstance(beyond.error, Overloaded)

    backend.auto = True
    for call in backend.open:
        call.answer()
    for client in [*clients[:5], another]:
        await client.done()
        assert client.error is None
    assert [call.request.id for call in backend.calls][-1] == "another"
    assert outcomes(gateway) == {"stop": 6, "cancelled": 1, "refused_overloaded": 45}
    assert_nothing_left(gateway, backend)


async def test_each_choice_takes_a_place(gateway: Gateway, backend: FakeBackend) -> None:
    four = Client(gateway, request(IDS, n=4))
    singles = [Client(gateway, request(IDS)) for _ in range(3)]
    await quiet()
    assert [client.task.done() for client in singles] == [False, False, True]
    assert isinstance(singles[2].error, Overloaded)
    backend.auto = True
    for call in backend.open:
        call.answer()
    for client in (four, *singles[:2]):
        await client.done()
        assert client.error is None
    assert_nothing_left(gateway, backend)


async def test_more_choices_than_the_server_holds_run_alone(
    gateway: Gateway, backend: FakeBackend
) -> None:
    giant = Client(gateway, request(IDS, n=16))
    await quiet()
    assert len(backend.calls) == 1
    other = Client(gateway, request(IDS))
    await other.done()
    assert isinstance(other.error, Overloaded)
    backend.calls[0].answer()
    await giant.done()
    assert giant.error is None
    assert_nothing_left(gateway, backend)


async def test_tokenising_counts_so_that_a_flood_of_long_texts_is_bounded(
    gateway: Gateway, backend: FakeBackend
) -> None:
    clients = [Client(gateway, request("a" * 100_000)) for _ in range(50)]
    for client in clients[6:]:
        await client.done()
        assert isinstance(client.error, Overloaded)
    for client in clients[:6]:
        await client.done()
    assert backend.codec is not None
    assert len(backend.codec.threads) == 6
    assert_nothing_left(gateway, backend)


async def test_who_is_refused_is_told_when_to_come_back(backend: FakeBackend) -> None:
    clock = VirtualClock()
    gateway = small_gateway(backend, clock)
    for seconds in (12, 40):
        first = Client(gateway, request(IDS))
        await quiet()
        backend.calls[-1].start()
        clock.advance(seconds)
        backend.calls[-1].token()
        backend.calls[-1].finish()
        await first.done()
        crowd = [Client(gateway, request(IDS)) for _ in range(7)]
        await crowd[6].done()
        assert isinstance(crowd[6].error, Overloaded)
        assert crowd[6].error.retry_after_s is not None
        assert 0.8 <= crowd[6].error.retry_after_s <= 72
        for client in crowd:
            await client.leave()
    await gateway.close()
