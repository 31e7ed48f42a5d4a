"""Who of several servers computes an answer that all of them want."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

from headrace.caching.remote.link import Link, RemoteDownError

__all__ = ["RedisLeases"]

_GIVE_BACK = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisLeases:
    """A key that is set only if nobody has set it, and goes by itself. Event loop only."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def take(self, key: bytes, ttl_s: float) -> Callable[[], Awaitable[None]] | None:
        name, token = self._name(key), secrets.token_bytes(16)
        try:
            taken = await self._link.call(
                lambda redis: redis.set(name, token, nx=True, px=max(1, round(1000 * ttl_s)))
            )
        except RemoteDownError:
            # It may have been set all the same, so it is given back like any other.
            taken = True
        if not taken:
            return None

        async def give_back() -> None:
            with suppress(RemoteDownError):
                await self._link.call(lambda redis: redis.eval(_GIVE_BACK, 1, name, token))

        return give_back

    async def held(self, key: bytes) -> bool:
        try:
            return bool(await self._link.call(lambda redis: redis.exists(self._name(key))))
        except RemoteDownError:
            return False

    def _name(self, key: bytes) -> str:
        return f"{self._link.settings.prefix}l1:{key.hex()}"
