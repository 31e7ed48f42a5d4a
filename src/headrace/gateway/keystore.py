"""API keys in a file: made and revoked by a command while a server reads them."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import TENANT_NAME
from headrace.core.clock import Clock, Entropy
from headrace.gateway.tenants import key_digest

__all__ = ["KeyStore", "KeyStoreError", "StoredKey"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    name TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    digest BLOB NOT NULL UNIQUE CHECK (typeof(digest) = 'blob' AND length(digest) = 32),
    ending TEXT NOT NULL,
    created REAL NOT NULL,
    revoked REAL
)
"""
_PREFIX = "hr-"
_KEY_BYTES = 24
_SERVER_WAITS_S = 0.02
"""For a locked file, on the event loop; the server looks again a second later."""
_COMMAND_WAITS_S = 10.0
_CHECK_EVERY_S = 1.0
_NOT_WRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
_Stamp = tuple[tuple[int, int, int], ...]
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
    that cannot be read leaves what was known of it in force, and where nothing was known it lets
    nobody in: a damaged file must not open a server that had keys.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._checked: float | None = None
        self._stamp: _Stamp = ()
        self._entries: tuple[tuple[bytes, str], ...] = ()
        self._guards = False
        self._complaint: str | None = None

    @property
    def guards(self) -> bool:
        self._refresh()
        return self._guards

    def entries(self) -> tuple[tuple[bytes, str], ...]:
        self._refresh()
        return self._entries

    def create(self, name: str, tenant: str, entropy: Entropy) -> str:
        """A new key, which is shown here and never again. Raises KeyStoreError."""
        if not re.fullmatch(TENANT_NAME, tenant):
            raise KeyStoreError(
                "a tenant is named by 1 to 64 letters, digits and . _ : @ -; give the key another"
                " name, or name its tenant"
            )
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
        if not self._stamps():
            return []
        rows = self._rows(
            "SELECT name, tenant, ending, created, revoked FROM keys ORDER BY created, name",
            _COMMAND_WAITS_S,
        )
        return [StoredKey(*row) for row in rows]

    def _refresh(self) -> None:
        now = self._clock.monotonic()
        if self._checked is not None and now - self._checked < _CHECK_EVERY_S:
            return
        self._checked = now
        stamp = self._stamps()
        if stamp == self._stamp:
            self._complaint = None
            return
        try:
            if not stamp:
                raise KeyStoreError(f"{self.path} is gone")
            rows = self._rows("SELECT digest, tenant, revoked FROM keys", _SERVER_WAITS_S)
            if not all(isinstance(row[0], bytes) and isinstance(row[1], str) for row in rows):
                raise KeyStoreError(f"{self.path} cannot be read: it holds something else")
        except KeyStoreError as error:
            self._guards = self._guards or bool(stamp)
            self._complain(str(error))
            return
        self._complaint = None
        self._stamp = stamp
        self._guards = bool(rows)
        self._entries = tuple((digest, tenant) for digest, tenant, gone in rows if gone is None)

    def _complain(self, complaint: str) -> None:
        """Once for each cause, not once a second."""
        if complaint != self._complaint:
            self._complaint = complaint
            _log.error("API keys: %s; the %d known stay good", complaint, len(self._entries))

    def _stamps(self) -> _Stamp:
        """Changes with the file and its log; empty where there is none."""
        found = []
        for path in (self.path, self._wal):
            try:
                status = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:  # there, for all that can be told; reading it will say what is wrong
                found.append((0, 0, 0))
            else:
                found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)

    @property
    def _wal(self) -> Path:
        return self.path.with_name(self.path.name + "-wal")

    def _rows(self, query: str, wait_s: float) -> list[Any]:
        """Raises KeyStoreError."""
        try:
            try:
                return self._read(query, "mode=ro", wait_s)
            except sqlite3.OperationalError as error:
                # WAL has even readers write beside the file. Where they may not, as on a read-only
                # mount, nobody else writes either: without a log the file is all there is.
                if error.sqlite_errorcode & 0xFF not in _NOT_WRITABLE or self._wal.exists():
                    raise
                return self._read(query, "mode=ro&immutable=1", wait_s)
        except (sqlite3.Error, OSError) as error:
            raise KeyStoreError(f"{self.path} cannot be read: {error}") from None

    def _read(self, query: str, how: str, wait_s: float) -> list[Any]:
        uri = f"{self.path.absolute().as_uri()}?{how}"
        with closing(sqlite3.connect(uri, uri=True, timeout=wait_s)) as connection:
            return connection.execute(query).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            with closing(sqlite3.connect(self.path, timeout=_COMMAND_WAITS_S)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                with connection:
                    connection.execute(_SCHEMA)
                    yield connection
        except (sqlite3.Error, OSError) as error:
            raise KeyStoreError(f"{self.path} cannot be used: {error}") from None
