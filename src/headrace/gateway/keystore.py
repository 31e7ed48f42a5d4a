"""API keys in a file: made and revoked by a command while a server reads them."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.core.clock import Clock, Entropy
from headrace.gateway.tenants import key_digest

__all__ = ["KeyStore", "KeyStoreError", "StoredKey"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    name TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    digest BLOB NOT NULL UNIQUE,
    ending TEXT NOT NULL,
    created REAL NOT NULL,
    revoked REAL
) STRICT
"""
_PREFIX = "hr-"
_KEY_BYTES = 24
_BUSY_S = 0.1
_CHECK_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class KeyStoreError(Exception):
    """The file cannot be used, or not for this; the message says what to do."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as the store knows it, which is not the key. Times are Unix seconds."""

    name: str
    tenant: str
    ending: str
    created: float
    revoked: float | None


class KeyStore:
    """Implements `KeySource`; the file need not be there.

    A server looks at the file once a second at most and reads it only when it has changed. A file
    that cannot be read leaves what was known of it in force.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._checked: float | None = None
        self._stamp: tuple[tuple[int, int], ...] = ()
        self._entries: tuple[tuple[bytes, str], ...] = ()
        self._guards = False

    @property
    def guards(self) -> bool:
        self._refresh()
        return self._guards

    def entries(self) -> tuple[tuple[bytes, str], ...]:
        self._refresh()
        return self._entries

    def create(self, name: str, tenant: str, entropy: Entropy) -> str:
        """A new key, which is shown here and never again. Raises KeyStoreError."""
        key = _PREFIX + entropy.token(_KEY_BYTES)
        row = (name, tenant, key_digest(key.encode()), key[-4:], self._clock.wall())
        with self._writing() as connection:
            try:
                connection.execute(
                    "INSERT INTO keys (name, tenant, digest, ending, created) VALUES (?,?,?,?,?)",
                    row,
                )
            except sqlite3.IntegrityError:
                raise KeyStoreError(
                    f"there is or was a key named {name}; choose another name"
                ) from None
        return key

    def revoke(self, name: str) -> None:
        """Raises KeyStoreError if there is no such key. The name stays taken."""
        with self._writing() as connection:
            done = connection.execute(
                "UPDATE keys SET revoked = ? WHERE name = ? AND revoked IS NULL",
                (self._clock.wall(), name),
            )
            if not done.rowcount:
                raise KeyStoreError(f"there is no key named {name} that could be revoked")

    def keys(self) -> list[StoredKey]:
        """All of them, oldest first, revoked ones included. Raises KeyStoreError."""
        if not self.path.exists():
            return []
        try:
            with self._reading() as connection:
                rows = connection.execute(
                    "SELECT name, tenant, ending, created, revoked FROM keys ORDER BY created, name"
                ).fetchall()
        except sqlite3.Error as error:
            raise KeyStoreError(f"cannot read {self.path}: {error}") from None
        return [StoredKey(*row) for row in rows]

    def _refresh(self) -> None:
        now = self._clock.monotonic()
        if self._checked is not None and now - self._checked < _CHECK_EVERY_S:
            return
        self._checked = now
        stamp = self._stamps()
        if stamp == self._stamp:
            return
        try:
            if not stamp:
                raise KeyStoreError("the file is gone")
            with self._reading() as connection:
                rows = connection.execute("SELECT digest, tenant, revoked FROM keys").fetchall()
        except (sqlite3.Error, KeyStoreError) as error:
            _log.error(
                "the key store %s cannot be read, its keys stay as they were: %s", self.path, error
            )
            return
        self._stamp = stamp
        self._guards = bool(rows)
        self._entries = tuple((digest, tenant) for digest, tenant, gone in rows if gone is None)

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        """Changes with the file and its log; empty where there is none."""
        found = []
        for path in (self.path, self.path.with_name(self.path.name + "-wal")):
            try:
                status = path.stat()
            except OSError:
                continue
            found.append((status.st_mtime_ns, status.st_size))
        return tuple(found)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S)) as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            with closing(sqlite3.connect(self.path, timeout=10.0)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                with connection:
                    connection.execute(_SCHEMA)
                    yield connection
        except (sqlite3.Error, OSError) as error:
            raise KeyStoreError(f"cannot use {self.path}: {error}") from None
