"""Keys in a file: what a running server sees of them, and what it does when the file breaks."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

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
        assert "cannot be read" in caplog.text
        caplog.clear()
        with pytest.raises(Unauthorized):
            ring.tenant(b"hr-wrong")


def test_a_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.sqlite"
    path.write_bytes(b"something else entirely" * 100)
    store = KeyStore(path, VirtualClock())
    with pytest.raises(KeyStoreError, match=r"keys\.sqlite"):
        store.create("a", "a", ENTROPY)
    with pytest.raises(KeyStoreError, match=r"keys\.sqlite"):
        store.keys()
