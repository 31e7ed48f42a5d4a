"""A gateway in front of fake backends, its clients, and what must be left when they are gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import anyio
from prometheus_client.parser import text_string_to_metric_families

from headrace.caching import CachePolicy, KeyMaker, MemoryTier, ResponseCache
from headrace.config import LimitSettings, ServerSettings, Settings
from headrace.core.clock import Clock
from headrace.core.events import Event
from headrace.core.request import Request
from headrace.gateway import DEFAULT_TENANT, Gateway, Tenant
from headrace.gateway.claims import Terms
from headrace.telemetry import Metrics
from support.backend import FakeBackend

_NO_TERMS = Terms()


def small_gateway(
    backend: FakeBackend | Sequence[FakeBackend],
    clock: Clock,
    *,
    max_queue: int = 4,
    keys: tuple[str, ...] = (),
    cache: ResponseCache | None = None,
) -> Gateway:
    server: Any = ServerSettings.model_validate({"api_keys": keys})
    settings = Settings(limits=LimitSettings(max_queue=max_queue), server=server)
    backends = [backend] if isinstance(backend, FakeBackend) else backend
    return Gateway(backends, settings, clock=clock, metrics=Metrics(), cache=cache)


def small_cache(clock: Clock, policy: CachePolicy | None = None, **more: Any) -> ResponseCache:
    """A megabyte of memory and whatever `more` says."""
    return ResponseCache(
        MemoryTier(1 << 20, clock),
        KeyMaker(b"a secret of the tests"),
        policy or CachePolicy(),
        clock=clock,
        rng=random.Random(1),
        **more,
    )


class Client:
    """Reads one answer in a task of its own. Once done it has an `error` or a whole answer."""

    def __init__(
        self,
        gateway: Gateway,
        request: Request,
        tenant: Tenant = DEFAULT_TENANT,
        terms: Terms = _NO_TERMS,
    ) -> None:
        self.events: list[Event] = []
        self.error: Exception | None = None
        self._stream = gateway.generate(request, tenant, terms)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self._stream:
                self.events.append(event)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            await self._stream.aclose()

    async def leave(self) -> None:
        """Disconnects, as the edge does it: by cancelling the task."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def done(self) -> None:
        async with asyncio.timeout(10):
            await asyncio.wait([self.task])


async def quiet() -> None:
    """Returns when no task can go on by itself."""
    await anyio.wait_all_tasks_blocked()


def samples(gateway: Gateway) -> dict[str, float]:
    """Every sample that is not zero, as `name{label values}`, but for bucket bounds and times."""
    result: dict[str, float] = {}
    for family in text_string_to_metric_families(gateway.exposition().decode()):
        for sample in family.samples:
            if sample.value and not sample.name.endswith(("_created", "_bucket")):
                labels = ",".join(v for k, v in sample.labels.items() if k != "model_name")
                result[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return result


def outcomes(gateway: Gateway) -> dict[str, float]:
    """How requests ended, over endpoints and models."""
    prefix = "headrace_requests_total{"
    result: dict[str, float] = {}
    for name, value in samples(gateway).items():
        if name.startswith(prefix):
            outcome = name[len(prefix) : -1].split(",")[-1]
            result[outcome] = result.get(outcome, 0) + value
    return result


def assert_nothing_left(gateway: Gateway, backend: FakeBackend) -> None:
    """No request is held anywhere."""
    assert backend.open == []
    left = samples(gateway)
    for gauge in ("running", "waiting"):
        assert f"vllm:num_requests_{gauge}" not in left
    assert "vllm:kv_cache_usage_perc" not in left
    assert not gateway._active
    for lane in gateway._lanes:
        stats = lane.scheduler.stats()
        assert (stats.dispatched, stats.waiting) == (0, 0)
