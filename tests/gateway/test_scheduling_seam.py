"""What a scheduler with a will of its own may do to a request: take a turn back, or end it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.errors import DeadlineExceeded, Overloaded
from headrace.core.events import Usage
from headrace.core.request import Request
from headrace.gateway import Gateway
from headrace.scheduling import Claim, Cost, Interrupt, QueueStats, Revoked
from support.backend import FakeBackend, request
from support.gateway import Client, outcomes, quiet, small_gateway

pytestmark = pytest.mark.anyio


class Wilful:
    """Gives every turn at once, and keeps the means to take it back. One request at a time."""

    def __init__(self) -> None:
        self.estimate: Cost | None = None
        self.turns: list[Cost] = []
        self.log: list[str] = []
        self.tokens = 0

    def admit(self, request: Request, cost: Cost, claim: Claim, interrupt: Interrupt) -> Wilful:
        del request, claim
        self.estimate = cost
        self.interrupt = interrupt
        return self

    def stats(self) -> QueueStats:
        return QueueStats(0, 0)

    async def turn(self, cost: Cost) -> None:
        self.turns.append(cost)

    def started(self, cached_tokens: int = 0) -> None:
        del cached_tokens
        self.log.append("started")

    def generated(self, tokens: int) -> None:
        self.tokens += tokens

    def choice_finished(self, *, natural: bool = True) -> None:
        del natural
        self.log.append("choice finished")

    def release(self) -> None:
        self.log.append("released")


@pytest.fixture
def scheduler() -> Wilful:
    return Wilful()


@pytest.fixture
async def gateway(backend: FakeBackend, scheduler: Wilful) -> AsyncIterator[Gateway]:
    gateway = small_gateway(backend, VirtualClock())
    (lane,) = gateway._lanes
    gateway._lanes._lanes = (replace(lane, scheduler=scheduler),)
    yield gateway
    await gateway.close()


async def test_a_scheduler_sees_the_whole_life(
    gateway: Gateway, backend: FakeBackend, scheduler: Wilful
) -> None:
    backend.auto = True
    await Client(gateway, request("a" * 40, n=2)).done()
    assert scheduler.estimate == Cost(2, 10, 8, exact=False)
    assert scheduler.turns == [Cost(2, 41, 8, exact=True)]
    assert scheduler.log == ["started", "choice finished", "choice finished", "released"]


async def test_a_revoked_turn_is_cancelled_at_the_backend_and_waited_for_again(
    gateway: Gateway, backend: FakeBackend, scheduler: Wilful
) -> None:
    client = Client(gateway, request())
    await quiet()
    for _ in range(2):
        scheduler.interrupt(Revoked())
        await quiet()
    assert [call.closed for call in backend.calls] == [True, True, False]
    assert scheduler.log == []
    backend.calls[2].answer()
    await client.done()
    assert client.error is None
    assert isinstance(client.events[-1], Usage)
    assert len(scheduler.turns) == 3
    assert outcomes(gateway) == {"stop": 1}


@pytest.mark.parametrize("started", [False, True])
async def test_a_scheduler_may_end_a_request_with_an_error(
    gateway: Gateway,
    backend: FakeBackend,
    scheduler: Wilful,
    started: bool,
) -> None:
    client = Client(gateway, request())
    await quiet()
    if started:
        backend.calls[0].start()
        await quiet()
    scheduler.interrupt(DeadlineExceeded("Too late.") if started else Overloaded("Pushed out."))
    await client.done()
    assert isinstance(client.error, DeadlineExceeded if started else Overloaded)
    assert backend.open == []
    assert scheduler.log[-1] == "released"
    assert outcomes(gateway) == {"failed" if started else "refused_overloaded": 1}
