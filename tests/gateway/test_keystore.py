"""Keys in a file: what a running server sees of them, and what it does when the file breaks."""

from __future__ import annotations

import logging
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.core.clock import SystemEntropy, VirtualClock
from headrace.core.errors import Unauthorized
from headrace.gateway.keystore import KeyStore, KeyStoreError
from headrace.gateway.tenants import DEFAULT_TENANT, KeyRing, Tenant

ENTROPY = SystemEntropy()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "keys.sqlite"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def command(path: Path) -> KeyStore:
    """The store as `headrace keys` opens it, beside the server's."""
    return KeyStore(path, VirtualClock())


def test_keys_open_and_close_a_running_server(
    path: Path, clock: VirtualClock, command: KeyStore
) -> None:
    ring = KeyRing(tenants=[Tenant("chat", weight=3.0)], source=KeyStore(path, clock))
    assert not ring
    assert ring.tenant(None) is DEFAULT_TENANT

    key = command.create("laptop", "chat", ENTROPY).encode()
    clock.advance(1.1)
    assert ring
    with pytest.raises(Unauthorized):
        ring.tenant(None)
    assert ring.tenant(key) == Tenant("chat", weight=3.0)
    other = command.create("phone", "new-one", ENTROPY).encode()
    clock.advance(1.1)
    assert ring.tenant(other) == Tenant("new-one")

    command.revoke("laptop")
    clock.advance(1.1)
    with pytest.raises(Unauthorized):
        ring.tenant(key)
    command.revoke("phone")
    clock.advance(1.1)
    with pytest.raises(Unauthorized):
        ring.tenant(None)  # the last key is gone, and the door stays shut


def test_the_file_is_looked_at_once_a_second_at_most(
    path: Path, clock: VirtualClock, command: KeyStore
) -> None:
    store = KeyStore(path, clock)
    assert store.entries() == ()
    command.create("a", "a", ENTROPY)
    clock.advance(0.9)
    assert store.entries() == ()
    clock.advance(0.2)
    assert len(store.entries()) == 1


def test_the_file_holds_no_key_and_is_the_owners(path: Path, command: KeyStore) -> None:
    key = command.create("a", "a", ENTROPY)
    assert key.startswith("hr-")
    assert len(key) > 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for file in path.parent.iterdir():
        assert key.encode() not in file.read_bytes()
    (stored,) = command.keys()
    assert (stored.name, stored.tenant, stored.ending) == ("a", "a", key[-4:])
    assert stored.revoked is None


def test_names_are_taken_once_and_for_all(command: KeyStore) -> None:
    command.create("a", "a", ENTROPY)
    with pytest.raises(KeyStoreError, match="named a"):
        command.create("a", "b", ENTROPY)
    command.revoke("a")
    with pytest.raises(KeyStoreError, match="named a"):
        command.create("a", "a", ENTROPY)
    for name in ("a", "b"):
        with pytest.raises(KeyStoreError, match=f"named {name}"):
            command.revoke(name)


def test_a_file_that_breaks_leaves_its_keys_in_force(
    path: Path, clock: VirtualClock, command: KeyStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = KeyStore(path, clock)
    ring = KeyRing(source=store)
    key = command.create("a", "a", ENTROPY).encode()
    clock.advance(2)
    assert ring.tenant(key) == Tenant("a")
    for damage in (lambda: path.write_bytes(b"not a database" * 500), path.unlink):
        for log in path.parent.glob("*-wal"):
            log.unlink()
        damage()
        clock.advance(2)
        with caplog.at_level(logging.ERROR):
            assert ring.tenant(key) == Tenant("a")
        (complaint,) = caplog.messages
        assert "the 1 known stay good" in complaint
        clock.advance(2)
        assert ring.tenant(key) == Tenant("a")
        assert len(caplog.messages) == 1, "told once, not every second"
        caplog.clear()
        with pytest.raises(Unauthorized):
            ring.tenant(b"hr-wrong")


def a_foreign_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE keys (digest, tenant, revoked)")
        connection.execute("INSERT INTO keys VALUES ('text', 7, NULL)")
    connection.close()


def a_locked_database(path: Path) -> Iterator[None]:
    path.with_name(path.name + "-wal").unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("BEGIN EXCLUSIVE")
        yield


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"not a database" * 500),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to(path)),
        a_foreign_database,
    ],
    ids=["overwritten", "emptied", "cut off", "a folder", "a loop", "another's"],
)
def test_a_server_that_starts_with_a_broken_file_is_not_open(
    path: Path,
    clock: VirtualClock,
    command: KeyStore,
    damage: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = command.create("a", "a", ENTROPY).encode()
    whole = path.read_bytes()
    damage(path)
    ring = KeyRing([("sk-configured", Tenant("c"))], source=KeyStore(path, clock))
    bare = KeyRing(source=KeyStore(path, clock))
    assert ring.tenant(b"sk-configured") == Tenant("c")
    for credential in (None, key, b"hr-wrong"):
        with pytest.raises(Unauthorized):
            bare.tenant(credential)
    assert "keys.sqlite" in caplog.text
    assert key.decode() not in caplog.text
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(whole)
    clock.advance(1.1)
    assert bare.tenant(key) == Tenant("a")


def test_a_locked_file_is_not_waited_for_and_read_later(
    path: Path, clock: VirtualClock, command: KeyStore
) -> None:
    key = command.create("a", "a", ENTROPY).encode()
    ring = KeyRing(source=KeyStore(path, clock))
    with contextmanager(a_locked_database)(path):
        began = time.perf_counter()
        with pytest.raises(Unauthorized):
            ring.tenant(key)
        assert time.perf_counter() - began < 5, "a command's patience would be longer"
    clock.advance(1.1)
    assert ring.tenant(key) == Tenant("a")


def test_a_file_that_may_only_be_read_is_read(
    path: Path, clock: VirtualClock, command: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a read-only mount, where SQLite cannot make the files that WAL has readers share."""
    key = command.create("a", "a", ENTROPY).encode()
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def mounted(database: str, **more: Any) -> sqlite3.Connection:
        if "immutable=1" not in database:
            error = sqlite3.OperationalError("attempt to write a readonly database")
            error.sqlite_errorcode = sqlite3.SQLITE_READONLY_DIRECTORY
            raise error
        return connect(database, **more)

    monkeypatch.setattr(sqlite3, "connect", mounted)
    assert KeyRing(source=KeyStore(path, clock)).tenant(key) == Tenant("a")
    (stored,) = command.keys()
    assert stored.name == "a"
    path.with_name("keys.sqlite-wal").touch()  # a log: the file alone may be half of the truth
    with pytest.raises(KeyStoreError):
        command.keys()


@pytest.mark.parametrize("tenant", ["", "a/b", "a b", "x" * 65, "a\n", "é"])
def test_a_key_belongs_to_a_tenant_as_the_settings_could_name_it(
    path: Path, command: KeyStore, tenant: str
) -> None:
    with pytest.raises(KeyStoreError, match="tenant is named by"):
        command.create("a", tenant, ENTROPY)
    assert not path.exists()


def test_a_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.sqlite"
    path.write_bytes(b"something else entirely" * 100)
    store = KeyStore(path, VirtualClock())
    with pytest.raises(KeyStoreError, match=r"keys\.sqlite"):
        store.create("a", "a", ENTROPY)
    with pytest.raises(KeyStoreError, match=r"keys\.sqlite"):
        store.keys()
