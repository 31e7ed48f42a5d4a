"""Entries on disk: there after a restart or a kill, and never in anybody's way."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.caching import disk as module
from headrace.caching.disk import DiskTier
from headrace.caching.entry import Entry
from headrace.core.clock import SystemClock, VirtualClock

pytestmark = pytest.mark.anyio

BUDGET = 1 << 20


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def entry(
    text: str = "x", *, clock: VirtualClock | None = None, ttl: float = 100.0, saved_s: float = 1.0
) -> Entry:
    now = (clock or VirtualClock()).wall()
    return Entry(text.encode(), False, now, now + ttl, saved_s, 1, 1)


@asynccontextmanager
async def tier(
    folder: Path, clock: VirtualClock | None = None, budget: int = BUDGET
) -> AsyncIterator[DiskTier]:
    made = DiskTier(folder / "state" / "a.sqlite", budget, clock or VirtualClock(), read_limit_s=5)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def written(disk: DiskTier) -> None:
    async with asyncio.timeout(10):
        while disk._waiting or disk._write is not None or disk._timer is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_is_put_is_there_at_once_and_after_a_restart(tmp_path: Path) -> None:
    async with tier(tmp_path) as disk:
        disk.put(key(1), entry("one"))
        assert await disk.get(key(1)) == entry("one")
        await written(disk)
        assert await disk.get(key(1)) == entry("one")
        assert await disk.get(key(2)) is None
        stats = disk.stats()
        assert (stats.entries, stats.hits, stats.misses, stats.stores) == (1, 2, 1, 1)
    async with tier(tmp_path) as disk:
        assert await disk.get(key(1)) == entry("one")
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
    assert (tmp_path / "state" / "a.sqlite").stat().st_mode & 0o077 == 0


async def test_what_waits_is_written_on_close(tmp_path: Path) -> None:
    async with tier(tmp_path) as disk:
        for n in range(1000):
            disk.put(key(n), entry(str(n)))
        disk.remove(key(7))
    async with tier(tmp_path) as disk:
        assert disk.stats().entries == 999
        assert await disk.get(key(999)) == entry("999")
        assert await disk.get(key(7)) is None


async def test_the_last_change_of_a_key_is_what_counts(tmp_path: Path) -> None:
    async with tier(tmp_path) as disk:
        disk.put(key(1), entry("old"))
        disk.remove(key(1))
        assert await disk.get(key(1)) is None
        disk.put(key(1), entry("new"))
        disk._flush()
        disk.remove(key(1))
        assert await disk.get(key(1)) is None
        await written(disk)
        assert await disk.get(key(1)) is None
        assert disk.stats().entries == 0


async def test_times_are_absolute(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with tier(tmp_path, clock) as disk:
        disk.put(key(1), entry(clock=clock, ttl=10.0))
        disk.put(key(2), entry(clock=clock, ttl=1000.0))
        await written(disk)
        clock.advance(9.0)
        assert await disk.get(key(1)) is not None
        clock.advance(2.0)
        assert await disk.get(key(1)) is None
        disk.put(key(3), entry(clock=clock))
        await written(disk)
        assert disk.stats().entries == 2


async def test_it_stays_within_its_budget_and_keeps_what_is_worth_most(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with tier(tmp_path, clock, 200_000) as disk:
        for n in range(400):
            clock.advance(1.0)
            disk.put(key(n), entry("x" * 1000, clock=clock, ttl=1e6, saved_s=9.0 if n < 20 else 1))
            if n % 50 == 49:
                await written(disk)
        await written(disk)
        stats = disk.stats()
        assert stats.bytes is not None
        assert stats.entries is not None
        assert 150_000 < stats.bytes <= 200_000
        assert stats.evictions == 400 - stats.entries
        kept = [n for n in range(20) if await disk.get(key(n)) is not None]
        assert len(kept) >= 15
        assert await disk.get(key(399)) is not None


@pytest.mark.parametrize("length", [300, 2200, 6000])
async def test_the_file_is_no_larger_than_it_may_be(tmp_path: Path, length: int) -> None:
    """Whatever a row wastes of its pages."""
    async with tier(tmp_path, budget=600_000) as disk:
        for n in range(1_200_000 // length):
            disk.put(key(n), entry("x" * length, saved_s=n % 7))
            if n % 200 == 199:
                await written(disk)
        await written(disk)
        assert disk.stats().dropped == 0
    assert 500_000 < (tmp_path / "state" / "a.sqlite").stat().st_size < 660_000


async def test_a_smaller_budget_shrinks_the_file(tmp_path: Path) -> None:
    async with tier(tmp_path) as disk:
        for n in range(300):
            disk.put(key(n), entry("x" * 3000))
    async with tier(tmp_path, budget=200_000) as disk:
        await written(disk)
        assert 30 < (disk.stats().entries or 0) < 60
        assert await disk.get(key(299)) is not None
    assert (tmp_path / "state" / "a.sqlite").stat().st_size <= 200_000


async def test_many_expired_ones_go_before_any_other(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with tier(tmp_path, clock, 4 << 20) as disk:
        for n in range(4000):
            disk.put(key(n), entry("x" * 500, clock=clock, ttl=10.0 if n >= 100 else 1000.0))
            if n % 1000 == 999:
                await written(disk)
        clock.advance(20.0)
    async with tier(tmp_path, clock, 600_000) as disk:
        await written(disk)
        assert disk.stats().evictions == 0
        assert await disk.get(key(0)) is not None


async def test_an_entry_that_would_empty_it_is_not_taken(tmp_path: Path) -> None:
    async with tier(tmp_path, budget=80_000) as disk:
        disk.put(key(1), entry("x" * 10_001))
        disk.put(key(2), entry("x" * 10_000))
        await written(disk)
        assert disk.stats().dropped == 1
        assert disk.stats().entries == 1


async def test_what_is_removed_while_it_is_read_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tier(tmp_path) as disk:
        disk.put(key(1), entry())
        await written(disk)
        read_it, go_on = threading.Event(), threading.Event()
        read = disk._store.read

        def slowly(wanted: bytes) -> bytes | None:
            data = read(wanted)
            read_it.set()
            go_on.wait(5)
            return data

        monkeypatch.setattr(disk._store, "read", slowly)
        found = asyncio.create_task(disk.get(key(1)))
        await asyncio.to_thread(read_it.wait, 5)
        disk.remove(key(1))
        await written(disk)
        go_on.set()
        assert await found is None


async def test_a_disk_that_fails_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def full(*_: object) -> bool:
        calls.append(1)
        raise sqlite3.OperationalError("database or disk is full")

    async with tier(tmp_path) as disk:
        monkeypatch.setattr(disk._store, "apply", full)
        disk.remove(key(1))
    assert len(calls) == 1


async def test_a_disk_that_is_slow_to_open_does_not_hold_up_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_START_S", 0.02)
    go = threading.Event()
    disk = DiskTier(tmp_path / "a.sqlite", BUDGET, VirtualClock(), read_limit_s=5)
    apply = disk._store.apply

    def slowly(changes: dict[bytes, Entry | None], touched: dict[bytes, int]) -> bool:
        go.wait(5)
        return apply(changes, touched)

    monkeypatch.setattr(disk._store, "apply", slowly)
    started = asyncio.get_running_loop().time()
    await disk.start()
    assert asyncio.get_running_loop().time() - started < 1.0
    disk.put(key(1), entry())
    assert await disk.get(key(1)) == entry()
    go.set()
    await written(disk)
    assert disk.stats().entries == 1
    await disk.close()


async def test_another_process_that_holds_the_file_makes_misses(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with tier(tmp_path, clock) as disk:
        disk.put(key(1), entry(clock=clock))
        await written(disk)
        db = sqlite3.connect(tmp_path / "state" / "a.sqlite", isolation_level=None)
        db.execute("BEGIN EXCLUSIVE")
        disk.put(key(2), entry(clock=clock))
        await written(disk)
        assert not disk.stats().healthy
        assert await disk.get(key(1)) is None
        db.execute("ROLLBACK")
        db.close()
        clock.advance(10.0)
        disk.put(key(3), entry(clock=clock))
        await written(disk)
        assert disk.stats().healthy
        assert [await disk.get(key(n)) is not None for n in (1, 2, 3)] == [True, False, True]


async def test_the_count_of_bytes_is_that_of_the_file(tmp_path: Path) -> None:
    async with tier(tmp_path) as disk:
        for n in range(50):
            disk.put(key(n % 20), entry("x" * n))
            if n % 7 == 0:
                disk.remove(key(n % 20))
                await written(disk)
        await written(disk)
        before = disk.stats()
    async with tier(tmp_path) as disk:
        assert (disk.stats().entries, disk.stats().bytes) == (before.entries, before.bytes)


async def test_all_of_it_can_be_listed(tmp_path: Path) -> None:
    async with tier(tmp_path) as disk:
        for n in range(200):
            disk.put(key(n), entry(str(n)))
        await written(disk)
        listed = [(k, e) async for k, e in disk.entries()]
        assert listed == [(key(n), entry(str(n))) for n in range(200)]


@pytest.mark.parametrize("broken", [b"", b"no database" * 500, b"SQLite format 3\0" + b"x" * 4096])
async def test_a_file_that_is_broken_is_set_aside(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "state" / "a.sqlite"
    path.parent.mkdir()
    path.write_bytes(broken)
    async with tier(tmp_path) as disk:
        disk.put(key(1), entry())
        await written(disk)
        assert await disk.get(key(1)) is not None
        assert disk.stats().healthy
    assert path.with_name("a.sqlite.broken").exists() is bool(broken)


async def test_a_file_of_another_version_is_set_aside(tmp_path: Path) -> None:
    async with tier(tmp_path) as disk:
        disk.put(key(1), entry())
    path = tmp_path / "state" / "a.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    async with tier(tmp_path) as disk:
        assert await disk.get(key(1)) is None
        assert disk.stats().entries == 0


async def test_a_row_that_is_no_entry_is_a_miss_and_goes(tmp_path: Path) -> None:
    async with tier(tmp_path) as disk:
        disk.put(key(1), entry())
    db = sqlite3.connect(tmp_path / "state" / "a.sqlite")
    db.execute("UPDATE entries SET data = ?", (b"\xc1garbage",))
    db.commit()
    db.close()
    async with tier(tmp_path) as disk:
        assert await disk.get(key(1)) is None
        await written(disk)
        assert disk.stats().entries == 0


async def test_a_file_broken_while_it_is_used_heals(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with tier(tmp_path, clock) as disk:
        for n in range(300):
            disk.put(key(n), entry("x" * 3000, clock=clock))
        await written(disk)
        path = tmp_path / "state" / "a.sqlite"
        for ending in ("", "-wal"):
            file = path.with_name(path.name + ending)
            if file.exists():
                file.write_bytes(b"\xff" * file.stat().st_size)
        for n in range(300):
            await disk.get(key(n))
        disk.put(key(1), entry("again", clock=clock))
        await written(disk)
        clock.advance(10.0)
        disk.put(key(2), entry("again", clock=clock))
        await written(disk)
        clock.advance(10.0)
        disk.put(key(3), entry("again", clock=clock))
        await written(disk)
        assert await disk.get(key(3)) is not None


async def test_without_a_place_to_write_there_are_misses(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    async with tier(tmp_path) as disk:
        assert not disk.stats().healthy
        disk.put(key(1), entry())
        assert await disk.get(key(1)) is None
        assert disk.stats().dropped == 1


async def test_a_disk_that_fails_is_tried_again_and_forgets_no_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    async with tier(tmp_path, clock) as disk:
        disk.put(key(1), entry(clock=clock))
        await written(disk)
        apply = disk._store.apply

        def full(*_: object) -> bool:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(disk._store, "apply", full)
        monkeypatch.setattr(module, "_RETRY_S", 0.05)
        disk.remove(key(1))
        disk.put(key(2), entry(clock=clock))
        await asyncio.sleep(0.15)
        assert not disk.stats().healthy
        assert disk.stats().failures >= 1
        assert await disk.get(key(1)) is None
        monkeypatch.setattr(disk._store, "apply", apply)
        clock.advance(1.0)
        await written(disk)
        assert disk.stats().healthy
        assert disk.stats().entries == 0


async def test_a_slow_disk_is_a_miss_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskTier(tmp_path / "a.sqlite", BUDGET, VirtualClock(), read_limit_s=0.02)
    await disk.start()
    go = threading.Event()
    monkeypatch.setattr(disk._store, "read", lambda _: go.wait(5) and None)
    loop = asyncio.get_running_loop()
    try:
        started = loop.time()
        found = await asyncio.gather(*(disk.get(key(n)) for n in range(100)))
        assert loop.time() - started < 1.0
        assert found == [None] * 100
        assert disk.stats().failures == 32
    finally:
        go.set()
        await disk.close()


async def test_more_writes_than_can_wait_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 10)
    monkeypatch.setattr(module, "_MOST_WAITING_BYTES", 8_500)
    async with tier(tmp_path) as disk:
        for n in range(15):
            disk.put(key(n), entry())
        assert disk.stats().dropped == 5
        assert disk.stats().stores == 10
        await written(disk)
        for n in range(10):
            disk.put(key(n), entry("x" * 1000))
        assert disk.stats().dropped == 7
        await written(disk)
        disk.put(key(1), entry("x" * 1000))
        assert disk.stats().dropped == 7


WRITER = """
import asyncio, sys, time
from pathlib import Path
from headrace.caching.disk import DiskTier
from headrace.caching.entry import Entry
from headrace.core.clock import SystemClock

async def main():
    disk = DiskTier(Path(sys.argv[1]), 1 << 24, SystemClock())
    await disk.start()
    n = 0
    while True:
        now = time.time()
        disk.put(n.to_bytes(32, "big"), Entry(b"%d" % n, False, now, now + 1000, 1.0, 1, 1))
        n += 1
        if n % 20 == 0:
            await asyncio.sleep(0.001)
        if n == 2000:
            print("enough", flush=True)
        if n > 4000:
            await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_a_killed_process_leaves_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    process = subprocess.Popen(  # noqa: ASYNC220 - it is killed from here
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"enough\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    disk = DiskTier(path, 1 << 24, SystemClock(), read_limit_s=5)
    await disk.start()
    count = disk.stats().entries
    assert count is not None
    assert count > 500
    assert disk.stats().healthy
    for n in range(count):
        found = await disk.get(key(n))
        assert found is not None
        assert found.log == b"%d" % n
    await disk.close()


async def test_two_servers_may_share_a_file(tmp_path: Path) -> None:
    async with tier(tmp_path) as one, tier(tmp_path) as two:
        one.put(key(1), entry("one"))
        await written(one)
        two.put(key(2), entry("two"))
        await written(two)
        assert await two.get(key(1)) == entry("one")
        assert await one.get(key(2)) == entry("two")


async def test_a_closed_tier_does_nothing_and_closes_twice(tmp_path: Path) -> None:
    async with tier(tmp_path) as disk:
        pass
    disk.put(key(1), entry())
    disk.remove(key(1))
    assert await disk.get(key(1)) is None
    await disk.close()
