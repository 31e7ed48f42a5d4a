"""Invalidation, on all replicas."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.caching import Epochs, Scope
from support.redis_server import MUCH_MORE_S, RedisServer, remote, until

pytestmark = pytest.mark.anyio


async def test_invalidation_reaches_the_other_replica(server: RedisServer) -> None:
    first, second = Epochs(), Epochs()
    async with remote(server.url, epochs=first) as one, remote(server.url, epochs=second) as two:
        await until(lambda: one.bulletin.connected and two.bulletin.connected)
        before = second.of("a", "m", "")
        started = time.perf_counter()
        first.bump(Scope(tenant="a"))
        await until(lambda: second.of("a", "m", "") != before)
        assert time.perf_counter() - started < MUCH_MORE_S
        assert second.of("a", "m", "") == first.of("a", "m", "")
        assert second.of("b", "m", "") == before


async def test_a_replica_that_starts_later_knows_what_was_invalidated(server: RedisServer) -> None:
    first, second = Epochs(), Epochs()
    async with remote(server.url, epochs=first):
        for _ in range(3):
            first.bump(Scope(model="m"))
        await until(lambda: server.run("HLEN", "headrace:epochs1") == "1")
        async with remote(server.url, epochs=second):
            await until(lambda: second.of("a", "m", "") == first.of("a", "m", ""))


async def test_two_that_invalidate_at_once_end_where_neither_was(server: RedisServer) -> None:
    """What one stored after its own invalidation is older than the other's."""
    first, second = Epochs(), Epochs()
    async with remote(server.url, epochs=first) as one, remote(server.url, epochs=second) as two:
        await until(lambda: one.bulletin.connected and two.bulletin.connected)
        first.bump(Scope(tenant="a"))
        second.bump(Scope(tenant="a"))
        alone = first.of("a", "m", "")
        assert alone == second.of("a", "m", "")
        await until(lambda: first.of("a", "m", "") == second.of("a", "m", "") != alone)


async def test_it_forgets_everything_while_it_is_used(own: RedisServer) -> None:
    epochs, gaps = Epochs(), list[None]()
    async with remote(own.url, epochs=epochs) as one:
        await until(lambda: one.bulletin.connected)
        epochs.bump(Scope(tenant="a"))
        await until(lambda: own.run("HLEN", "headrace:epochs1") == "1")
        await until(lambda: own.run("XLEN", "headrace:log1") == "1")
        one.bulletin.on_gap(lambda: gaps.append(None))
        own.run("FLUSHALL")
        await until(lambda: bool(gaps), 20.0)
        await until(lambda: own.run("HLEN", "headrace:epochs1") == "1")


async def test_one_that_is_moved_again_while_it_is_sent_is_sent_again(server: RedisServer) -> None:
    first, second = Epochs(), Epochs()
    async with remote(server.url, epochs=first) as one, remote(server.url, epochs=second) as two:
        await until(lambda: one.bulletin.connected and two.bulletin.connected)
        await until(lambda: not one.epochs._reload)
        under_way = asyncio.Event()
        call = one.link.call

        async def told(*given: object, **more: object) -> object:
            under_way.set()
            return await call(*given, **more)  # type: ignore[arg-type]

        one.link.call = told  # type: ignore[method-assign,assignment]
        for _ in range(20):
            under_way.clear()
            first.bump(Scope(tenant="a"))
            await under_way.wait()
            first.bump(Scope(tenant="a"))
            await until(lambda: first.table() == second.table(), 2.0)


async def test_garbage_in_the_table_keeps_nothing_else_from_being_shared(
    server: RedisServer,
) -> None:
    table = "headrace:epochs1"
    mine, theirs = Scope(tenant="a"), Scope(tenant="b")
    server.run("HSET", table, "x", "garbage", mine.name, "nonsense", "y", "1e300", theirs.name, "7")
    epochs = Epochs()
    async with remote(server.url, epochs=epochs) as one:
        await until(lambda: epochs.table() == {theirs.name: 7})
        await until(lambda: one.bulletin.connected)
        server.run("XADD", "headrace:log1", "*", "k", b"\xff".decode("latin1"), "m", "x")
        epochs.bump(mine)
        epochs.bump(theirs)
        await until(lambda: server.run("HGET", table, mine.name) == "1")
        await until(lambda: server.run("HGET", table, theirs.name) == "8")


async def test_what_is_no_table_is_none_of_our_business(server: RedisServer) -> None:
    server.run("SET", "headrace:epochs1", "x")
    epochs = Epochs()
    async with remote(server.url, epochs=epochs) as one:
        await until(lambda: one.link.failures > 0)
        epochs.bump(Scope(tenant="a"))
        server.run("DEL", "headrace:epochs1")
        await until(lambda: server.run("HLEN", "headrace:epochs1") == "1")


async def test_what_is_invalidated_just_before_the_end_is_sent(server: RedisServer) -> None:
    first, second = Epochs(), Epochs()
    async with remote(server.url, epochs=second) as two:
        await until(lambda: two.bulletin.connected)
        async with remote(server.url, epochs=first) as one:
            await until(lambda: one.bulletin.connected)
            first.bump(Scope(tenant="a"))
        await until(lambda: second.table() == first.table(), 2.0)
