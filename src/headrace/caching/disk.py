"""Entries in a SQLite file: they survive a restart, and a kill."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from headrace.caching.base import TierStats
from headrace.caching.entry import CorruptEntryError, Entry, pack, unpack
from headrace.caching.sqlite import open_store
from headrace.core.clock import Clock

__all__ = ["DiskTier"]

_VERSION = 2
_SCHEMA = """
CREATE TABLE entries (
    key BLOB PRIMARY KEY, size INTEGER NOT NULL, expires REAL NOT NULL, saved REAL NOT NULL,
    hits INTEGER NOT NULL, used REAL NOT NULL, data BLOB NOT NULL
) STRICT;
CREATE INDEX by_use ON entries (used, size, saved, hits);
CREATE INDEX by_expiry ON entries (expires)
"""
"""The data is last and `by_use` has all that eviction asks for, so that it reads no data."""
_EXPIRED = 1_024
_DELETE_EXPIRED = """
DELETE FROM entries
WHERE rowid IN (SELECT rowid FROM entries WHERE expires <= ? LIMIT 1024)
"""
_WORST = """
SELECT rowid, size, saved * (hits + 1) / size FROM
(SELECT rowid, size, saved, hits, used FROM entries ORDER BY used LIMIT ?)
ORDER BY 3, used, rowid
"""
_ROW_BYTES = 200
"""What a row takes beside its data, in the table and its indexes. Measured."""
_VACUUM = "PRAGMA incremental_vacuum(1024)"
_FLUSH_S = 0.05
_BATCH = 256
_MOST_WAITING = 4_096
_MOST_WAITING_BYTES = 64 << 20
_MOST_READS = 32
"""At once; a disk with more before it is too slow to be waited for."""
_READ_LIMIT_S = 0.05
_RETRY_S = 5.0
_START_S = 1.0
_CLOSE_S = 2.0
_PAGE = 64
_ROOM = 0.95
"""Where the budget is not met, rows go until so much of it is used."""
_LARGEST = 0.125
"""The share of the budget that one entry may take."""
_CHOICE, _LEAST_CHOICE = 4, 128
"""So many times the rows that must go are looked at, but no fewer than the second: the longest
unused ones, and the least worth among them go."""

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Changes = dict[bytes, Entry | None]


class DiskTier:
    """Reads and writes are in a thread each; writes are gathered for a twentieth of a second. A
    disk that is full, slow, or not to be written makes misses and lost writes, and is tried again
    after some seconds. `max_bytes` is what the file takes between writes, without SQLite's journal
    beside it. Event loop only."""

    name = "disk"

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        clock: Clock,
        *,
        read_limit_s: float = _READ_LIMIT_S,
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._clock = clock
        self._read_limit_s = read_limit_s
        self._store = _Store(path, max_bytes, clock)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="headrace-disk-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="headrace-disk-write")
        self._waiting: _Changes = {}
        self._waiting_bytes = 0
        self._removals = 0
        self._being_written: _Changes = {}
        self._touched: dict[bytes, int] = {}
        self._reads: set[asyncio.Future[bytes | None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._write: asyncio.Task[bool] | None = None
        self._closed = False
        self._away_until = float("-inf")
        self._said = False
        self._hits = self._misses = self._stores = self._failures = self._dropped = 0

    async def start(self) -> None:
        """Opens the file, and makes room if there is more in it than may be; does not wait for
        that longer than a second."""
        self._write = asyncio.create_task(self._written({}, {}))
        await asyncio.wait({self._write}, timeout=_START_S)

    async def get(self, key: bytes) -> Entry | None:
        entry = await self._look(key)
        if entry is None or entry.expires <= self._clock.wall():
            self._misses += 1
            return None
        self._hits += 1
        return entry

    def put(self, key: bytes, entry: Entry) -> None:
        if (
            self._closed
            or not self._here()
            or len(self._waiting) >= _MOST_WAITING
            or self._waiting_bytes + entry.size > _MOST_WAITING_BYTES
            or entry.size > _LARGEST * self.max_bytes
        ):
            self._dropped += 1
            return
        self._stores += 1
        self._change(key, entry)

    def remove(self, key: bytes) -> None:
        if not self._closed:
            self._removals += 1
            self._change(key, None)

    async def entries(self) -> AsyncGenerator[tuple[bytes, Entry], None]:
        """All that has been written, a page in memory at a time."""
        now, after = self._clock.wall(), b""
        while True:
            start = after
            page = await self._in(self._readers, lambda: self._store.page(start, now))  # noqa: B023 - run at once
            for key, data in page or ():
                after = key
                if any(changes.get(key, data) is None for changes in self._changes()):
                    continue
                try:
                    entry = unpack(data)
                except CorruptEntryError:
                    continue
                yield key, entry
            if not page:
                return

    def stats(self) -> TierStats:
        return TierStats(
            entries=self._store.count,
            bytes=self._store.bytes,
            healthy=self._here(),
            hits=self._hits,
            misses=self._misses,
            stores=self._stores,
            evictions=self._store.evictions,
            failures=self._failures,
            dropped=self._dropped,
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            async with asyncio.timeout(_CLOSE_S):
                written = True
                while written and (self._waiting or self._write is not None):
                    self._flush()  # unless a write is under way
                    if self._write is not None:
                        written = await asyncio.shield(self._write)
                await self._in(self._readers, self._store.close_reader)
                await self._in(self._writer, self._store.close_writer)
        except TimeoutError:
            _log.warning("%s: the last answers were not written", self.path)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _here(self) -> bool:
        return self._clock.monotonic() >= self._away_until

    async def _look(self, key: bytes) -> Entry | None:
        for changes in self._changes():
            if key in changes:
                return changes[key]
        if self._closed or not self._here() or len(self._reads) >= _MOST_READS:
            return None
        read = asyncio.ensure_future(self._in(self._readers, lambda: self._store.read(key)))
        removals = self._removals
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        try:
            async with asyncio.timeout(self._read_limit_s):
                data = await asyncio.shield(read)
        except TimeoutError:
            self._failures += 1
            return None
        if data is None or removals != self._removals:  # it may be this one that has gone since
            return None
        try:
            entry = unpack(data)
        except CorruptEntryError:
            self.remove(key)
            return None
        if len(self._touched) < _MOST_WAITING:
            self._touched[key] = self._touched.get(key, 0) + 1
            self._soon()
        return entry

    def _changes(self) -> tuple[_Changes, _Changes]:
        """Later than what is in the file, the latest first."""
        return self._waiting, self._being_written

    def _change(self, key: bytes, entry: Entry | None) -> None:
        self._waiting_bytes += _weight(entry) - _weight(self._waiting.get(key))
        self._waiting[key] = entry
        self._soon()

    def _soon(self) -> None:
        if self._timer is None and self._write is None and not self._closed:
            delay = _FLUSH_S if self._here() else _RETRY_S
            self._timer = asyncio.get_running_loop().call_later(delay, self._flush)

    def _flush(self) -> None:
        """Begins to write what waits; while that lasts, more may gather."""
        self._timer = None
        if self._write is not None or not (self._waiting or self._touched):
            return
        self._being_written = dict(list(self._waiting.items())[:_BATCH])
        for key in self._being_written:
            self._waiting_bytes -= _weight(self._waiting.pop(key))
        touched, self._touched = self._touched, {}
        self._write = asyncio.create_task(self._written(self._being_written, touched))

    async def _written(self, changes: _Changes, touched: dict[bytes, int]) -> bool:
        done = await self._in(self._writer, lambda: self._store.apply(changes, touched))
        if done is None:
            removed = [key for key, entry in changes.items() if entry is None]
            self._dropped += len(changes) - len(removed)
            if len(self._waiting) < _MOST_WAITING:  # what was removed must not come back
                self._waiting = {**dict.fromkeys(removed), **self._waiting}
        self._being_written, self._write = {}, None
        if self._waiting:
            self._soon()
        return done is not None

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], _Result]) -> _Result | None:
        """What `work` gives, or None where the disk fails."""
        try:
            result = await asyncio.get_running_loop().run_in_executor(pool, work)
        except (sqlite3.Error, OSError) as error:
            self._failures += 1
            self._away_until = self._clock.monotonic() + _RETRY_S
            if not self._said:
                _log.warning("the answers in %s are passed by: %s", self.path, error)
                self._said = True
            return None
        if self._said and self._here():
            _log.info("the answers in %s are back", self.path)
            self._said = False
        return result


def _weight(entry: Entry | None) -> int:
    return 0 if entry is None else entry.size


class _Store:
    """The file. `read`, `page` and `close_reader` are called in one thread, the rest in another."""

    def __init__(self, path: Path, max_bytes: int, clock: Clock) -> None:
        self.count: int | None = None
        self.bytes: int | None = None
        self.evictions = 0
        self._path = path
        self._max_bytes = max_bytes
        self._clock = clock
        self._suspect = False
        """Set by either thread: the file is damaged, or so it seems."""
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None

    def read(self, key: bytes) -> bytes | None:
        row = self._asked("SELECT data FROM entries WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def page(self, after: bytes, now: float) -> list[tuple[bytes, bytes]]:
        return self._asked(
            "SELECT key, data FROM entries WHERE key > ? AND expires > ? ORDER BY key LIMIT ?",
            (after, now, _PAGE),
        ).fetchall()

    def apply(self, changes: _Changes, touched: dict[bytes, int]) -> bool:
        """Writes all or nothing, and makes room. True."""
        now = self._clock.wall()
        db = self._open()
        try:
            with db:
                if self.count is None:
                    (self.count,) = db.execute("SELECT COUNT(*) FROM entries").fetchone()
                for key, entry in changes.items():
                    self._delete(db, "DELETE FROM entries WHERE key = ?", key)
                    if entry is not None and entry.expires > now:
                        self._insert(db, key, entry, now)
                db.executemany(
                    "UPDATE entries SET hits = hits + ?, used = ? WHERE key = ?",
                    [(times, now, key) for key, times in touched.items()],
                )
                self._make_room(db, now)
            if self._pages(db, "page_count") > self._max_bytes:
                db.executescript(_VACUUM)
            self.bytes = self._used(db)
        except sqlite3.DatabaseError as error:
            self.count = self.bytes = None  # nothing of it has happened
            self._suspect = not isinstance(error, sqlite3.OperationalError)
            raise
        return True

    def close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> sqlite3.Connection:
        if self._suspect:
            self.close_writer()
        if self._writer is None:
            self._writer = open_store(self._path, _SCHEMA, _VERSION, suspect=self._suspect)
            self._suspect = False
        return self._writer

    def _asked(self, statement: str, values: tuple[object, ...]) -> sqlite3.Cursor:
        if self._reader is None:
            place = f"file:{quote(str(self._path))}?mode=rw"  # there, or not at all
            self._reader = sqlite3.connect(place, uri=True, check_same_thread=False, timeout=1.0)
        try:
            return self._reader.execute(statement, values)
        except sqlite3.DatabaseError as error:
            self.close_reader()
            self._suspect = self._suspect or not isinstance(error, sqlite3.OperationalError)
            raise

    def _insert(self, db: sqlite3.Connection, key: bytes, entry: Entry, now: float) -> None:
        data = pack(entry)
        db.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, 0, ?, ?)",
            (key, len(data) + _ROW_BYTES, entry.expires, entry.saved_s, now, data),
        )
        self.count = (self.count or 0) + 1

    def _delete(self, db: sqlite3.Connection, statement: str, value: object) -> int:
        gone = db.execute(statement, (value,)).rowcount
        self.count = (self.count or 0) - gone
        return gone

    def _make_room(self, db: sqlite3.Connection, now: float) -> None:
        expired = self._delete(db, _DELETE_EXPIRED, now)
        while (used := self._used(db)) > self._max_bytes:
            if expired == _EXPIRED:
                expired = self._delete(db, _DELETE_EXPIRED, now)
                continue
            # By halves, for a row may take more pages than its size says.
            spare = (used - _ROOM * self._max_bytes) / 2
            look_at = max(_LEAST_CHOICE, round(_CHOICE * spare * (self.count or 1) / used))
            rows = db.execute(_WORST, (look_at,)).fetchall()
            if not rows:
                return
            for row, size, _ in rows:
                self._delete(db, "DELETE FROM entries WHERE rowid = ?", row)
                self.evictions += 1
                spare -= size
                if spare <= 0:
                    break

    def _used(self, db: sqlite3.Connection) -> int:
        """What the pages of the file take that are not free."""
        return self._pages(db, "page_count") - self._pages(db, "freelist_count")

    def _pages(self, db: sqlite3.Connection, which: str) -> int:
        """In bytes."""
        (pages,) = db.execute(f"PRAGMA {which}").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
        return int(pages * size)
