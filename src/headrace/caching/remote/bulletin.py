"""What servers tell each other: a stream that all of them write and read."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headrace.caching.base import Handler
from headrace.caching.remote.link import Link, RemoteDownError, end

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["RedisBulletin"]

_PATIENCE = 20.0
_BATCH = 256
_BLOCK_S = 2.0
_PAUSE_S = 0.5
_CLOSE_S = 0.5
_START = b"0-0"

_log = logging.getLogger(__name__)


class RedisBulletin:
    """Messages are kept while the server is away, up to a number, and sent when it is back. A
    reader goes on where it was; if what it was at is no longer there, `on_gap` is called, as it is
    when the first connection is made. Event loop only."""

    def __init__(
        self, link: Link, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._link = link
        self._sleep = sleep
        self._handlers: dict[str, list[Handler]] = {}
        self._gap_handlers: list[Callable[[], None]] = []
        self._outgoing: deque[tuple[str, bytes]] = deque()
        self._something = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._position: bytes | None = None
        self.connected = False
        self.lost = 0
        """Messages of this server that there was no room to keep."""

    def publish(self, kind: str, message: bytes) -> None:
        self._outgoing.append((kind, message))
        if len(self._outgoing) > self._link.settings.log_length:
            self._outgoing.popleft()
            self.lost += 1
        self._something.set()

    def subscribe(self, kind: str, handler: Handler) -> None:
        self._handlers.setdefault(kind, []).append(handler)

    def on_gap(self, handler: Callable[[], None]) -> None:
        self._gap_handlers.append(handler)

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._listen())]

    async def close(self) -> None:
        """Writes what waits, unless that takes long."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        await end(tasks)
        with suppress(TimeoutError, RemoteDownError):
            async with asyncio.timeout(_CLOSE_S):
                while self._outgoing:
                    await self._write_some()

    @property
    def _name(self) -> str:
        return f"{self._link.settings.prefix}log1"

    async def _write(self) -> None:
        while True:
            await self._something.wait()
            try:
                while self._outgoing:
                    await self._write_some()
            except RemoteDownError:
                await self._sleep(max(_PAUSE_S, self._link.breaker.wait_s()))
                continue
            self._something.clear()

    async def _write_some(self) -> None:
        batch = list(self._outgoing)[:_BATCH]

        async def send(redis: Redis) -> None:
            pipe = redis.pipeline(transaction=False)
            for kind, message in batch:
                fields: dict[Any, Any] = {b"k": kind.encode(), b"m": message}
                pipe.xadd(self._name, fields, maxlen=self._link.settings.log_length)
            await pipe.execute()

        await self._link.call(send, patience=_PATIENCE)
        # What came meanwhile is at the end; what was pushed out is gone from the front.
        for item in batch:
            if self._outgoing and self._outgoing[0] is item:
                self._outgoing.popleft()

    async def _listen(self) -> None:
        while True:
            patience = _BLOCK_S + _PATIENCE * self._link.settings.timeout_s
            client = self._link.client(
                max_connections=2, socket_timeout=patience, socket_connect_timeout=1.0, timeout=1.0
            )
            try:
                await self._follow(client, patience)
            except Exception as error:  # noqa: BLE001 - whatever it was, it is tried again
                if self.connected:
                    _log.info(
                        "no news from %s: %s", self._link.settings.place, type(error).__name__
                    )
            finally:
                self.connected = False
                await self._link.close_client(client)
            await self._sleep(_PAUSE_S)

    async def _follow(self, client: Redis, patience: float) -> None:
        """Reads until it fails."""
        if self._position == _START:
            self._position = None  # while nobody looked, an empty log may have begun and ended
        await self._link.bounded(self._resume(client), patience)
        self.connected = True
        while True:
            at = self._position or _START
            reading = client.xread({self._name: at}, count=_BATCH, block=round(1000 * _BLOCK_S))
            read: Any = await self._link.bounded(reading, patience)
            if not read:
                await self._link.bounded(self._resume(client), patience)
                continue
            ((_, messages),) = read
            # Trimming leaves more than a batch: where less is to be read, nothing was skipped.
            if len(messages) == _BATCH and not await self._link.bounded(
                self._is_there(client, at), patience
            ):
                self._gap()
            for number, fields in messages:
                self._position = number
                if fields:
                    kind = fields.get(b"k", b"").decode(errors="replace")
                    self._tell(kind, fields.get(b"m", b""))

    async def _resume(self, client: Redis) -> None:
        """Finds the place in the log, and calls it a gap where there is no such place."""
        if self._position is not None and await self._is_there(client, self._position):
            return
        latest: Any = await client.xrevrange(self._name, count=1)
        self._position = latest[0][0] if latest else _START
        self._gap()

    def _gap(self) -> None:
        for handler in self._gap_handlers:
            handler()

    async def _is_there(self, client: Redis, position: bytes) -> bool:
        if position == _START:
            # The log was empty. It must begin with its first message, or nothing was missed yet.
            return int(await client.xlen(self._name)) < self._link.settings.log_length
        return bool(await client.xrange(self._name, position, position, count=1))

    def _tell(self, kind: str, message: bytes) -> None:
        for handler in self._handlers.get(kind, ()):
            try:
                handler(message)
            except Exception as error:  # noqa: BLE001 - one message must not end all news
                _log.error("news of kind %s could not be used: %s", kind, type(error).__name__)
