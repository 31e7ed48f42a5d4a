"""Keys as the cache makes them."""

from __future__ import annotations

import hashlib


def key(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=32).digest()
