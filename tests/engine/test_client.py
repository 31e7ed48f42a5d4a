"""Supervision with a real engine process: crash, hang, restart, drain, and what readers hear."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from headrace.core.errors import BackendFailed, BackendUnavailable, ShuttingDown
from headrace.core.health import State
from headrace.core.request import SamplingParams
from headrace.engine.client import EngineClient
from headrace.engine.mailbox import Mailbox
from headrace.engine.stages import StageLog
from headrace.engine.supervisor import Timings
from headrace.engine.wire import EngineConfig, Output, StepStats
from support.hash_engine import answer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

LIMIT_S = 20.0
PROMPT = list(b"hello")
ENDLESS = 4000


class Watcher:
    """Keeps what an observer is told and lets tests wait for it."""

    def __init__(self) -> None:
        self.stats: list[StepStats] = []
        self.restarts: list[str] = []
        self._news = asyncio.Event()

    def on_step(self, stats: StepStats) -> None:
        self.stats.append(stats)
        self._news.set()

    def on_restart(self, reason: str) -> None:
        self.restarts.append(reason)
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def client(
    builder: str, *, hang_timeout: float = 10.0, model_path: str = "hash", start: bool = True
) -> AsyncIterator[tuple[EngineClient, Watcher]]:
    watcher = Watcher()
    engine = EngineClient(
        EngineConfig(model_path=model_path, model_name="hash", fault_hooks=True, max_running=8),
        timings=Timings(hang_timeout=hang_timeout, first_backoff=0.05),
        builder=builder,
        observer=watcher,
    )
    pids = set()
    try:
        if start:
            await engine.start()
            pids.add(engine.pid)
        yield engine, watcher
    finally:
        pids.add(engine.pid)
        await engine.close(0.0)
        for pid in pids - {None}:
            assert pid is not None
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def ask(engine: EngineClient, tokens: int, *, seeds: tuple[int, ...] = (0,)) -> Mailbox:
    return await engine.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=tokens), seeds)


async def read(box: Mailbox) -> dict[int, list[int]]:
    """All token ids by sequence, to the end of each."""
    ids: dict[int, list[int]] = {seq: [] for seq in box.seqs}
    left = set(box.seqs)
    async with asyncio.timeout(LIMIT_S):
        while left:
            for output in await box.take():
                ids[output.seq] += output.token_ids
                assert output.error is None
                if output.finish is not None:
                    left.remove(output.seq)
    return ids


async def first(box: Mailbox) -> list[Output]:
    async with asyncio.timeout(LIMIT_S):
        return await box.take()


async def drain(box: Mailbox) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            await box.take()


async def test_answers_many_at_once(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, watcher):
        assert engine.health().state is State.READY
        stages = [(str(entry.stage), entry.fraction) for entry in engine.health().progress]
        assert stages == [("load_weights", 1.0), ("reserve_kv", 1.0), ("warm_up", 1.0)]
        boxes = [await ask(engine, tokens) for tokens in range(1, 21)]
        answers = await asyncio.gather(*map(read, boxes))
        for tokens, got in enumerate(answers, 1):
            assert list(got.values()) == [answer(PROMPT, tokens)]
        assert engine.open_sequences == 0
        await watcher.until(lambda: watcher.stats[-1].blocks_used == 0)
        assert len(engine.recent_step_s) > 20


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
@pytest.mark.usefixtures("anyio_backend")
async def test_on_the_loop_that_serve_uses(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, watcher):
        box = await ask(engine, ENDLESS)
        await first(box)
        engine.inject_fault("exit")
        with pytest.raises(BackendFailed):
            await drain(box)
        await watcher.until(lambda: engine.health().state is State.READY)
        assert list((await read(await ask(engine, 500))).values()) == [answer(PROMPT, 500)]


async def test_choices_share_a_mailbox(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, _):
        got = await read(await ask(engine, 9, seeds=(1, 2, 3)))
        assert len(got) == 3
        assert all(ids == answer(PROMPT, 9) for ids in got.values())


async def test_abort_frees_the_engine_and_silences_the_mailbox(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, watcher):
        box = await ask(engine, ENDLESS, seeds=(1, 2))
        await first(box)
        engine.abort(box)
        engine.abort(box)
        assert engine.open_sequences == 0
        await watcher.until(lambda: watcher.stats[-1].running == 0)
        assert watcher.stats[-1].blocks_used == 0
        assert list((await read(await ask(engine, 3))).values()) == [answer(PROMPT, 3)]


async def test_a_cancelled_submit_leaves_nothing(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, watcher):
        tasks = [asyncio.create_task(ask(engine, ENDLESS)) for _ in range(8)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Mailbox):
                engine.abort(result)
        assert engine.open_sequences == 0
        await read(await ask(engine, 3))
        await watcher.until(lambda: watcher.stats[-1].running == 0)


@pytest.mark.parametrize("how", ["raise", "exit", "kill", "hang", "stop"])
async def test_a_lost_engine_is_told_at_once_and_replaced(hash_builder: str, how: str) -> None:
    async with client(hash_builder, hang_timeout=0.5) as (engine, watcher):
        old = engine.pid
        assert old is not None
        boxes = [await ask(engine, ENDLESS) for _ in range(3)]
        await asyncio.gather(*map(first, boxes))
        if how in ("kill", "stop"):
            os.kill(old, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        else:
            engine.inject_fault(how)
        for box in boxes:
            with pytest.raises(BackendFailed) as failure:
                await drain(box)
            for word in ("Traceback", "Error", "fault", "signal"):
                assert word not in failure.value.message
        assert engine.health().state is State.RESTARTING
        assert engine.open_sequences == 0
        with pytest.raises(BackendUnavailable) as refusal:
            await ask(engine, 1)
        assert refusal.value.retry_after_s is not None
        assert refusal.value.retry_after_s >= 1
        await watcher.until(lambda: engine.health().state is State.READY)
        assert engine.pid != old
        with pytest.raises(ProcessLookupError):
            os.kill(old, 0)
        assert len(watcher.restarts) == 1
        assert list((await read(await ask(engine, 5))).values()) == [answer(PROMPT, 5)]


async def test_totals_never_fall_over_a_restart(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, watcher):
        for _ in range(2):
            await read(await ask(engine, 40))
            before = watcher.stats[-1].prefix_queries_total
            assert before > 0
            engine.inject_fault("exit")
            await watcher.until(lambda: engine.health().state is State.RESTARTING)
            await watcher.until(lambda: engine.health().state is State.READY)
            assert watcher.stats[-1].prefix_queries_total == before
        await read(await ask(engine, 1))
        totals = [stats.prefix_queries_total for stats in watcher.stats]
        assert totals == sorted(totals)
        assert totals[-1] == 3 * len(PROMPT)


async def test_idle_is_healthy(hash_builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without work is heard of far more often than the hang timeout asks for."""
    async with client(hash_builder, hang_timeout=1.0) as (engine, watcher):
        liveness = engine._supervisor._liveness
        heard = liveness.heard
        words = asyncio.Semaphore(0)

        def count(step_seconds: float = 0.0) -> None:
            words.release()
            heard(step_seconds)

        monkeypatch.setattr(liveness, "heard", count)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(10):
                await words.acquire()
        assert engine.health().state is State.READY
        assert not watcher.restarts


async def test_a_model_that_cannot_be_loaded_says_why(hash_builder: str) -> None:
    async with client(hash_builder, model_path="missing", start=False) as (engine, watcher):
        with pytest.raises(BackendUnavailable, match="the model is not there"):
            await engine.start()
        assert engine.health().state is State.FAILED
        assert "the model is not there" in engine.health().detail
        with pytest.raises(BackendUnavailable):
            await ask(engine, 1)
        assert not watcher.restarts


async def test_while_loading_it_is_not_ready(hash_builder: str) -> None:
    async with client(hash_builder, start=False) as (engine, _):
        with pytest.raises(BackendUnavailable):
            await ask(engine, 1)
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        assert engine.health().state is State.STARTING
        with pytest.raises(BackendUnavailable) as refusal:
            await ask(engine, 1)
        assert refusal.value.retry_after_s
        async with asyncio.timeout(LIMIT_S):
            await starting
        assert engine.health().state is State.READY


async def test_cancelling_the_start_ends_the_process(
    hash_builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: asyncio.Queue[int] = asyncio.Queue()

    def report(stages: StageLog, *_: object) -> None:
        assert stages is engine._supervisor._stages
        assert engine.pid is not None
        spawned.put_nowait(engine.pid)

    monkeypatch.setattr(StageLog, "report", report)
    async with client(hash_builder, start=False) as (engine, _):
        starting = asyncio.create_task(engine.start())
        async with asyncio.timeout(LIMIT_S):
            pid = await spawned.get()
            starting.cancel()
            await asyncio.wait({starting})
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_closing_while_it_starts(hash_builder: str) -> None:
    async with client(hash_builder, start=False) as (engine, _):
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        await engine.close(0.0)
        with pytest.raises(ShuttingDown):
            await starting


async def test_close_lets_running_requests_finish(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, _):
        box = await ask(engine, 500)
        closing = asyncio.create_task(engine.close(LIMIT_S))
        await asyncio.sleep(0)
        assert engine.health().state is State.CLOSED
        with pytest.raises(ShuttingDown):
            await ask(engine, 1)
        assert list((await read(box)).values()) == [answer(PROMPT, 500)]
        async with asyncio.timeout(LIMIT_S):
            await closing
        assert engine.pid is None


async def test_close_ends_what_outlasts_the_grace(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, _):
        box = await ask(engine, ENDLESS)
        await first(box)
        async with asyncio.timeout(LIMIT_S):
            await engine.close(0.01)
        with pytest.raises(ShuttingDown):
            await drain(box)


async def test_a_second_close_shortens_the_first(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, _):
        engine.inject_fault("hang")  # so that nothing ends by itself
        box = await ask(engine, ENDLESS)
        closing = asyncio.create_task(engine.close(3600.0))
        await asyncio.sleep(0)
        async with asyncio.timeout(LIMIT_S):
            await engine.close(0.0)
            await closing
        with pytest.raises(ShuttingDown):
            await drain(box)


async def test_a_crash_while_closing_is_not_followed_by_a_restart(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, watcher):
        box = await ask(engine, ENDLESS)
        await first(box)
        closing = asyncio.create_task(engine.close(LIMIT_S))
        await asyncio.sleep(0)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(BackendFailed):
            await drain(box)
        async with asyncio.timeout(LIMIT_S):
            await closing
        assert not watcher.restarts
        assert engine.health().state is State.CLOSED


async def test_a_reader_that_sleeps_stalls_nobody(hash_builder: str) -> None:
    async with client(hash_builder) as (engine, _):
        sleeper = await ask(engine, 2000)
        assert list((await read(await ask(engine, 20))).values()) == [answer(PROMPT, 20)]
        ids = (await read(sleeper))[sleeper.seqs.start]
        assert ids == answer(PROMPT, 2000)
