"""Everything that goes through one Redis, started and stopped together."""

from __future__ import annotations

import random

from headrace.caching.epochs import Epochs
from headrace.caching.remote.bulletin import RedisBulletin
from headrace.caching.remote.epochs import SharedEpochs
from headrace.caching.remote.leases import RedisLeases
from headrace.caching.remote.link import Link, RemoteSettings
from headrace.caching.remote.tier import RedisTier
from headrace.core.clock import Clock

__all__ = ["Remote"]


class Remote(RedisTier):
    """The tier, and what comes with it. `secret` is the same on all servers."""

    def __init__(
        self,
        settings: RemoteSettings,
        secret: bytes,
        epochs: Epochs,
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.link = Link(settings, clock, rng)
        super().__init__(self.link, secret, clock)
        self.bulletin = RedisBulletin(self.link)
        self.leases = RedisLeases(self.link)
        self.epochs = SharedEpochs(epochs, self.link, self.bulletin)

    async def start(self) -> None:
        """Returns at once, whether or not Redis can be reached."""
        await super().start()
        await self.bulletin.start()
        await self.epochs.start()

    async def close(self) -> None:
        await self.epochs.close()
        await self.bulletin.close()
        await super().close()
        await self.link.close()
