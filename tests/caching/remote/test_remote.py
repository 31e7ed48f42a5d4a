"""What replicas share, on a real Redis in every state it can be in."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.caching import CachePolicy, Epochs, KeyMaker, MemoryTier, ResponseCache, Scope
from headrace.caching.entry import Entry
from headrace.caching.remote import Remote, RemoteSettings
from headrace.core.clock import SystemClock
from support.redis_server import RedisServer, free_port, pretending, redis_server

pytestmark = pytest.mark.anyio

SECRET = b"s" * 32
BOUND_S = 0.05
MUCH_MORE_S = 0.5
"""What a wait of at most BOUND_S is measured with on a busy machine."""


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def entry(text: str = "x", ttl: float = 100.0) -> Entry:
    now = time.time()
    return Entry(text.encode(), False, now, now + ttl, 1.0, 1, 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis") / "data") as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    shared.run("FLUSHALL")
    return shared


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may kill."""
    with redis_server(tmp_path / "data") as server:
        yield server


@asynccontextmanager
async def remote(
    url: str,
    *,
    secret: bytes = SECRET,
    epochs: Epochs | None = None,
    patient: bool = True,
    **more: object,
) -> AsyncIterator[Remote]:
    """`patient` is for tests of what is done, not of how long it may take."""
    settings = RemoteSettings(url, timeout_s=2.0 if patient else BOUND_S)
    settings = replace(settings, **more)  # type: ignore[arg-type]
    made = Remote(
        settings,
        secret,
        Epochs() if epochs is None else epochs,
        clock=SystemClock(),
        rng=random.Random(1),
    )
    await made.start()
    own = [*made.bulletin._tasks, made.epochs._task, made._task]
    try:
        yield made
    finally:
        await made.close()
        assert not made.link._tasks
        assert all(task is not None and task.done() for task in own)


async def until(true: Callable[[], bool | Awaitable[bool]], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            result = true()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.005)


async def sent(made: Remote) -> None:
    await until(lambda: not made._waiting)


async def took(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


# What is done when all is well.


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


async def test_one_replica_computes_and_the_other_waits(server: RedisServer) -> None:
    async with remote(server.url) as one, remote(server.url) as two:
        give_back = await one.leases.take(key(1), 10.0)
        assert give_back is not None
        assert await two.leases.take(key(1), 10.0) is None
        assert await two.leases.held(key(1))
        assert await two.leases.take(key(2), 10.0) is not None
        await give_back()
        assert not await two.leases.held(key(1))
        again = await two.leases.take(key(1), 10.0)
        assert again is not None
        await give_back()  # it is another's by now
        assert await one.leases.held(key(1))


async def test_a_lease_goes_by_itself(server: RedisServer) -> None:
    async with remote(server.url) as one:
        assert await one.leases.take(key(1), 0.02) is not None

        async def free() -> bool:
            return not await one.leases.held(key(1))

        await until(free)


# What nobody can do to it.


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


# What is done when it is not well: no request fails, none waits longer than the bound.


async def assert_prompt(made: Remote, count: int = 12) -> None:
    for n in range(count):
        assert await took(made.get(key(n))) < MUCH_MORE_S
        made.put(key(n), entry())
        made.remove(key(n + 1000))
        made.bulletin.publish("k", b"x")
    assert await took(made.leases.held(key(1))) < MUCH_MORE_S
    taken = await made.leases.take(key(1), 1.0)
    assert taken is not None
    await taken()


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


async def test_writes_that_cannot_wait_are_dropped(own: RedisServer) -> None:
    async with remote(own.url, most_waiting=5) as one:
        own.freeze()
        for n in range(20):
            one.put(key(n), entry())
        assert one.stats().dropped >= 14
        own.thaw()


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


# The whole cache of two replicas.


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
