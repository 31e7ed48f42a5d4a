"""Who of several replicas computes."""

from __future__ import annotations

import pytest

from support.redis_server import RedisServer, key, remote, until

pytestmark = pytest.mark.anyio


async def test_one_replica_computes_and_the_other_waits(server: RedisServer) -> None:
    async with remote(server.url) as one, remote(server.url) as two:
        give_back = await one.leases.take(key(1), 10.0)
        assert give_back is not None
        assert await two.leases.take(key(1), 10.0) is None
        assert await two.leases.held(key(1))
        assert await two.leases.take(key(2), 10.0) is not None
        await give_back()
        assert not await two.leases.held(key(1))
        again = await two.leases.take(key(1), 10.0)
        assert again is not None
        await give_back()  # it is another's by now
        assert await one.leases.held(key(1))


async def test_a_lease_goes_by_itself(server: RedisServer) -> None:
    async with remote(server.url) as one:
        assert await one.leases.take(key(1), 0.02) is not None

        async def free() -> bool:
            return not await one.leases.held(key(1))

        await until(free)
