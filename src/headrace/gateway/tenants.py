"""Who is asking."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.errors import Unauthorized

__all__ = ["DEFAULT_TENANT", "KeyRing", "Tenant"]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A party whose requests are kept apart from those of others: caches, queues, limits."""

    name: str


DEFAULT_TENANT = Tenant("default")


class KeyRing:
    """API keys, held as digests, each with its tenant. Without keys everybody is the default one.

    Every key is compared on every look-up, in constant time and as bytes, so that neither the
    position nor a prefix of a key can be measured.
    """

    def __init__(self, keys: Iterable[tuple[str, Tenant]] = ()) -> None:
        entries = []
        for key, tenant in keys:
            if not key.strip():
                raise ValueError("an API key must not be empty")
            entries.append((_digest(key.encode("utf-8", "surrogateescape")), tenant))
        self._entries = tuple(entries)

    @classmethod
    def numbered(cls, keys: Iterable[str]) -> KeyRing:
        """A tenant of its own for each key: key-1, key-2, in the order given."""
        return cls((key, Tenant(f"key-{i}")) for i, key in enumerate(keys, 1))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def tenant(self, credential: bytes | None) -> Tenant:
        """The tenant of this key. Raises Unauthorized, and never repeats the credential."""
        if not self._entries:
            return DEFAULT_TENANT
        if not credential:
            raise Unauthorized(
                "No API key was given. Send it in the header `Authorization: Bearer KEY`."
            )
        given = _digest(credential)
        found: Tenant | None = None
        for digest, tenant in self._entries:
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise Unauthorized("The API key is not valid.")
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
