"""Several streams of events as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import anyio
import pytest

from headrace.api.merge import closing, merge
from headrace.core.errors import InvalidRequest
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, Usage

pytestmark = pytest.mark.anyio


class Source:
    """A stream that the test feeds; `closed` once its reader is done with it."""

    def __init__(self, *items: Event | Exception) -> None:
        self.queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.closed = False
        self.say(*items)

    def say(self, *items: Event | Exception) -> None:
        for item in items:
            self.queue.put_nowait(item)

    async def stream(self) -> AsyncGenerator[Event]:
        try:
            while True:
                item = await self.queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, Usage):
                    return
        finally:
            self.closed = True


def start(prompt_tokens: int) -> Start:
    return Start("m", "b", prompt_tokens, 1)


END = (Finish(0, FinishReason.STOP, "x"), Finish(1, FinishReason.LENGTH))


async def test_indexes_and_sums() -> None:
    a = Source(start(3), Delta(0, "a", (1,)), Delta(1, "b", (1,)), *END, Usage(3, 2, 1))
    b = Source(start(5), Delta(1, "c", (1,), prompt=True), *END, Usage(5, 4, 2))
    events = [event async for event in merge([a.stream(), b.stream()], 2)]
    assert events[0] == Start("m", "b", 8, 2)
    assert events[-1] == Usage(8, 6, 3)
    assert sorted(e.index for e in events if isinstance(e, Finish)) == [0, 1, 2, 3]
    assert Delta(3, "c", (1,), prompt=True) in events
    assert Finish(2, FinishReason.STOP, "x") in events


async def test_nothing_comes_before_all_have_started() -> None:
    a, b = Source(start(3), Delta(0, "a")), Source()
    merged = merge([a.stream(), b.stream()], 1)
    first = asyncio.ensure_future(anext(merged))
    await anyio.wait_all_tasks_blocked()
    assert not first.done()
    b.say(start(4))
    assert await first == Start("m", "b", 7, 2)
    assert await anext(merged) == Delta(0, "a")
    await merged.aclose()
    assert a.closed
    assert b.closed


async def test_a_refusal_of_one_comes_first_and_ends_the_others() -> None:
    a, b = Source(start(3), Delta(0, "a")), Source(InvalidRequest("too long"))
    merged = merge([a.stream(), b.stream()], 1)
    with pytest.raises(InvalidRequest):
        await anext(merged)
    assert a.closed
    assert b.closed


async def test_a_failure_of_one_ends_all() -> None:
    a, b = Source(start(3)), Source(start(3))
    merged = merge([a.stream(), b.stream()], 1)
    await anext(merged)
    b.say(InvalidRequest("broke"))
    with pytest.raises(InvalidRequest):
        await anext(merged)
    assert a.closed


async def test_a_stream_cut_short_gives_no_usage() -> None:
    async def short() -> AsyncGenerator[Event]:
        yield start(1)

    events = [event async for event in merge([short(), short()], 1)]
    assert events == [Start("m", "b", 2, 2)]


async def test_a_reader_that_is_slow_holds_the_streams_back() -> None:
    sources = [Source(start(1)) for _ in range(2)]
    async with closing(merge([s.stream() for s in sources], 1)) as merged:
        await anext(merged)
        for source in sources:
            source.say(*[Delta(0, "x")] * 1000)
        await anext(merged)
        await anyio.wait_all_tasks_blocked()
        taken = sum(1000 - source.queue.qsize() for source in sources)
        assert taken < 100
        for _ in range(1999):
            await anext(merged)


async def test_cancelling_the_reader_closes_all() -> None:
    a, b = Source(start(1)), Source(start(1))

    async def read() -> None:
        async with closing(merge([a.stream(), b.stream()], 1)) as merged:
            async for _ in merged:
                pass

    task = asyncio.create_task(read())
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    await asyncio.wait([task])
    assert a.closed
    assert b.closed
