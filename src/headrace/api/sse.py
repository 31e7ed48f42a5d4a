"""A stream of server-sent events, written straight to the server and watched while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.api.cache_control import cache_headers
from headrace.api.durations import server_timing
from headrace.api.errors import error_body, internal_error
from headrace.api.frames import Frames
from headrace.api.merge import closing
from headrace.core.errors import BackendFailed, HeadraceError
from headrace.core.events import Event, Start

__all__ = ["ABORT", "ClientGone", "EventStream", "until_gone"]

ABORT = "headrace.abort"
"""ASGI extension: a callable that drops the connection with whatever is still to be sent."""

PING = b": ping\n"
"""A comment line alone: with a blank line after it some clients see an empty event."""

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

log = logging.getLogger(__name__)
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection, or reads nothing; there is no one to answer."""


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientGone as soon as the client leaves: then `work` is cancelled
    and has ended. The request's body must have been read."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _stop(task, gone)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _abort(scope: Scope) -> None:
    abort = (scope.get("extensions") or {}).get(ABORT)
    if abort is not None:
        abort()


class EventStream(Response):
    """Sends `frames` of `events`; one instance for one request, on the event loop.

    Before the first event nothing is sent, and a failure is raised to become a status. After it a
    failure is one more event, and the body ends without [DONE]. While nothing comes a comment is
    sent every `keep_alive` seconds; a client that takes nothing for `stall` seconds is dropped.
    When the client is gone the events are closed, which cancels the work.
    """

    def __init__(
        self, events: AsyncIterator[Event], frames: Frames, *, keep_alive: float, stall: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(HEADERS)
        self._events = events
        self._frames = frames
        self._keep_alive = keep_alive
        self._stall = stall
        self._started = False
        self._sending = False
        self._last = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        watchman = asyncio.create_task(self._watch(send))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait((writer, watchman, gone), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            elif watchman.done():
                watchman.result()
                log.info("dropping a client that reads nothing")
                _abort(scope)
        finally:
            await _stop(writer, watchman, gone)

    async def _write(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        feed = self._frames.feed
        try:
            async with closing(self._events) as events:
                async for event in events:
                    if not self._started:
                        await self._start(send, event)
                    frame = feed(event)
                    if frame:
                        self._last = now()
                        self._sending = True
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
                        self._sending = False
            if not self._frames.complete:
                raise BackendFailed("The backend ended the answer before it was complete.")
        except Exception as error:
            if not self._started:
                raise
            await self._fail(send, error)
        await self._put(send, b"", more=False)

    async def _start(self, send: Send, event: Event) -> None:
        self._started = True
        headers = self.raw_headers
        if isinstance(event, Start):
            timing = (b"server-timing", server_timing(event))
            headers = [*headers, timing, *cache_headers(event.cache)]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, send: Send, error: Exception) -> None:
        if not isinstance(error, HeadraceError):
            log.error("a stream failed", exc_info=error)
            error = internal_error()
        await self._put(send, b"data: " + error_body(error) + b"\n\n")

    async def _watch(self, send: Send) -> None:
        """Returns when the client must be dropped."""
        now = asyncio.get_running_loop().time
        patience = min(self._keep_alive, self._stall)
        self._last = now()
        while True:
            idle = now() - self._last
            if self._sending and idle >= self._stall:
                return
            if self._started and not self._sending and idle >= self._keep_alive:
                try:
                    async with asyncio.timeout(self._stall):
                        await self._put(send, PING)
                except TimeoutError:
                    return
            await asyncio.sleep(patience - min(idle, patience / 2))

    async def _put(self, send: Send, body: bytes, *, more: bool = True) -> None:
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": more})

    async def _send(self, send: Send, message: Message) -> None:
        self._last = asyncio.get_running_loop().time()
        self._sending = True
        await send(message)
        self._sending = False
