"""What replicas tell each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.caching import Epochs
from support.redis_server import RedisServer, key, remote, until

pytestmark = pytest.mark.anyio


async def test_removals_and_other_news_reach_every_replica_soon(server: RedisServer) -> None:
    async with remote(server.url) as one, remote(server.url) as two:
        heard: list[tuple[str, bytes, float]] = []

        def hears(name: str) -> Callable[[bytes], None]:
            return lambda message: heard.append((name, message, time.perf_counter()))

        one.bulletin.subscribe("k", hears("one"))
        two.bulletin.subscribe("k", hears("two"))
        await until(lambda: one.bulletin.connected and two.bulletin.connected)
        delays = []
        for n in range(20):
            started = time.perf_counter()
            one.bulletin.publish("k", key(n))
            everyone = 2 * (n + 1)
            await until(lambda: len(heard) == everyone)  # noqa: B023 - awaited at once
            delays.append(heard[-1][2] - started)
        assert sorted(delays)[10] < 0.1
        assert {m for name, m, _ in heard if name == "two"} == {key(n) for n in range(20)}


async def test_news_that_is_none_ends_nothing(server: RedisServer) -> None:
    epochs = Epochs()
    async with remote(server.url, epochs=epochs) as one:
        await until(lambda: one.bulletin.connected)
        heard: list[bytes] = []
        one.bulletin.subscribe("k", heard.append)

        def breaks(_: bytes) -> None:
            raise ZeroDivisionError

        one.bulletin.subscribe("k", breaks)
        server.run("XADD", "headrace:log1", "*", "k", "epoch", "m", "garbage")
        server.run("XADD", "headrace:log1", "*", "unrelated", "x")
        one.bulletin.publish("k", b"1")
        one.bulletin.publish("k", b"2")
        await until(lambda: heard == [b"1", b"2"])


async def test_news_is_kept_while_it_is_away_up_to_a_number(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "data")
    async with remote(server.url, patient=False, log_length=10) as one:
        for n in range(25):
            one.bulletin.publish("k", key(n))
        assert one.bulletin.lost == 15
        server.start()
        try:
            await until(lambda: server.run("XLEN", "headrace:log1") == "10", 30.0)
        finally:
            server.kill()


async def test_a_reader_that_was_cut_off_goes_on_where_it_was(server: RedisServer) -> None:
    heard, gaps = list[bytes](), list[None]()
    async with remote(server.url) as one:
        await until(lambda: one.bulletin.connected)
        one.bulletin.subscribe("k", heard.append)
        one.bulletin.publish("k", b"1")
        await until(lambda: heard == [b"1"])
        one.bulletin.on_gap(lambda: gaps.append(None))
        server.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for n in (b"2", b"3"):
            server.run("XADD", "headrace:log1", "*", "k", "k", "m", n.decode())
        await until(lambda: heard == [b"1", b"2", b"3"])
        assert not gaps


@pytest.mark.parametrize("read_before", [True, False])
async def test_a_reader_whose_place_is_gone_says_so(server: RedisServer, read_before: bool) -> None:
    gaps = list[None]()
    async with remote(server.url) as one:
        await until(lambda: one.bulletin.connected)
        if read_before:
            server.run("XADD", "headrace:log1", "*", "k", "k", "m", "1")
            await until(lambda: one.bulletin._position != b"0-0")
        one.bulletin.on_gap(lambda: gaps.append(None))
        server.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for _ in range(2):
            server.run("XADD", "headrace:log1", "*", "k", "k", "m", "x")
        server.run("XTRIM", "headrace:log1", "MAXLEN", "1")
        await until(lambda: bool(gaps), 2.0)


async def test_a_reader_that_was_too_slow_says_so(server: RedisServer) -> None:
    """It was connected all the time, and what it had not read was trimmed."""
    heard, gaps = list[bytes](), list[None]()
    async with remote(server.url) as one:
        await until(lambda: one.bulletin.connected)
        one.bulletin.publish("k", b"first")
        one.bulletin.subscribe("k", heard.append)
        await until(lambda: heard == [b"first"])
        one.bulletin.on_gap(lambda: gaps.append(None))
        script = (
            "for n = 1, 1000 do redis.call('XADD', KEYS[1], '*', 'k', 'k', 'm', n) end "
            "return redis.call('XTRIM', KEYS[1], 'MAXLEN', 400)"
        )
        server.run("EVAL", script, "1", "headrace:log1")
        await until(lambda: heard[-1] == b"1000")
        assert gaps == [None]


async def test_what_waits_is_told_before_the_end(server: RedisServer) -> None:
    """Once more, perhaps, if it was being told."""
    heard = list[bytes]()
    async with remote(server.url) as two:
        two.bulletin.subscribe("k", heard.append)
        await until(lambda: two.bulletin.connected)
        async with remote(server.url) as one:
            await until(lambda: one.bulletin.connected)
            for n in range(1000):
                one.bulletin.publish("k", key(n))
        await until(lambda: set(heard) == {key(n) for n in range(1000)}, 5.0)
