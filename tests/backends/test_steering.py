"""Watching and shaping the steps of a real engine process."""

from __future__ import annotations

import asyncio

import pytest

from headrace.backends.base import SteerableBackend, StepReport
from headrace.core.events import Delta, Event
from headrace.core.health import State
from support.engine_backend import (
    LIMIT_S,
    LONG,
    ask,
    asked,
    at_rest,
    backend,
    text_of,
    texts,
    until,
)
from support.hash_engine import answer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


async def test_every_step_is_reported_with_what_it_attended_to(hash_builder: str) -> None:
    async with backend(hash_builder, max_step_tokens=64) as engine:
        assert isinstance(engine, SteerableBackend)
        reports: list[StepReport] = []
        engine.listen(reports.append)
        await ask(engine, asked("hello", max_tokens=4))
        await until(lambda: sum(report.decode_tokens for report in reports) == 3)
        assert [(r.prefill_tokens, r.decode_tokens) for r in reports] == [(5, 0), *[(0, 1)] * 3]
        assert [r.decode_context for r in reports] == [0, 5, 6, 7]
        assert all(report.seconds > 0 for report in reports)
        reports.clear()
        await ask(engine, asked("x" * 100, max_tokens=1))
        await until(lambda: sum(report.prefill_tokens for report in reports) == 100)
        assert [(r.prefill_tokens, r.prefill_context) for r in reports] == [(64, 0), (36, 64)]


async def test_what_is_cached_is_known_before_it_is_asked_for(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:
        assert engine.cached_tokens(asked(LONG)) == 0
        await ask(engine, asked(LONG, max_tokens=1))
        expected = (len(LONG) - 1) // 16 * 16
        await until(lambda: engine.cached_tokens(asked(LONG)) == expected)
        assert engine.cached_tokens(asked(LONG, tenant="other")) == 0
        assert engine.cached_tokens(asked(LONG, prompt_token_ids=None)) == 0
        start = (await ask(engine, asked(LONG, max_tokens=1)))[0]
        assert getattr(start, "cached_tokens", None) == expected


async def test_a_preempted_request_makes_room_and_ends_as_if_alone(hash_builder: str) -> None:
    async with backend(hash_builder, max_running=1) as engine:
        events: list[Event] = []

        async def slow() -> None:
            request = asked("slow", id="slow", max_tokens=600, priority=3)
            async for event in engine.generate(request):
                events.append(event)  # noqa: PERF401 - others look at it as it grows

        task = asyncio.create_task(slow())
        await until(lambda: any(isinstance(event, Delta) for event in events))
        urgent = asyncio.create_task(ask(engine, asked("urgent", max_tokens=2, priority=0)))
        await until(lambda: engine.load().waiting == 1)
        engine.preempt("nobody")
        engine.preempt("slow")
        assert texts(await urgent) == text_of("urgent", 2)
        assert not task.done()
        async with asyncio.timeout(LIMIT_S):
            await task
        assert texts(events) == bytes(answer(list(b"slow"), 600)).decode()
        await at_rest(engine)
        assert engine.client.stats.preemptions_total == 1


async def test_targets_hold_over_a_restart(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:
        assert engine.step_limits == (256, 64)
        engine.set_targets(max_step_tokens=8, max_running=2)
        reports: list[StepReport] = []
        engine.listen(reports.append)
        for _ in range(2):
            reports.clear()
            await ask(engine, asked("x" * 32, max_tokens=1, cache_salt=str(len(reports))))
            assert {report.prefill_tokens for report in reports} == {8}
            engine.client.inject_fault("exit")
            await until(lambda: engine.health().state is State.RESTARTING)
            assert engine.cached_tokens(asked("x" * 32)) == 0
            engine.set_targets(max_step_tokens=8, max_running=2)  # while it is away
            await until(lambda: engine.health().state is State.READY)
