"""The books: every request is counted once, under how it ended."""

from __future__ import annotations

import logging

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.errors import BackendFailed, Overloaded
from headrace.core.events import FinishReason
from headrace.gateway import Gateway
from support.backend import FakeBackend, request
from support.gateway import Client, assert_nothing_left, outcomes, quiet, samples

pytestmark = pytest.mark.anyio


async def test_left_refused_failed_and_answered_are_told_apart(
    gateway: Gateway, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.max_running = 6
    with caplog.at_level(logging.INFO, "headrace.request"):
        streams = [
            Client(gateway, request((1, 2, 3, 4, 5, 6), id=f"stream-{i}", user="mallory"))
            for i in range(5)
        ]
        failing = Client(gateway, request((1, 2, 3, 4, 5, 6)))
        fillers = [Client(gateway, request((1, 2, 3, 4, 5, 6))) for _ in range(2)]
        queued = Client(gateway, request((1, 2, 3, 4, 5, 6), id="queued"))
        another = Client(gateway, request((1, 2, 3, 4, 5, 6)))
        refused = Client(gateway, request((1, 2, 3, 4, 5, 6)))
        await quiet()
        assert isinstance(refused.error, Overloaded)
        assert len(backend.calls) == 8

        await queued.leave()
        for call, client in zip(backend.calls, streams, strict=False):
            call.start()
            call.token()
            await quiet()
            await client.leave()
        backend.calls[5].say(BackendFailed("broken"))
        await failing.done()
        backend.calls[6].start()
        backend.calls[6].token()
        backend.calls[6].finish(FinishReason.LENGTH)
        for call in backend.calls[7:]:
            call.answer()
        for client in (*fillers, another):
            await client.done()

    assert outcomes(gateway) == {
        "cancelled": 6,
        "refused_overloaded": 1,
        "failed": 1,
        "length": 1,
        "stop": 2,
    }
    books = samples(gateway)
    assert books["headrace_time_to_first_token_seconds_count"] == 8
    assert books["headrace_request_generation_tokens_count"] == 8
    assert books["headrace_request_generation_tokens_sum"] == 8
    assert books["headrace_generation_tokens_total"] == 8
    assert (
        books["headrace_request_prompt_tokens_sum"]
        == books["headrace_prompt_tokens_total"]
        == 8 * 6
    )
    assert_nothing_left(gateway, backend)
    assert "mallory" not in gateway.exposition().decode()

    lines = [record.__dict__["fields"] for record in caplog.records]
    assert len(lines) == 11
    assert sum(line["outcome"] == "cancelled" for line in lines) == 6
    (left,) = (line for line in lines if line["id"] == "queued")
    assert left["queue_ms"] is None


async def test_times_are_those_of_the_request(
    gateway: Gateway, backend: FakeBackend, clock: VirtualClock
) -> None:
    backend.max_running = 1
    ahead = [Client(gateway, request()) for _ in range(3)]
    client = Client(gateway, request())
    await quiet()
    clock.advance(2.0)
    backend.auto = True
    for call in backend.open:
        call.answer()
    backend.auto = False
    for other in ahead:
        await other.done()
    await quiet()
    (call,) = backend.open
    clock.advance(0.5)
    call.start()
    call.token()
    await quiet()
    for gap in (0.1, 0.3):
        clock.advance(gap)
        call.token()
        await quiet()
    call.finish()
    await client.done()

    books = samples(gateway)
    assert books["headrace_queue_time_seconds_sum"] == pytest.approx(2.0)
    assert books["headrace_time_to_first_token_seconds_sum"] == pytest.approx(3 * 2.0 + 2.5)
    assert books["headrace_prefill_time_seconds_sum"] == pytest.approx(3 * 2.0 + 0.5)
    assert books["headrace_decode_time_seconds_sum"] == pytest.approx(0.4)
    assert books["headrace_inter_token_latency_seconds_count"] == 2
    assert books["headrace_inter_token_latency_seconds_sum"] == pytest.approx(0.4)
    assert books["headrace_e2e_request_latency_seconds_sum"] == pytest.approx(3 * 2.0 + 2.9)
