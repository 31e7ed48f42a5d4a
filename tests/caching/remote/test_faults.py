"""A Redis that is not well: no request fails, none waits longer than the bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headrace.caching import Epochs, Scope
from headrace.caching.remote import RemoteSettings
from support.redis_server import (
    MUCH_MORE_S,
    RedisServer,
    assert_prompt,
    entry,
    free_port,
    key,
    pretending,
    redis_server,
    remote,
    sent,
    took,
    until,
)

pytestmark = pytest.mark.anyio


async def test_there_is_no_server(caplog: pytest.LogCaptureFixture) -> None:
    async with remote(f"redis://user:hidden@127.0.0.1:{free_port()}", patient=False) as one:
        await assert_prompt(one)
        assert not one.stats().healthy
        assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    assert "hidden" not in caplog.text
    assert "hidden" not in repr(one.link.settings)


async def test_it_comes_up_later(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "data")
    epochs = Epochs()
    async with remote(server.url, epochs=epochs, patient=False) as one:
        await assert_prompt(one)
        epochs.bump(Scope(tenant="a"))
        server.start()
        try:

            async def back() -> bool:
                one.put(key(5), entry())
                await asyncio.sleep(0.05)
                return one.stats().healthy and bool(
                    server.run("EXISTS", one.name_of(key(5))) == "1"
                )

            await until(back, 30.0)
            await until(lambda: one.bulletin.connected, 30.0)
            await until(lambda: server.run("HLEN", "headrace:epochs1") == "1", 30.0)
        finally:
            server.kill()


async def test_it_is_frozen_and_thaws(own: RedisServer) -> None:
    async with remote(own.url, patient=False) as one:
        await until(lambda: one.bulletin.connected)
        own.freeze()
        await assert_prompt(one)
        assert not one.stats().healthy
        assert await took(one.get(key(1))) < 0.02, "while the breaker is open nobody waits"
        own.thaw()

        async def back() -> bool:
            await one.get(key(1))
            return one.stats().healthy

        await until(back, 30.0)


async def test_it_is_killed_and_another_takes_its_place(own: RedisServer) -> None:
    epochs = Epochs()
    async with remote(own.url, epochs=epochs, patient=False) as one:
        await until(lambda: one.bulletin.connected)
        gaps: list[None] = []
        one.bulletin.on_gap(lambda: gaps.append(None))
        epochs.bump(Scope(tenant="a"))
        one.bulletin.publish("k", b"x")
        await until(lambda: own.run("XLEN", "headrace:log1") == "2")
        await until(lambda: one.bulletin._position != b"0-0")
        await asyncio.sleep(0.05)
        own.kill()
        await assert_prompt(one)
        own.start()
        await until(lambda: bool(gaps), 30.0)
        # The new one knows nothing; what was invalidated stays so for who starts now.
        await until(lambda: own.run("HLEN", "headrace:epochs1") == "1", 30.0)


async def test_it_wants_another_password(tmp_path: Path) -> None:
    with redis_server(tmp_path / "data", "--requirepass", "right") as server:
        right = server.url.replace("redis://", "redis://:right@")
        wrong = server.url.replace("redis://", "redis://:wrong@")
        async with remote(right) as one:
            one.put(key(1), entry())
            await sent(one)
            assert await one.get(key(1)) is not None
        for url in (wrong, server.url):
            async with remote(url, patient=False) as one:
                await assert_prompt(one)
                assert not one.stats().healthy


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    while await reader.read(4096):
        pass


async def hangs_up(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
    return


async def babbles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(4096):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n\xff\xfe")
        await writer.drain()


async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(4096):
        writer.write(b"$1000\r\nabc")
        await writer.drain()


async def yes_man(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(4096):
        writer.write(b"+OK\r\n" * max(1, data.count(b"*")))
        await writer.drain()


@pytest.mark.parametrize("behaviour", [silent, hangs_up, babbles, half, yes_man])
async def test_it_only_pretends_to_be_one(
    behaviour: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    async with pretending(behaviour) as url, remote(url, patient=False) as one:
        for n in range(12):
            made = one.get(key(n))
            started = time.perf_counter()
            assert await made is None
            assert time.perf_counter() - started < MUCH_MORE_S
            one.put(key(n), entry())
            one.remove(key(n + 1000))


async def test_a_late_answer_is_nobody_elses(server: RedisServer) -> None:
    """A call that was given up leaves no answer for the next one on its connection."""
    delays = iter([0.0, 0.3, 0.0, 0.3, *[0.0] * 1000])

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            while data := await reader.read(65536):
                if b"GET" in data:
                    await asyncio.sleep(next(delays))
                back.write(data)
                writer.write(await there.read(65536))
                await writer.drain()
        finally:
            back.close()

    async with remote(server.url) as direct:
        for n in range(20):
            direct.put(key(n), entry(str(n)))
        await sent(direct)
    async with pretending(slow) as url, remote(url, patient=False, timeout_s=0.1) as one:
        found = []
        for n in range(20):
            got = await one.get(key(n))
            found.append(None if got is None else got.log)
        assert 1 <= found.count(None) <= 4
        assert all(log is None or log == b"%d" % n for n, log in enumerate(found))


async def test_it_is_slow_and_recovers(server: RedisServer) -> None:
    delay = 0.2

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            while data := await reader.read(65536):
                await asyncio.sleep(delay)
                back.write(data)
                writer.write(await there.read(65536))
                await writer.drain()
        finally:
            back.close()

    async with remote(server.url) as direct:
        direct.put(key(500), entry())
        await sent(direct)
    async with pretending(slow) as url, remote(url, patient=False) as one:
        await assert_prompt(one)
        assert not one.stats().healthy
        delay = 0.0

        async def found() -> bool:
            return await one.get(key(500)) is not None

        await until(found, 30.0)
        assert one.stats().healthy


async def test_many_at_once_wait_no_longer_for_a_frozen_one(own: RedisServer) -> None:
    async with remote(own.url, patient=False) as one:
        await until(lambda: one.bulletin.connected)
        own.freeze()
        seconds = await asyncio.gather(*(took(one.get(key(n))) for n in range(500)))
        assert max(seconds) < MUCH_MORE_S
        assert not one.stats().healthy


async def test_a_frozen_one_does_not_hold_up_the_end(own: RedisServer) -> None:
    async with remote(own.url, patient=False) as one:
        await until(lambda: one.bulletin.connected)
        own.freeze()
        one.put(key(1), entry())
        one.remove(key(2))
        one.bulletin.publish("k", b"x")
        started = time.perf_counter()
    assert time.perf_counter() - started < 4.0


async def test_a_port_that_is_none_is_refused_without_a_word_of_the_password() -> None:
    with pytest.raises(ValueError, match="port") as refused:
        RemoteSettings("redis://user:hid/den@host:6379")
    assert "hid" not in str(refused.value)
    assert refused.value.__cause__ is None
