"""What the semantic tier has learnt, kept over a restart."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.caching.sqlite import open_store
from headrace.core.clock import Clock

__all__ = ["Journal"]

_VERSION = 1
_SCHEMA = """
CREATE TABLE questions (
    key BLOB PRIMARY KEY, part BLOB NOT NULL, text TEXT NOT NULL, expires REAL NOT NULL
) STRICT;
CREATE TABLE wrong (pair BLOB PRIMARY KEY) STRICT
"""
_SELECT = """
SELECT rowid, part, text, key, expires FROM questions WHERE rowid > ? ORDER BY rowid LIMIT ?
"""
_FLUSH_S = 0.2
_PAGE = 256
_MOST_PENDING = 10_000

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Row = tuple[bytes, str, bytes, float]


class Journal:
    """SQLite, in a thread of its own. Writes are gathered for a fifth of a second. A file that
    cannot be used is set aside, and one that cannot be made is done without; nothing raises.
    Event loop only."""

    def __init__(self, path: Path, clock: Clock, *, most: int) -> None:
        self._path = path
        self._clock = clock
        self._most = most
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-journal")
        self._db: sqlite3.Connection | None = None
        self._opened = False
        self._pending: list[tuple[str, tuple[object, ...]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writes: set[asyncio.Future[None]] = set()
        self._closed = False

    def learned(self, partition: bytes, text: str, key: bytes, expires: float) -> None:
        self._write(
            "INSERT OR REPLACE INTO questions VALUES (?, ?, ?, ?)", (key, partition, text, expires)
        )

    def forgotten(self, key: bytes) -> None:
        self._write("DELETE FROM questions WHERE key = ?", (key,))

    def wrong(self, pair: bytes) -> None:
        self._write("INSERT OR IGNORE INTO wrong VALUES (?)", (pair,))

    async def wrongs(self) -> list[bytes]:
        """The pairs known to be different, oldest first."""
        rows: list[tuple[bytes]] = await self._run(
            lambda db: db.execute("SELECT pair FROM wrong ORDER BY rowid").fetchall(), []
        )
        return [pair for (pair,) in rows]

    async def questions(self) -> AsyncGenerator[list[_Row], None]:
        """In pages: partition, text, key and expiry of those that have not expired, oldest
        first."""
        now, after = self._clock.wall(), 0
        await self._run(lambda db: _purge(db, now, self._most), None)
        while True:
            start = after
            rows: list[tuple[int, bytes, str, bytes, float]] = await self._run(
                lambda db: db.execute(_SELECT, (start, _PAGE)).fetchall(),  # noqa: B023 - run at once
                [],
            )
            if not rows:
                return
            after = rows[-1][0]
            yield [row[1:] for row in rows]

    async def close(self) -> None:
        """Writes what waits. Idempotent."""
        if self._closed:
            return
        self._flush()
        self._closed = True
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._run(lambda db: db.close(), None)
        self._thread.shutdown(wait=False)

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        if self._closed or len(self._pending) >= _MOST_PENDING:
            return
        self._pending.append((statement, values))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, []
        if pending and not self._closed:
            work = asyncio.ensure_future(self._run(lambda db: _write_all(db, pending), None))
            self._writes.add(work)
            work.add_done_callback(self._writes.discard)

    async def _run(
        self, work: Callable[[sqlite3.Connection], _Result], otherwise: _Result
    ) -> _Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._in_thread, work, otherwise)

    def _in_thread(
        self, work: Callable[[sqlite3.Connection], _Result], otherwise: _Result
    ) -> _Result:
        if not self._opened:
            self._opened = True
            self._db = _open(self._path)
        if self._db is None:
            return otherwise
        try:
            return work(self._db)
        except sqlite3.Error as error:
            _log.warning("the journal of questions failed: %s", error)
            return otherwise


def _open(path: Path) -> sqlite3.Connection | None:
    try:
        return open_store(path, _SCHEMA, _VERSION)
    except (sqlite3.Error, OSError) as error:
        _log.warning("what is learnt of questions is not kept in %s: %s", path, error)
        return None


def _write_all(db: sqlite3.Connection, pending: list[tuple[str, tuple[object, ...]]]) -> None:
    with db:
        for statement, values in pending:
            db.execute(statement, values)


def _purge(db: sqlite3.Connection, now: float, most: int) -> None:
    """Drops what has expired, and the oldest of what is too many."""
    with db:
        db.execute("DELETE FROM questions WHERE expires <= ?", (now,))
        db.execute(
            "DELETE FROM questions WHERE rowid NOT IN"
            " (SELECT rowid FROM questions ORDER BY rowid DESC LIMIT ?)",
            (most,),
        )
