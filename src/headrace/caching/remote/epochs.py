"""The counters of invalidation, the same on all servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from headrace.caching.epochs import Epochs
from headrace.caching.remote.bulletin import RedisBulletin
from headrace.caching.remote.link import Link, RemoteDownError, end

__all__ = ["SharedEpochs"]

_KIND = "epoch"
_PATIENCE = 20.0
_PAUSE_S = 0.5
_FORWARD = """
local known = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
local moved = math.max(known + tonumber(ARGV[3]), tonumber(ARGV[2]))
if moved > known then redis.call('HSET', KEYS[1], ARGV[1], moved) end
return moved
"""
"""Field, own counter, by how much to move the shared one."""


class SharedEpochs:
    """Ties `epochs` to one hash in Redis. A counter that is moved here counts at once here, and
    moves the shared one by one, so that of two servers that do it at the same time each leaves
    behind what the other stored in between. What is moved while Redis is away is sent later. Event
    loop only."""

    def __init__(
        self,
        epochs: Epochs,
        link: Link,
        bulletin: RedisBulletin,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._epochs = epochs
        self._link = link
        self._bulletin = bulletin
        self._sleep = sleep
        self._hearing = False
        self._moved: set[str] = set()
        self._reload = True
        self._something = asyncio.Event()
        self._something.set()
        self._task: asyncio.Task[None] | None = None
        epochs.listen(self._changed)
        bulletin.subscribe(_KIND, self._heard)
        bulletin.on_gap(self._missed)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end([task])

    def _changed(self, name: str, _: int) -> None:
        if not self._hearing:
            self._moved.add(name)
            self._something.set()

    def _heard(self, message: bytes) -> None:
        with suppress(msgspec.MsgspecError):
            name, epoch = msgspec.msgpack.decode(message, type=tuple[str, int])
            self._learn(name, epoch)

    def _missed(self) -> None:
        self._reload = True
        self._something.set()

    def _learn(self, name: str, epoch: int) -> None:
        self._hearing = True
        try:
            self._epochs.learn(name, epoch)
        finally:
            self._hearing = False

    async def _run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._something.wait()
            self._something.clear()
            try:
                while self._moved:
                    await self._move(next(iter(self._moved)), 1)
                if self._reload:
                    await self._exchange()
            except RemoteDownError:
                self._something.set()
                await self._sleep(max(_PAUSE_S, self._link.breaker.wait_s()))

    async def _move(self, name: str, by: int) -> None:
        own = self._epochs.table().get(name, 0)
        epoch = await self._link.call(
            lambda redis: redis.eval(_FORWARD, 1, self._hash, name, str(own), str(by)),
            patience=_PATIENCE,
        )
        self._moved.discard(name)
        self._learn(name, int(epoch))
        self._bulletin.publish(_KIND, msgspec.msgpack.encode((name, int(epoch))))

    async def _exchange(self) -> None:
        """Takes what is larger there, and gives what is larger here: Redis may have forgotten."""
        shared: Any = await self._link.call(
            lambda redis: redis.hgetall(self._hash), patience=_PATIENCE
        )
        for name, epoch in shared.items():
            self._learn(name.decode(), int(epoch))
        for name, own in self._epochs.table().items():
            if own > int(shared.get(name.encode(), 0)):
                await self._move(name, 0)
        self._reload = False

    @property
    def _hash(self) -> str:
        return f"{self._link.settings.prefix}epochs1"
