"""SQLite files that are ours alone: opened, made, or set aside when they cannot be used."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress
from pathlib import Path

__all__ = ["open_store"]

_BUSY_S = 1.0

_log = logging.getLogger(__name__)


def open_store(
    path: Path, schema: str, version: int, *, suspect: bool = False
) -> sqlite3.Connection:
    """In WAL mode, for its owner only. A file that is broken or of another version is renamed to
    `.broken` and begun anew; a `suspect` one is looked through for that. Blocks; the connection may
    be used in any one thread at a time.
    Raises sqlite3.Error or OSError where there can be none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    try:
        return _prepared(path, schema, version, suspect)
    except sqlite3.OperationalError:
        raise  # locked, full, not writable: not the file's fault
    except sqlite3.DatabaseError as error:
        _log.warning("%s cannot be used and is set aside: %s", path, error)
    path.replace(path.with_name(path.name + ".broken"))
    for ending in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + ending).unlink()
    path.touch(mode=0o600)
    return _prepared(path, schema, version, suspect=False)


def _prepared(path: Path, schema: str, version: int, suspect: bool) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False, timeout=_BUSY_S)
    try:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA journal_size_limit = 16777216")
        db.execute("BEGIN IMMEDIATE")
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found == 0:
            for statement in schema.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {version}")
        db.execute("COMMIT")
        if found not in (0, version):
            raise sqlite3.DatabaseError(f"its version is {found}")
        if suspect and db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("it is damaged")
    except BaseException:
        db.close()
        raise
    return db
