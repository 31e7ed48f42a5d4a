"""One Redis for all tests that do it no harm, and one each for those that do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.redis_server import RedisServer, redis_server


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis") / "data") as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    shared.run("FLUSHALL")
    return shared


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may kill."""
    with redis_server(tmp_path / "data") as server:
        yield server
