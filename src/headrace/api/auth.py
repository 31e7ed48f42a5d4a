"""Which key came with a request. Whether it is a good one is the gateway's to say."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["credential_of"]


def credential_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The bytes after `Authorization: Bearer`, or None.

    The scheme is case-insensitive, the key is not touched. Two such headers name no one: which of
    them counts would depend on who reads. Keys in the URL end up in logs, so none is read there.
    """
    values = [value for name, value in headers if name.lower() == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    if scheme.lower() != b"bearer":
        return None
    return key.lstrip(b" ") or None
