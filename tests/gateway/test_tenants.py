from __future__ import annotations

import contextlib
import hmac

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.errors import Unauthorized
from headrace.gateway import DEFAULT_TENANT, KeyRing, Tenant
from support.backend import FakeBackend
from support.gateway import small_gateway

KEYS = ("sk-first", "sk-second", "clé-unicode", "\udcff raw byte")


@pytest.mark.parametrize(
    "credential",
    [
        None,
        b"",
        b" ",
        b"sk-first ",
        b" sk-first",
        b"sk-firs",
        b"SK-FIRST",
        b"sk-first\x00",
        b"sk-second,sk-first",
        b"\xff\xfe",
        "clé-unicode".encode("latin-1"),
        b"x" * 100_000,
    ],
)
def test_whatever_is_no_key_is_refused_without_repeating_it(credential: bytes | None) -> None:
    with pytest.raises(Unauthorized) as caught:
        KeyRing.numbered(KEYS).tenant(credential)
    assert caught.value.status == 401
    text = caught.value.message
    assert "sk-" not in text
    assert "x" * 20 not in text


def test_each_key_is_its_own_tenant() -> None:
    ring = KeyRing.numbered(KEYS)
    found = [ring.tenant(key.encode("utf-8", "surrogateescape")) for key in KEYS]
    assert found == [Tenant(f"key-{i}") for i in (1, 2, 3, 4)]


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    ring = KeyRing.numbered(KEYS)
    monkeypatch.setattr(hmac, "compare_digest", spy)
    for credential in (b"sk-first", b"raw byte", b"x" * 100_000, b"no"):
        compared.clear()
        with contextlib.suppress(Unauthorized):
            ring.tenant(credential)
        assert len(compared) == len(KEYS)
        assert {len(part) for pair in compared for part in pair} == {32}


def test_without_keys_everybody_is_the_default_tenant() -> None:
    assert KeyRing().tenant(None) is DEFAULT_TENANT
    assert KeyRing().tenant(b"anything") is DEFAULT_TENANT
    assert not KeyRing()


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_a_mistake(key: str) -> None:
    with pytest.raises(ValueError, match="empty"):
        KeyRing.numbered([key])


def test_keys_are_not_kept() -> None:
    ring = KeyRing.numbered(["sk-first"])
    assert b"sk-first" not in repr(ring._entries).encode()


@pytest.mark.anyio
async def test_the_gateway_reads_its_keys_from_the_settings() -> None:
    gateway = small_gateway(FakeBackend(), VirtualClock(), keys=("sk-a", "sk-b"))
    assert gateway.authenticate(b"sk-b") == Tenant("key-2")
    with pytest.raises(Unauthorized):
        gateway.authenticate(None)
    await gateway.close()
