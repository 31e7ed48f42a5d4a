"""The real process, spoken to frame by frame."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.engine.child import Child
from headrace.engine.wire import (
    Abort,
    Alive,
    EngineConfig,
    EngineMessage,
    Failed,
    Fault,
    FrontMessage,
    Output,
    Progress,
    Ready,
    SetTargets,
    Step,
)
from support.hash_engine import answer, submit

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

LIMIT_S = 20.0


class Talk:
    """One engine process and all that it has said so far."""

    def __init__(self) -> None:
        self.said: list[EngineMessage] = []
        self.closed = False
        self._news = asyncio.Event()

    def hear(self, message: EngineMessage) -> None:
        self.said.append(message)
        self._news.set()

    def end(self) -> None:
        self.closed = True
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                assert not self.closed, f"closed after {self.said}"
                self._news.clear()
                await self._news.wait()

    def heard(self, kind: type[EngineMessage]) -> bool:
        return any(isinstance(message, kind) for message in self.said)

    def steps(self) -> list[Step]:
        return [message for message in self.said if isinstance(message, Step)]

    def outputs(self, seq: int) -> list[Output]:
        return [output for step in self.steps() for output in step.outputs if output.seq == seq]

    def ended(self, seq: int) -> bool:
        return any(output.finish or output.error for output in self.outputs(seq))


@asynccontextmanager
async def engine(
    builder: str, *, model_path: str = "hash", fault_hooks: bool = True
) -> AsyncIterator[tuple[Talk, Child]]:
    talk = Talk()
    config = EngineConfig(model_path=model_path, model_name="hash", fault_hooks=fault_hooks)
    child = await Child.spawn(config, builder, talk.hear, talk.end)
    try:
        yield talk, child
    finally:
        await child.destroy()
        assert not exists(child.pid)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def send(child: Child, *messages: FrontMessage) -> None:
    child.channel.send(messages)


async def exit_status(child: Child) -> int:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.shield(child.exited)


async def test_stages_then_ready_then_answers(hash_builder: str) -> None:
    async with engine(hash_builder) as (talk, child):
        await talk.until(lambda: talk.heard(Ready))
        stages = [message.stage for message in talk.said if isinstance(message, Progress)]
        assert list(dict.fromkeys(stages)) == ["load_weights", "reserve_kv", "warm_up"]
        for seq in range(3):
            send(child, submit(seq, f"prompt {seq}", max_tokens=30))
        await talk.until(lambda: all(talk.ended(seq) for seq in range(3)))
        for seq in range(3):
            ids = [token for output in talk.outputs(seq) for token in output.token_ids]
            assert ids == answer(list(f"prompt {seq}".encode()), 30)


async def test_idle_says_that_it_lives_and_does_not_spin(hash_builder: str) -> None:
    async with engine(hash_builder) as (talk, child):
        await talk.until(lambda: talk.heard(Ready))
        before = cpu_seconds(child.pid)
        await talk.until(lambda: sum(isinstance(m, Alive) for m in talk.said) >= 2)
        assert cpu_seconds(child.pid) - before < 0.3
        assert not talk.steps()


async def test_an_abort_frees_blocks_within_a_step(hash_builder: str) -> None:
    async with engine(hash_builder) as (talk, child):
        send(child, submit(1, "A" * 100, max_tokens=4000), submit(2, "B" * 100, max_tokens=4000))
        await talk.until(lambda: len(talk.outputs(2)) > 5)
        send(child, Abort([1, 2]))
        await talk.until(lambda: talk.steps()[-1].stats.blocks_used == 0)
        last = talk.steps()[-1]
        assert last.stats.running == last.stats.waiting == 0
        assert not talk.ended(1)
        send(child, submit(3, "C", max_tokens=3))
        await talk.until(lambda: talk.ended(3))


async def test_targets_reach_the_planner(hash_builder: str) -> None:
    async with engine(hash_builder) as (talk, child):
        send(child, SetTargets(max_step_tokens=7, max_running=1))
        send(child, submit(1, "A" * 21, max_tokens=1))
        await talk.until(lambda: talk.ended(1))
        assert [step.stats.prefill_tokens for step in talk.steps()][-3:] == [7, 7, 7]


@pytest.mark.parametrize(
    ("path", "fatal", "message"),
    [("missing", True, "the model is not there"), ("broken", False, "the disk hiccups")],
)
async def test_a_failed_load_is_told(
    hash_builder: str, path: str, fatal: bool, message: str
) -> None:
    async with engine(hash_builder, model_path=path) as (talk, child):
        assert await exit_status(child) == 1
        (failed,) = [message for message in talk.said if isinstance(message, Failed)]
        assert failed.fatal is fatal
        assert message in failed.message


async def test_a_builder_that_does_not_exist_is_fatal() -> None:
    async with engine("headrace.nowhere:build") as (talk, child):
        assert await exit_status(child) == 1
        (failed,) = [message for message in talk.said if isinstance(message, Failed)]
        assert failed.fatal


async def test_an_exception_in_the_loop_is_told(hash_builder: str) -> None:
    async with engine(hash_builder) as (talk, child):
        send(child, Fault("raise"))
        assert await exit_status(child) == 1
        (failed,) = [message for message in talk.said if isinstance(message, Failed)]
        assert not failed.fatal
        assert "Traceback" not in failed.message


async def test_faults_need_the_hook(hash_builder: str) -> None:
    async with engine(hash_builder, fault_hooks=False) as (talk, child):
        send(child, Fault("raise"), Fault("exit"), submit(1, max_tokens=2))
        await talk.until(lambda: talk.ended(1))


async def test_term_and_interrupt_are_the_fronts_business(hash_builder: str) -> None:
    async with engine(hash_builder) as (talk, child):
        # At once, while the interpreter still starts, and later.
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGINT)
        await talk.until(lambda: talk.heard(Ready))
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGINT)
        send(child, submit(1, max_tokens=5))
        await talk.until(lambda: talk.ended(1))


async def test_asked_to_stop_it_leaves_in_peace(hash_builder: str) -> None:
    async with engine(hash_builder) as (talk, child):
        send(child, submit(1, max_tokens=4000))
        await talk.until(lambda: len(talk.outputs(1)) > 0)
        async with asyncio.timeout(LIMIT_S):
            assert await child.stop(grace=LIMIT_S) == 0


async def test_stopping_a_hung_one_kills_it(hash_builder: str) -> None:
    async with engine(hash_builder) as (talk, child):
        await talk.until(lambda: talk.heard(Ready))
        send(child, Fault("hang"))
        async with asyncio.timeout(LIMIT_S):
            assert await child.stop(grace=0.1) == -signal.SIGKILL


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_it_exits_when_the_front_is_gone(hash_builder: str, busy: bool) -> None:
    async with engine(hash_builder) as (talk, child):
        await talk.until(lambda: talk.heard(Ready))
        if busy:
            send(child, submit(1, max_tokens=4000))
            await talk.until(lambda: len(talk.outputs(1)) > 0)
        child.channel.abort()
        assert await exit_status(child) == 0


async def test_even_a_hung_one_exits_when_the_front_is_gone(hash_builder: str) -> None:
    async with engine(hash_builder) as (talk, child):
        await talk.until(lambda: talk.heard(Ready))
        send(child, Fault("hang"))
        await child.channel.drain()
        child.channel.close()
        assert await exit_status(child) == 1


FRONT = """
import asyncio, sys
from headrace.engine.child import Child
from headrace.engine.wire import EngineConfig, Fault, Ready

async def main():
    ready = asyncio.Event()
    config = EngineConfig(model_path="hash", model_name="hash", fault_hooks=True)
    child = await Child.spawn(
        config, sys.argv[1], lambda m: ready.set() if isinstance(m, Ready) else None, ready.set
    )
    await ready.wait()
    child.channel.send([Fault("hang")])
    print(child.pid, flush=True)
    await child.exited

raise RuntimeError("imported by the engine") if __name__ != "__main__" else asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for a parent's death signal")
def test_a_killed_front_leaves_no_orphan(hash_builder: str, tmp_path: Path) -> None:
    script = tmp_path / "front.py"
    script.write_text(FRONT)
    front = subprocess.Popen([sys.executable, script, hash_builder], stdout=subprocess.PIPE)
    with front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # not even its watching thread can run
        front.kill()
    deadline = time.monotonic() + LIMIT_S
    while running(pid):
        assert time.monotonic() < deadline, "the engine outlived its front"


def running(pid: int) -> bool:
    """False for a zombie too: it has ended, and its reaper is not ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
