"""Overload is refused at once, and what is admitted is bounded."""

from __future__ import annotations

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.errors import Overloaded
from headrace.gateway import Gateway
from support.backend import FakeBackend, request
from support.gateway import Client, assert_nothing_left, outcomes, quiet, samples, small_gateway

pytestmark = pytest.mark.anyio


async def test_two_running_and_four_waiting_and_the_rest_refused(
    gateway: Gateway, backend: FakeBackend
) -> None:
    clients = [Client(gateway, request(id=f"r{i}")) for i in range(50)]
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
    another = Client(gateway, request(id="another"))
    beyond = Client(gateway, request(id="beyond"))
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
    four = Client(gateway, request(n=4))
    singles = [Client(gateway, request()) for _ in range(3)]
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
    giant = Client(gateway, request(n=16))
    await quiet()
    assert len(backend.calls) == 1
    other = Client(gateway, request())
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


async def test_retry_after_is_the_predicted_drain(backend: FakeBackend) -> None:
    clock = VirtualClock()
    gateway = small_gateway(backend, clock)
    first = Client(gateway, request())
    await quiet()
    clock.advance(12)
    backend.calls[0].answer()
    await first.done()

    crowd = [Client(gateway, request()) for _ in range(7)]
    await crowd[6].done()
    assert isinstance(crowd[6].error, Overloaded)
    # Two wait and one more asks; the four with the backend take twelve seconds each.
    assert crowd[6].error.retry_after_s == pytest.approx(3 * 12 / 4)
    await gateway.close()
