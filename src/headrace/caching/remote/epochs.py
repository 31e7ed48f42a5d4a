"""The counters of invalidation, the same on all servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.caching.epochs import Epochs
from headrace.caching.remote.bulletin import RedisBulletin
from headrace.caching.remote.link import Link, RemoteDownError, end

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["SharedEpochs"]

_KIND = "epoch"
_PATIENCE = 20.0
_PAUSE_S = 0.5
_CLOSE_S = 0.5
_MOST = 1 << 53
"""Beyond it a counter in Redis is not exact any more, so it is none of ours."""
_FORWARD = """
local known = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
if known == nil or known < 0 or known >= 9007199254740992 then known = 0 end
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
        """Tells what is not told yet, unless that takes long."""
        task, self._task = self._task, None
        if task is None:
            return
        await end([task])
        with suppress(TimeoutError, RemoteDownError):
            async with asyncio.timeout(_CLOSE_S):
                await self._move_all()

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
        if epoch >= _MOST:
            return
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
                await self._move_all()
                if self._reload:
                    await self._exchange()
            except RemoteDownError:
                self._something.set()
                await self._sleep(max(_PAUSE_S, self._link.breaker.wait_s()))

    async def _move_all(self) -> None:
        while self._moved:
            name = self._moved.pop()  # before it is sent: it may move again meanwhile
            try:
                await self._move(name, 1)
            except BaseException:
                self._moved.add(name)
                raise

    async def _move(self, name: str, by: int) -> None:
        own = self._epochs.table().get(name, 0)

        async def forward(redis: Redis) -> int:
            return int(await redis.eval(_FORWARD, 1, self._hash, name, str(own), str(by)))

        epoch = await self._link.call(forward, patience=_PATIENCE)
        self._learn(name, epoch)
        self._bulletin.publish(_KIND, msgspec.msgpack.encode((name, epoch)))

    async def _exchange(self) -> None:
        """Takes what is larger there, and gives what is larger here: Redis may have forgotten."""
        self._reload = False  # before it is read: there may be a gap meanwhile
        try:
            shared = await self._link.call(self._table, patience=_PATIENCE)
            for name, epoch in shared.items():
                self._learn(name, epoch)
            for name, own in self._epochs.table().items():
                if name not in self._moved and own > shared.get(name, 0):
                    await self._move(name, 0)
        except BaseException:
            self._reload = True
            raise

    async def _table(self, redis: Redis) -> dict[str, int]:
        """What is in Redis; what cannot be a counter is not."""
        found: dict[str, int] = {}
        table: Any = await redis.hgetall(self._hash)
        for name, epoch in table.items():
            with suppress(ValueError):
                found[name.decode()] = int(epoch)
        return found

    @property
    def _hash(self) -> str:
        return f"{self._link.settings.prefix}epochs1"
