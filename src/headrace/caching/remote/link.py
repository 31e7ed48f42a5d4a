"""The way to the server: every call bounded, none while it does not answer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from headrace.caching.remote.breaker import Breaker
from headrace.core.clock import Clock

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["Link", "RemoteDownError", "RemoteSettings", "end"]

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_CLOSE_S = 1.0
_MOST_CANCELS = 5


class RemoteDownError(Exception):
    """The server was not asked, did not answer in time, or said something that is no answer."""


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """`url` as redis-py reads it: redis://, rediss:// or unix://, with password and database. All
    keys begin with `prefix`. `timeout_s` bounds a call from asking for a connection to its answer;
    `log_length` is about how many changes are kept for replicas that were away. Raises
    ValueError."""

    url: str = field(repr=False)
    prefix: str = "headrace:"
    timeout_s: float = 0.05
    connections: int = 16
    most_waiting: int = 1_024
    most_waiting_bytes: int = 64 << 20
    max_entry_bytes: int = 8 << 20
    log_length: int = 10_000

    def __post_init__(self) -> None:
        try:
            _ = urlsplit(self.url).port
        except ValueError:  # it may quote what is secret
            raise ValueError("the URL of Redis has no valid host and port") from None

    @property
    def place(self) -> str:
        """The URL without what is nobody's business."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{(parts.hostname or '') or parts.path}" + (
            f":{parts.port}" if parts.port else ""
        )


class Link:
    """Commands within the bound, through one pool and one breaker. Event loop only."""

    def __init__(self, settings: RemoteSettings, clock: Clock, rng: random.Random) -> None:
        self.settings = settings
        self.breaker = Breaker(clock, rng)
        self.failures = 0
        self._client: Redis | None = None
        self._closed = False
        self._tasks: set[asyncio.Future[Any]] = set()

    @property
    def healthy(self) -> bool:
        return self.breaker.state == "closed"

    async def call(
        self, work: Callable[[Redis], Awaitable[_Result]], *, patience: float = 1.0
    ) -> _Result:
        """What `work` gives. `patience` stretches the bound where no request waits. Raises
        RemoteDownError."""
        if self._closed or not self.breaker.allows():
            raise RemoteDownError("passed by")
        try:
            result = await self.bounded(work(self._connected()), self.settings.timeout_s * patience)
        except asyncio.CancelledError:
            if self.breaker.state == "probing":
                self.breaker.failed()  # nobody knows how it would have gone
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, it is no answer
            self._failed(error)
            raise RemoteDownError(type(error).__name__) from None
        self._answered()
        return result

    async def bounded(self, work: Awaitable[_Result], seconds: float) -> _Result:
        """In a task of its own: redis-py may swallow a cancellation or a time-out, and who waits
        for it must not depend on that. Raises TimeoutError."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise TimeoutError
        return task.result()

    def broken(self, reason: str) -> None:
        """An answer that cannot be believed counts as none."""
        self.failures += 1
        _log.debug("%s: %s", self.settings.place, reason)

    def client(self, **options: Any) -> Redis:
        """A client of its own, for who waits long."""
        from redis.asyncio import BlockingConnectionPool, Redis  # noqa: PLC0415 - an extra
        from redis.asyncio.retry import Retry  # noqa: PLC0415
        from redis.backoff import NoBackoff  # noqa: PLC0415

        bound = self.settings.timeout_s
        wanted: dict[str, Any] = {
            "max_connections": self.settings.connections,
            "timeout": bound,
            "socket_timeout": bound,
            "socket_connect_timeout": bound,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "client_name": "headrace",
            **options,
        }
        pool = BlockingConnectionPool.from_url(self.settings.url, **wanted)
        return Redis.from_pool(pool)

    async def close(self) -> None:
        self._closed = True
        await end(self._tasks)
        client, self._client = self._client, None
        if client is not None:
            await self.close_client(client)

    async def close_client(self, client: Redis) -> None:
        """Whatever state it is in, and soon."""
        try:
            await self.bounded(client.aclose(), _CLOSE_S)
        except Exception:  # noqa: BLE001 - it is being thrown away
            _log.debug("a connection could not be closed in order")

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # somebody may have given up waiting for it

    def _connected(self) -> Redis:
        if self._client is None:
            patient = 20 * self.settings.timeout_s  # calls have their own, tighter bound
            self._client = self.client(socket_timeout=patient, socket_connect_timeout=patient)
        return self._client

    def _answered(self) -> None:
        if not self.healthy:
            _log.info("%s answers again", self.settings.place)
        self.breaker.succeeded()

    def _failed(self, error: Exception) -> None:
        from redis.exceptions import ResponseError  # noqa: PLC0415 - an extra

        self.failures += 1
        if isinstance(error, ResponseError):
            self._answered()  # no is an answer too
            return
        was = self.breaker.state
        self.breaker.failed()
        if was == "closed" and self.breaker.state == "open":
            _log.warning("%s is passed by: %s", self.settings.place, type(error).__name__)


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels them as often as it takes, within reason."""
    left = set(tasks)
    for _ in range(_MOST_CANCELS):
        if not left:
            return
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CLOSE_S / _MOST_CANCELS)
