"""Entries in a Redis that is well."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from headrace.caching.entry import Entry
from support.redis_server import RedisServer, entry, key, redis_server, remote, sent, until

pytestmark = pytest.mark.anyio


async def test_what_one_stores_the_other_finds(server: RedisServer) -> None:
    async with remote(server.url) as one, remote(server.url) as two:
        one.put(key(1), entry("one"))
        found = await one.get(key(1))
        assert found is not None
        await sent(one)
        found = await two.get(key(1))
        assert found is not None
        assert found.log == b"one"
        assert await two.get(key(2)) is None
        stats = two.stats()
        assert (stats.hits, stats.misses, stats.healthy) == (1, 1, True)
        assert 0 < int(server.run("PTTL", one.name_of(key(1)))) <= 100_000


async def test_names_in_redis_tell_nothing_and_have_the_prefix(server: RedisServer) -> None:
    async with remote(server.url, prefix="team-a:") as one:
        one.put(key(1), entry("a secret prompt"))
        one.bulletin.publish("removed", key(2))
        await one.leases.take(key(3), 10.0)
        await until(lambda: len(server.run("KEYS", "*").split()) == 3)
        for name in server.run("KEYS", "*").split():
            assert name.startswith("team-a:")
            assert len(name) < 90


async def test_the_last_change_of_a_key_is_what_counts(server: RedisServer) -> None:
    async with remote(server.url) as one, remote(server.url) as two:
        one.put(key(1), entry("old"))
        one.remove(key(1))
        assert await one.get(key(1)) is None
        await sent(one)
        assert await two.get(key(1)) is None
        one.put(key(1), entry("new"))
        await sent(one)
        one.remove(key(1))
        assert await one.get(key(1)) is None


async def test_what_waits_is_written_on_close(server: RedisServer) -> None:
    async with remote(server.url) as one:
        for n in range(300):
            one.put(key(n), entry())
    assert server.run("DBSIZE") == "300"


async def test_expired_and_huge_entries_are_not_sent(server: RedisServer) -> None:
    async with remote(server.url, max_entry_bytes=1000) as one:
        one.put(key(1), entry(ttl=-1.0))
        one.put(key(2), entry("x" * 1001))
        assert await one.get(key(1)) is None
    assert server.run("DBSIZE") == "0"
    assert one.stats().dropped == 1


async def test_without_the_secret_nobody_plants_an_answer(server: RedisServer) -> None:
    async with remote(server.url) as one, remote(server.url, secret=b"other" * 8) as other:
        other.put(key(1), entry("poison"))
        await sent(other)
        assert await one.get(key(1)) is None
        assert one.stats().failures == 1


async def test_an_answer_under_another_key_is_none(server: RedisServer) -> None:
    async with remote(server.url) as one:
        one.put(key(1), entry("of one"))
        await sent(one)
        server.run("COPY", one.name_of(key(1)), one.name_of(key(2)))
        assert await one.get(key(2)) is None
        assert await one.get(key(1)) is not None


@pytest.mark.parametrize(
    "words",
    [("SET", "garbage"), ("SET", ""), ("RPUSH", "a"), ("HSET", "a", "b"), ("SET", "x" * 100)],
    ids=str,
)
async def test_what_is_no_entry_is_a_miss(server: RedisServer, words: tuple[str, ...]) -> None:
    async with remote(server.url) as one:
        server.run(words[0], one.name_of(key(1)), *words[1:])
        for _ in range(10):
            assert await one.get(key(1)) is None
        assert one.stats().healthy, "a bad value is not a bad server"
        one.put(key(2), entry())
        await sent(one)
        assert await one.get(key(2)) is not None


async def test_it_is_full(tmp_path: Path) -> None:
    options = ("--maxmemory", "1500kb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path / "data", *options) as server:
        async with remote(server.url) as one:
            one.put(key(0), entry())
            await sent(one)
            for n in range(1, 200):
                one.put(key(n), entry("x" * 20_000))
                if n % 20 == 0:
                    await until(lambda: not one._waiting)
            assert one.stats().healthy, "what is there can be read"
            assert one.stats().dropped > 0
            assert await one.get(key(0)) is not None
            one.remove(key(0))
            await sent(one)
            assert await one.get(key(0)) is None


async def test_writes_that_cannot_wait_are_dropped(own: RedisServer) -> None:
    async with remote(own.url, most_waiting=5) as one:
        own.freeze()
        for n in range(20):
            one.put(key(n), entry())
        assert one.stats().dropped >= 14
        own.thaw()


async def test_a_removal_is_done_though_there_is_no_room_for_what_came_with_it(
    tmp_path: Path,
) -> None:
    options = ("--maxmemory", "1kb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path / "data", *options) as server:
        async with remote(server.url) as one:
            for n in range(10):
                one.put(key(n), entry())
                one.remove(key(100 + n))
            await until(lambda: one.stats().dropped == 10)
            assert not one._waiting
            assert one.stats().healthy


async def test_what_waits_is_bounded_in_bytes(server: RedisServer) -> None:
    async with remote(server.url, most_waiting_bytes=10_000) as one:
        for n in range(20):
            one.put(key(n), entry("x" * 1000))
        assert one.stats().dropped == 10
        await sent(one)
        one.put(key(20), entry("x" * 1000))
        one.remove(key(20))
        for n in range(30, 40):
            one.put(key(n), entry("x" * 1000))
        assert one.stats().dropped == 10


async def test_an_entry_for_ever_is_one_too(server: RedisServer) -> None:
    async with remote(server.url) as one:
        now = time.time()
        one.put(key(1), Entry(b"x", False, now, float("inf"), 1.0, 1, 1))
        one.put(key(2), entry())
        await sent(one)
        assert one.stats().dropped == 0
        assert await one.get(key(1)) is not None


async def test_what_is_removed_while_it_is_read_is_not_found(server: RedisServer) -> None:
    async with remote(server.url) as one:
        one.put(key(1), entry())
        await sent(one)
        call = one.link.call

        async def removed(*given: object, **more: object) -> object:
            found: object = await call(*given, **more)  # type: ignore[arg-type]
            one.link.call = call  # type: ignore[method-assign]
            one.remove(key(1))
            await sent(one)
            return found

        one.link.call = removed  # type: ignore[method-assign,assignment]
        assert await one.get(key(1)) is None


async def test_a_closed_tier_opens_nothing(server: RedisServer) -> None:
    async with remote(server.url) as one:
        one.put(key(1), entry())
        await sent(one)
    assert await one.get(key(1)) is None
    taken = await one.leases.take(key(1), 1.0)
    assert taken is not None
    await taken()
    await asyncio.sleep(0.05)
    assert "name=headrace" not in server.run("CLIENT", "LIST")
