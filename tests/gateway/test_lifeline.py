from __future__ import annotations

import asyncio

import pytest

from headrace.gateway.lifeline import Lifeline
from support.gateway import quiet

pytestmark = pytest.mark.anyio


class Ended(Exception):
    pass


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def value() -> int:
    return 3


async def test_an_interrupt_ends_the_wait_and_leaves_the_task_whole() -> None:
    life = Lifeline()

    async def holder() -> int:
        with pytest.raises(Ended):
            await life.wait(never)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)
        return await life.wait(value)

    task = asyncio.create_task(holder())
    await quiet()
    life.interrupt(Ended())
    life.interrupt(ValueError("the second one does not count"))
    assert await task == 3


async def test_between_waits_the_next_one_is_ended_before_it_begins() -> None:
    life = Lifeline()
    assert await life.wait(value) == 3
    life.interrupt(Ended())
    with pytest.raises(Ended):
        await life.wait(value)


@pytest.mark.parametrize("first", ["cancel", "interrupt"])
async def test_a_cancellation_by_others_wins(first: str) -> None:
    life = Lifeline()
    task = asyncio.create_task(life.wait(never))
    await quiet()
    if first == "cancel":
        task.cancel()
        life.interrupt(Ended())
    else:
        life.interrupt(Ended())
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_what_swallows_the_cancellation_only_delays_it() -> None:
    life = Lifeline()

    async def stubborn() -> int:
        try:
            await never()
        except asyncio.CancelledError:
            return 3
        return 0

    async def holder() -> None:
        assert await life.wait(stubborn) == 3
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        with pytest.raises(Ended):
            await life.wait(value)

    task = asyncio.create_task(holder())
    await quiet()
    life.interrupt(Ended())
    await task


async def test_it_works_inside_a_timeout() -> None:
    life = Lifeline()

    async def holder() -> str:
        try:
            async with asyncio.timeout(60):
                await life.wait(never)
        except Ended:
            return "ended"
        return "went on"

    task = asyncio.create_task(holder())
    await quiet()
    life.interrupt(Ended())
    assert await task == "ended"
