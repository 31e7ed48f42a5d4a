from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.core.clock import VirtualClock
from headrace.gateway import Gateway
from headrace.telemetry import Metrics
from support.backend import FakeBackend
from support.gateway import small_gateway


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def backend() -> FakeBackend:
    """Runs two choices at once."""
    return FakeBackend(max_running=2)


@pytest.fixture
async def gateway(backend: FakeBackend, clock: VirtualClock) -> AsyncIterator[Gateway]:
    """Lets four choices wait."""
    gateway = small_gateway(backend, clock)
    yield gateway
    await gateway.close()


@pytest.fixture
def metrics(gateway: Gateway) -> Metrics:
    return gateway.metrics
