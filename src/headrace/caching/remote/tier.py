"""Entries in Redis."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from typing import TYPE_CHECKING

from headrace.caching.base import TierStats
from headrace.caching.entry import CorruptEntryError, Entry, pack, unpack
from headrace.caching.remote.link import Link, RemoteDownError, end
from headrace.core.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from redis.asyncio import Redis
    from redis.asyncio.client import Pipeline

__all__ = ["RedisTier"]

_MAC_BYTES = 16
_BATCH = 64
_PATIENCE = 20.0
"""Nobody waits for writes."""
_BATCH_BYTES = 1 << 20
"""Packing more at once would hold up the loop."""
_LONGEST_S = 1e9
_PAUSE_S = 0.5
_CLOSE_S = 1.0


class RedisTier:
    """Reads within the link's bound, writes behind. A value is believed only with a code made from
    the secret and the key it was asked by: nobody without the secret can plant an answer, and one
    under another key is none. Event loop only."""

    name = "redis"

    def __init__(
        self,
        link: Link,
        secret: bytes,
        clock: Clock,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._link = link
        self._secret = hashlib.blake2b(secret, digest_size=32, person=b"headrace-redis").digest()
        self._clock = clock
        self._sleep = sleep
        self._waiting: dict[bytes, Entry | None] = {}
        self._waiting_bytes = 0
        self._removals = 0
        self._something = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._hits = self._misses = self._stores = self._dropped = 0

    async def start(self) -> None:
        self._task = asyncio.create_task(self._write())

    async def get(self, key: bytes) -> Entry | None:
        entry = await self._look(key)
        if entry is None or entry.expires <= self._clock.wall():
            self._misses += 1
            return None
        self._hits += 1
        return entry

    def put(self, key: bytes, entry: Entry) -> None:
        settings = self._link.settings
        if (
            entry.size > settings.max_entry_bytes
            or len(self._waiting) >= settings.most_waiting
            or self._waiting_bytes + entry.size > settings.most_waiting_bytes
            or not self._link.healthy
        ):
            self._dropped += 1
            return
        self._stores += 1
        self._wait(key, entry)

    def remove(self, key: bytes) -> None:
        self._removals += 1
        while len(self._waiting) >= 4 * self._link.settings.most_waiting:
            self._done(next(iter(self._waiting)))
            self._dropped += 1
        self._wait(key, None)

    def stats(self) -> TierStats:
        return TierStats(
            entries=None,
            bytes=None,
            healthy=self._link.healthy,
            hits=self._hits,
            misses=self._misses,
            stores=self._stores,
            failures=self._link.failures,
            dropped=self._dropped,
        )

    async def close(self) -> None:
        """Writes what waits, unless that takes long."""
        task, self._task = self._task, None
        if task is None:
            return
        await end([task])
        try:
            async with asyncio.timeout(_CLOSE_S):
                while self._waiting:
                    await self._write_some()
        except (TimeoutError, RemoteDownError):
            self._dropped += len(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0

    def name_of(self, key: bytes) -> str:
        return f"{self._link.settings.prefix}e1:{key.hex()}"

    async def _look(self, key: bytes) -> Entry | None:
        if key in self._waiting:
            return self._waiting[key]
        removals = self._removals
        try:
            data = await self._link.call(lambda redis: redis.get(self.name_of(key)))
        except RemoteDownError:
            return None
        if data is None or removals != self._removals:  # it may be this one that has gone since
            return None
        entry = self._believed(key, data)
        if entry is None:
            self._link.broken("a value that is none of ours")
        return entry

    def _believed(self, key: bytes, data: object) -> Entry | None:
        if not isinstance(data, bytes):
            return None
        code, packed = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(code, self._code(key, packed)):
            return None
        try:
            return unpack(packed)
        except CorruptEntryError:
            return None

    def _code(self, key: bytes, packed: bytes) -> bytes:
        return hashlib.blake2b(key + packed, digest_size=_MAC_BYTES, key=self._secret).digest()

    async def _write(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._something.wait()
            try:
                while self._waiting:
                    await self._write_some()
            except RemoteDownError:
                await self._sleep(max(_PAUSE_S, self._link.breaker.wait_s()))
                continue
            self._something.clear()

    async def _write_some(self) -> None:
        """Puts are lost if it fails, removals are not: what is gone must not come back. Raises
        RemoteDownError if any failed."""
        batch = self._batch()

        async def send(redis: Redis) -> list[object]:
            pipe = redis.pipeline(transaction=False)
            for key, entry in batch.items():
                self._add(pipe, key, entry)
            return await pipe.execute(raise_on_error=False)

        try:
            results = await self._link.call(send, patience=_PATIENCE)
        except RemoteDownError:
            self._written(batch, set(batch))
            raise
        refused = {
            key for key, result in zip(batch, results, strict=True) if isinstance(result, Exception)
        }
        self._written(batch, refused)
        if refused:
            self._link.broken("a write was refused")
            raise RemoteDownError("refused")

    def _batch(self) -> dict[bytes, Entry | None]:
        """The longest waiting; puts that are worth it, and removals."""
        batch: dict[bytes, Entry | None] = {}
        size = 0
        for key, entry in self._waiting.items():
            size += 0 if entry is None else entry.size
            if batch and (size > _BATCH_BYTES or len(batch) == _BATCH):
                break
            batch[key] = entry
        return batch

    def _add(self, pipe: Pipeline, key: bytes, entry: Entry | None) -> None:
        left_s = 0.0 if entry is None else min(entry.expires - self._clock.wall(), _LONGEST_S)
        left_ms = round(1000 * left_s)
        if entry is None or left_ms <= 0:
            pipe.delete(self.name_of(key))
            return
        packed = pack(entry)
        pipe.set(self.name_of(key), self._code(key, packed) + packed, px=left_ms)

    def _written(self, batch: dict[bytes, Entry | None], failed: set[bytes]) -> None:
        """Unless it has changed since, what was in the batch waits no more."""
        for key, entry in batch.items():
            if self._waiting.get(key, batch) is not entry or (key in failed and entry is None):
                continue
            self._done(key)
            self._dropped += key in failed

    def _wait(self, key: bytes, entry: Entry | None) -> None:
        if key in self._waiting:
            self._done(key)
        self._waiting[key] = entry
        self._waiting_bytes += 0 if entry is None else entry.size
        self._something.set()

    def _done(self, key: bytes) -> None:
        entry = self._waiting.pop(key)
        self._waiting_bytes -= 0 if entry is None else entry.size
