"""The whole cache of two replicas."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.caching import CachePolicy, Epochs, KeyMaker, MemoryTier, ResponseCache
from headrace.caching.remote import Remote, RemoteSettings
from headrace.core.clock import SystemClock
from support.redis_server import SECRET, RedisServer, entry, key, until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def replica(url: str) -> AsyncIterator[ResponseCache]:
    clock, epochs = SystemClock(), Epochs()
    settings = RemoteSettings(url, timeout_s=2.0)
    made = Remote(settings, SECRET, epochs, clock=clock, rng=random.Random(1))
    cache = ResponseCache(
        MemoryTier(1 << 20, clock),
        KeyMaker(SECRET),
        CachePolicy(),
        clock=clock,
        rng=random.Random(1),
        lower=[made],
        epochs=epochs,
        bulletin=made.bulletin,
        leases=made.leases,
    )
    await cache.start()
    await until(lambda: made.bulletin.connected)
    try:
        yield cache
    finally:
        await cache.close()


async def test_an_entry_that_is_forgotten_is_forgotten_everywhere(server: RedisServer) -> None:
    async with replica(server.url) as one, replica(server.url) as two:
        one.memory.put(key(1), entry())
        one.lower[0].put(key(1), entry())
        two.memory.put(key(1), entry())
        one.forget(key(1))
        await until(lambda: key(1) not in two.memory)
        await until(lambda: server.run("EXISTS", "headrace:e1:" + key(1).hex()) == "0")


async def test_after_a_gap_nothing_in_memory_is_trusted(server: RedisServer) -> None:
    async with replica(server.url) as one:
        one.memory.put(key(1), entry())
        server.run("FLUSHALL")
        one.forget(key(9))
        await until(lambda: server.run("XLEN", "headrace:log1") == "1")
        server.run("FLUSHALL")
        await until(lambda: key(1) not in one.memory, 20.0)
