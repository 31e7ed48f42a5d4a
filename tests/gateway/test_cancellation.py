"""A client may leave in any state, and others neither notice nor pay."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.events import Event, Finish, FinishReason, Usage
from headrace.gateway import DEFAULT_TENANT, Gateway
from support.backend import FakeBackend, request
from support.gateway import Client, assert_nothing_left, outcomes, quiet, small_gateway

pytestmark = pytest.mark.anyio

LONG = "a" * 1000
"""Long enough to be tokenised in a thread."""


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend(max_running=2)
    backend.models = (replace(backend.models[0], context_length=5000),)
    return backend


async def not_yet_run(gateway: Gateway, backend: FakeBackend) -> Client:
    del backend
    return Client(gateway, request())


async def tokenising(gateway: Gateway, backend: FakeBackend) -> Client:
    assert backend.codec is not None
    backend.codec.gate = threading.Event()
    client = Client(gateway, request(LONG))
    await quiet()
    assert gateway._active
    assert backend.calls == []
    return client


async def before_start(gateway: Gateway, backend: FakeBackend) -> Client:
    client = Client(gateway, request())
    await quiet()
    assert len(backend.open) == 1
    return client


async def in_prefill(gateway: Gateway, backend: FakeBackend) -> Client:
    client = await before_start(gateway, backend)
    backend.calls[0].start()
    await quiet()
    assert len(client.events) == 1
    return client


async def streaming(gateway: Gateway, backend: FakeBackend) -> Client:
    client = await in_prefill(gateway, backend)
    backend.calls[0].token()
    await quiet()
    assert len(client.events) == 2
    return client


async def one_choice_of_two_finished(gateway: Gateway, backend: FakeBackend) -> Client:
    client = Client(gateway, request(n=2))
    await quiet()
    backend.calls[0].start()
    backend.calls[0].say(Finish(0, FinishReason.STOP))
    await quiet()
    return client


async def with_the_end_on_its_way(gateway: Gateway, backend: FakeBackend) -> Client:
    """Its last events are there, but its task has not run since."""
    client = await streaming(gateway, backend)
    backend.calls[0].finish()
    return client


Stage = Callable[[Gateway, FakeBackend], Awaitable[Client]]
STAGES: list[Stage] = [
    not_yet_run,
    tokenising,
    before_start,
    in_prefill,
    streaming,
    one_choice_of_two_finished,
    with_the_end_on_its_way,
]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
async def test_leaving_frees_everything_at_once(
    gateway: Gateway, backend: FakeBackend, stage: Stage
) -> None:
    client = await stage(gateway, backend)
    await client.leave()
    assert backend.codec is not None
    if backend.codec.gate is not None:
        backend.codec.gate.set()
    assert_nothing_left(gateway, backend)
    assert sum(outcomes(gateway).values()) == (stage is not not_yet_run)

    backend.auto = True
    crowd = [Client(gateway, request()) for _ in range(6)]
    for each in crowd:
        await each.done()
    assert [each.error for each in crowd] == [None] * 6


async def test_who_leaves_the_queue_never_reaches_the_backend(
    gateway: Gateway, backend: FakeBackend
) -> None:
    clients = [Client(gateway, request(id=f"r{i}")) for i in range(6)]
    await quiet()
    assert len(backend.calls) == 4
    await clients[4].leave()
    for call in backend.open:
        call.answer()
    await quiet()
    assert [call.request.id for call in backend.calls] == ["r0", "r1", "r2", "r3", "r5"]
    backend.calls[-1].answer()
    for client in clients:
        await client.done()
    assert outcomes(gateway) == {"cancelled": 1, "stop": 5}
    assert_nothing_left(gateway, backend)


@pytest.mark.parametrize("order", [(0, 4), (4, 0)])
async def test_who_makes_room_and_who_would_take_it_leave_together(
    gateway: Gateway, backend: FakeBackend, order: tuple[int, int]
) -> None:
    clients = [Client(gateway, request(id=f"r{i}")) for i in range(6)]
    await quiet()
    for number in order:
        clients[number].task.cancel()
    await quiet()
    assert [call.request.id for call in backend.open] == ["r1", "r2", "r3", "r5"]
    for call in backend.open:
        call.answer()
    for client in clients:
        await asyncio.wait([client.task])
    assert_nothing_left(gateway, backend)


async def test_closing_the_iterator_is_leaving(gateway: Gateway, backend: FakeBackend) -> None:
    untouched = generator(gateway)
    await untouched.aclose()
    stream = generator(gateway)
    first = asyncio.create_task(anext(stream))
    await quiet()
    backend.calls[0].start()
    await first
    await stream.aclose()
    assert outcomes(gateway) == {"cancelled": 1}
    assert_nothing_left(gateway, backend)


async def test_closing_after_the_last_event_is_no_cancellation(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.auto = True
    stream = generator(gateway)
    async for event in stream:
        if isinstance(event, Usage):
            break
    await stream.aclose()
    assert outcomes(gateway) == {"stop": 1}
    assert_nothing_left(gateway, backend)


async def test_a_slot_is_free_at_the_finish_and_not_when_a_slow_reader_has_read_it(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.max_running = 1
    slow = generator(gateway)
    first = asyncio.create_task(anext(slow))
    await quiet()
    backend.calls[0].answer()
    await first
    while not isinstance(await anext(slow), Finish):
        pass
    (lane,) = gateway._lanes
    assert lane.scheduler.stats().dispatched == 0
    await slow.aclose()


def generator(gateway: Gateway) -> AsyncGenerator[Event, None]:
    return gateway.generate(request(), DEFAULT_TENANT)


@pytest.mark.parametrize("seed", range(20))
async def test_random_crowds_leave_nothing_and_are_counted_once(seed: int) -> None:
    rng = random.Random(seed)
    backend = FakeBackend(max_running=3)
    gateway = small_gateway(backend, VirtualClock(), max_queue=8)
    clients: list[Client] = []
    for number in range(60):
        clients.append(Client(gateway, request(id=f"r{number}", n=rng.choice((1, 1, 2, 5)))))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        for call in rng.sample(backend.open, k=rng.randrange(len(backend.open) + 1)):
            act = rng.choice((call.start, call.token, call.answer, lambda: None))
            act()
        if rng.random() < 0.3:
            clients[rng.randrange(len(clients))].task.cancel()
    deadline = 1000
    while any(not client.task.done() for client in clients):
        deadline -= 1
        assert deadline, "somebody hangs"
        for call in backend.open:
            call.answer()
        await quiet()
    assert_nothing_left(gateway, backend)
    begun = sum(outcomes(gateway).values())
    assert 0 < begun <= len(clients)
    whole = sum(isinstance(c.events[-1], Usage) for c in clients if c.events)
    ended = outcomes(gateway)
    assert ended.get("stop", 0) >= whole
    refused = sum(c.error is not None for c in clients)
    assert ended.get("refused_overloaded", 0) == refused
    await gateway.close()
