"""A stream while it is being written: its pauses, its failures and its reader's absence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from starlette.types import Message

from headrace.api.frames import ChatFrames, ReplyHead, StreamShape
from headrace.api.sse import ABORT, ClientGone, EventStream, until_gone
from headrace.core.errors import BackendFailed, Overloaded
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, Usage
from support.app import events_of

pytestmark = pytest.mark.anyio

HEAD = ReplyHead("id", 1, "m")
FOREVER = 1000.0


class Wire:
    """A server's side of a connection. With `blocked` it takes nothing more."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.pinged = asyncio.Event()
        self.aborted = False
        self.scope: dict[str, Any] = {"type": "http", "extensions": {ABORT: self.abort}}

    def abort(self) -> None:
        self.aborted = True

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.open.wait()
        self.sent.append(message)
        if message.get("body", b"").startswith(b":"):
            self.pinged.set()

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def ended(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", True)


class Source:
    """Events as the test gives them."""

    def __init__(self, *items: Event | Exception) -> None:
        self.queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self.closed = False
        self.say(*items)

    def say(self, *items: Event | Exception | None) -> None:
        for item in items:
            self.queue.put_nowait(item)

    async def stream(self) -> AsyncGenerator[Event]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


START = Start("m", "b", 1)
END = (Finish(0, FinishReason.STOP), Usage(1, 1), None)


def stream(source: Source, *, keep_alive: float = FOREVER, stall: float = FOREVER) -> EventStream:
    frames = ChatFrames(HEAD, StreamShape(1))
    return EventStream(source.stream(), frames, keep_alive=keep_alive, stall=stall)


async def run(response: EventStream, wire: Wire) -> None:
    async with asyncio.timeout(5):
        await response(wire.scope, wire.receive, wire.send)


async def test_a_whole_stream() -> None:
    wire, source = Wire(), Source(START, Delta(0, "hi", (1,)))
    source.say(*END)
    await run(stream(source), wire)
    first = wire.sent[0]
    assert first["status"] == 200
    headers = dict(first["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers
    assert events_of(wire.body)[-1] == "[DONE]"
    assert wire.ended
    assert source.closed


async def test_each_event_is_sent_when_it_comes() -> None:
    wire, source = Wire(), Source(START, Delta(0, "hi", (1,)))
    task = asyncio.create_task(run(stream(source), wire))
    await anyio.wait_all_tasks_blocked()
    assert '"content":"hi"' in wire.body
    source.say(*END)
    await task


async def test_a_refusal_is_raised_before_anything_is_sent() -> None:
    wire, source = Wire(), Source(Overloaded("full"))
    with pytest.raises(Overloaded):
        await run(stream(source), wire)
    assert wire.sent == []
    assert source.closed


@pytest.mark.parametrize(
    ("error", "said"),
    [(BackendFailed("The engine broke."), "The engine broke."), (ZeroDivisionError("secret"), "")],
)
async def test_a_failure_is_the_last_event(error: Exception, said: str) -> None:
    wire, source = Wire(), Source(START, Delta(0, "hi", (1,)), error)
    await run(stream(source), wire)
    events = events_of(wire.body)
    assert events[-1].startswith('{"error":')
    assert said in events[-1]
    assert "[DONE]" not in wire.body
    assert '"finish_reason":"stop"' not in wire.body
    assert "secret" not in wire.body
    assert "ZeroDivision" not in wire.body
    assert wire.ended


async def test_a_stream_that_just_stops_is_a_failure() -> None:
    wire, source = Wire(), Source(START, Delta(0, "hi", (1,)))
    source.say(None)
    await run(stream(source), wire)
    assert '"error"' in events_of(wire.body)[-1]
    assert wire.ended


async def test_a_pause_is_filled_with_comments() -> None:
    wire, source = Wire(), Source(START)
    task = asyncio.create_task(run(stream(source, keep_alive=0.01), wire))
    await wire.pinged.wait()
    source.say(Delta(0, "hi", (1,)), *END)
    await task
    assert ": ping\n" in wire.body
    assert ": ping\n\n" not in wire.body
    assert events_of(wire.body)[-1] == "[DONE]"


async def test_no_comment_before_the_status_is_known() -> None:
    wire, source = Wire(), Source()
    task = asyncio.create_task(run(stream(source, keep_alive=0.001, stall=0.001), wire))
    await asyncio.wait({task}, timeout=0.03)
    assert wire.sent == []
    source.say(Overloaded("full"))
    with pytest.raises(Overloaded):
        await task


async def test_a_reader_that_leaves_ends_the_work() -> None:
    wire, source = Wire(), Source(START, Delta(0, "hi", (1,)))
    task = asyncio.create_task(run(stream(source), wire))
    await anyio.wait_all_tasks_blocked()
    wire.gone.set()
    await task
    assert source.closed
    assert not wire.ended


async def test_a_reader_that_leaves_before_the_first_event_ends_the_work() -> None:
    wire, source = Wire(), Source()
    task = asyncio.create_task(run(stream(source), wire))
    await anyio.wait_all_tasks_blocked()
    wire.gone.set()
    await task
    assert source.closed
    assert wire.sent == []


@pytest.mark.parametrize("blocked_at", ["headers", "event", "ping"])
async def test_a_reader_that_takes_nothing_is_dropped(blocked_at: str) -> None:
    wire, source = Wire(), Source()
    if blocked_at == "headers":
        wire.open.clear()
    keep_alive = 0.01 if blocked_at == "ping" else FOREVER
    task = asyncio.create_task(run(stream(source, keep_alive=keep_alive, stall=0.03), wire))
    source.say(START)
    await anyio.wait_all_tasks_blocked()
    wire.open.clear()
    if blocked_at == "event":
        source.say(Delta(0, "hi", (1,)))
    await task
    assert source.closed
    assert wire.aborted


async def test_cancelling_the_request_closes_the_events() -> None:
    wire, source = Wire(), Source(START)
    task = asyncio.create_task(run(stream(source), wire))
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert source.closed


async def test_until_gone_returns_the_result() -> None:
    wire = Wire()

    async def work() -> int:
        return 5

    assert await until_gone(wire.receive, work()) == 5


async def test_until_gone_passes_on_the_failure() -> None:
    wire = Wire()

    async def work() -> int:
        raise Overloaded("full")

    with pytest.raises(Overloaded):
        await until_gone(wire.receive, work())


async def test_until_gone_ends_the_work_first() -> None:
    wire = Wire()
    trace = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            trace.append("cleaned up")

    task = asyncio.create_task(until_gone(wire.receive, work()))
    await anyio.wait_all_tasks_blocked()
    wire.gone.set()
    with pytest.raises(ClientGone):
        await task
    assert trace == ["cleaned up"]
