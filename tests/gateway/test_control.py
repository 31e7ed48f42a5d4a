"""What the gateway learns of a backend, and what it does about it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.backends.base import SteerableBackend, StepReport
from headrace.core.clock import VirtualClock
from headrace.core.errors import BackendFailed, BackendUnavailable
from headrace.core.request import PriorityClass, Request
from headrace.gateway import DEFAULT_TENANT, Gateway
from support.backend import FakeBackend, request
from support.gateway import Client, assert_nothing_left, quiet, samples, small_gateway

pytestmark = pytest.mark.anyio

IDS = tuple(range(1, 13))


class SteeredBackend(FakeBackend):
    """Does what it is told, and remembers it."""

    def __init__(self) -> None:
        super().__init__(max_running=64)
        self.step_limits = (256, 64)
        self.on_cpu = True
        self.listeners: list[Callable[[StepReport], None]] = []
        self.targets: list[tuple[int, int]] = []
        self.preempted: list[str] = []
        self.cached = 0

    def listen(self, on_step: Callable[[StepReport], None]) -> None:
        self.listeners.append(on_step)

    def set_targets(self, *, max_step_tokens: int, max_running: int) -> None:
        self.targets.append((max_step_tokens, max_running))

    def preempt(self, request_id: str) -> None:
        self.preempted.append(request_id)

    def cached_tokens(self, request: Request) -> int:
        assert request.prompt_token_ids is not None
        return self.cached

    def step(self, seconds: float, prefill: int = 0, decodes: int = 0, context: int = 0) -> None:
        for listener in self.listeners:
            listener(StepReport(seconds, prefill, decodes, context, 0))


async def test_steps_follow_a_target_that_is_set_and_loosened_while_running() -> None:
    backend, clock = SteeredBackend(), VirtualClock()
    assert isinstance(backend, SteerableBackend)
    gateway = small_gateway(backend, clock)

    def run(steps: int) -> None:
        for _ in range(steps):
            tokens, running = backend.targets[-1] if backend.targets else (256, 64)
            prefill = max(1, tokens - running)
            seconds = 0.03 + 0.0015 * prefill + 0.002 * running
            clock.advance(seconds)
            backend.step(seconds, prefill, running, running * 100)

    run(300)
    assert all(running == 64 for _, running in backend.targets), "automatic: as many as allowed"
    gateway.configure_scheduling({"itl_target_s": 0.12})
    run(300)
    tokens, running = backend.targets[-1]
    assert running < 64
    assert 0.03 + 0.0015 * (tokens - running) + 0.002 * running <= 0.12
    (lane,) = gateway._lanes
    assert lane.control.capacity() == running
    books = samples(gateway)
    assert books["headrace_scheduler_itl_target_seconds"] == 0.12
    assert books["headrace_scheduler_running_cap"] == running
    assert books["headrace_scheduler_step_token_budget"] == tokens
    assert books["headrace_scheduler_cost_model_error"] < 0.1
    last = gateway.scheduling_trace()[-1]
    assert last["itl_target_s"] == 0.12
    assert "120 ms" in str(last["reason"])

    gateway.configure_scheduling({"itl_target_s": 2.0})
    run(600)
    assert backend.targets[-1] == (256, 64), "loosened, the batch grows to the limit"
    assert lane.control.capacity() == 64
    await gateway.close()


async def test_the_engine_gets_the_class_and_the_queue_is_seen_by_its_owner() -> None:
    backend = SteeredBackend()
    gateway = small_gateway(backend, VirtualClock(), max_queue=8)
    backend.max_running = 1
    clients = [Client(gateway, request(IDS, id=f"r{i}")) for i in range(4)]
    await quiet()
    assert {call.request.priority for call in backend.calls} == {PriorityClass.STANDARD}
    (row,) = gateway.queue_view(DEFAULT_TENANT)
    assert (row.model, row.priority_class, row.flow) == ("fake", "standard", "default")
    assert row.running == len(backend.calls) == 3, "one and two ahead, so that no slot is idle"
    assert (row.depth, row.tokens) == (1, len(IDS))
    backend.auto = True
    for call in backend.calls:
        call.answer()
    for client in clients:
        await client.done()
    assert gateway.queue_view(DEFAULT_TENANT) == []
    assert_nothing_left(gateway, backend)
    await gateway.close()


async def test_what_is_cached_does_not_count_as_work() -> None:
    backend = SteeredBackend()
    backend.cached = 8
    backend.max_running = 1
    gateway = small_gateway(backend, VirtualClock())
    clients = [Client(gateway, request(IDS)) for _ in range(4)]
    await quiet()
    (row,) = gateway.queue_view(DEFAULT_TENANT)
    assert row.tokens == len(IDS) - 8
    for client in clients:
        await client.leave()
    assert_nothing_left(gateway, backend)
    await gateway.close()


@pytest.fixture
def remote() -> FakeBackend:
    """Does not say how much it takes."""
    return FakeBackend(max_running=0)


async def test_the_limit_of_a_silent_backend_is_learnt(remote: FakeBackend) -> None:
    clock = VirtualClock()
    gateway = small_gateway(remote, clock, max_queue=64)
    (lane,) = gateway._lanes
    first = lane.control.capacity()
    clients = [Client(gateway, request(IDS)) for _ in range(40)]
    await quiet()
    assert first <= len(remote.open) <= first + 2
    for _ in range(40):
        for call in remote.open:
            call.start()
            call.token()
        await quiet()
        clock.advance(0.3)
        for call in remote.open:
            call.token()
            call.finish()
        await quiet()
        if all(client.task.done() for client in clients):
            break
    assert lane.control.capacity() > first, "it answered as fast as before, so it may get more"
    assert all(client.error is None for client in clients)
    assert lane.control.limiter.stats().inflight == 0
    assert_nothing_left(gateway, remote)
    await gateway.close()


async def test_one_that_fails_and_fails_is_left_alone_for_a_while(remote: FakeBackend) -> None:
    clock = VirtualClock()
    gateway = small_gateway(remote, clock)
    for _ in range(5):
        client = Client(gateway, request(IDS))
        await quiet()
        remote.calls[-1].say(BackendFailed("broken"))
        await client.done()
        assert isinstance(client.error, BackendFailed)
    refused = Client(gateway, request(IDS))
    await refused.done()
    assert isinstance(refused.error, BackendUnavailable)
    assert refused.error.retry_after_s == pytest.approx(5.0)
    assert len(remote.calls) == 5
    clock.advance(5.1)
    remote.auto = True
    again = Client(gateway, request(IDS))
    await again.done()
    assert again.error is None
    assert_nothing_left(gateway, remote)
    await gateway.close()


@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_leaves_says_nothing_of_the_backend(
    remote: FakeBackend, started: bool
) -> None:
    gateway: Gateway = small_gateway(remote, VirtualClock())
    (lane,) = gateway._lanes
    for _ in range(20):
        client = Client(gateway, request(IDS))
        await quiet()
        if started:
            remote.calls[-1].start()
            await quiet()
        await client.leave()
    assert lane.control.limiter.stats().inflight == 0
    assert lane.control.limiter.wait_s() == 0.0
    assert_nothing_left(gateway, remote)
    await gateway.close()
