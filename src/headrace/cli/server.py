"""One serving process from its bound socket to its exit status."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import uvicorn

from headrace import __version__
from headrace.api import create_app
from headrace.api.server import uvicorn_config
from headrace.cli.banner import banner, exposed_warning, url_of
from headrace.cli.caches import local_embedders, response_cache
from headrace.cli.embedded import EmbeddedEngine, ModelNotFetched
from headrace.cli.progress import StageReporter
from headrace.core.clock import SystemClock
from headrace.core.errors import HeadraceError
from headrace.gateway import Gateway
from headrace.gateway.judging import Judging
from headrace.gateway.keystore import KeyStore
from headrace.telemetry import Metrics, configure_logging

if TYPE_CHECKING:
    from fastapi import FastAPI

    from headrace.config import ServerSettings
    from headrace.config_loading import LoadedSettings
    from headrace.engine.models.store import ModelSource

__all__ = ["CannotListen", "Process", "bind", "run_embedded"]

_BACKLOG = 2048
_LOOK_S = 0.1
"""How often the stages of starting are looked at."""
_CLOSE_S = 5
"""Connections get this long to end after the last answer."""


class CannotListen(Exception):
    """The address cannot be had; the message says what to do."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: from here on clients are not refused but wait."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise CannotListen(f"{host} is no address to listen on; see --host") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise CannotListen(_why_not(error, host, port)) from None
    sock.setblocking(False)
    return sock


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is taken; stop what uses it, or choose another with --port"
            " (0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not allowed to this user; choose one above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; see --host"
    return f"cannot listen on {host} port {port}: {error.strerror}"


class _Uvicorn(uvicorn.Server):
    """Uvicorn whose signals are ours to handle."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _stored(keys: KeyStore) -> int | None:
    """Keys of the store that are good now; None where it does not ask for any."""
    return len(keys.entries()) if keys.guards else None


def run_embedded(
    loaded: LoadedSettings, source: ModelSource, sock: socket.socket, out: TextIO
) -> int:
    """Serves `source` on `sock` until a signal; the exit status."""
    configure_logging(loaded.settings.log, out)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its life is told by us
    clock, metrics = SystemClock(), Metrics()
    settings = loaded.settings
    engine = EmbeddedEngine(source, settings.engine, clock=clock, metrics=metrics)
    keys = KeyStore(settings.keys.file, clock)
    judge_model = settings.caching.semantic.judge_model
    judging = None if judge_model is None else Judging(judge_model, clock)
    embedders = local_embedders(settings.embeddings)
    ask = None if judging is None else judging.ask
    gateway = Gateway(
        [engine],
        settings,
        clock=clock,
        metrics=metrics,
        cache=response_cache(settings.caching, clock, embedders, ask),
        keys=keys,
        embedders=embedders,
    )
    if judging is not None:
        judging.gateway = gateway
    app = create_app(gateway, settings, clock=clock, version=__version__, manage_gateway=False)
    url = url_of(settings.server.host, sock.getsockname()[1])
    name = settings.engine.served_name or source.served_name

    def greeting() -> str:
        return banner(loaded, engine.info, name, url, _stored(keys))

    if (warning := exposed_warning(loaded, _stored(keys))) is not None:
        print(warning, file=out, flush=True)
    process = Process(gateway, app, settings.server, greeting, out)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(process.run(sock))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop


class Process:
    """A gateway behind HTTP: starting, ready, draining, gone. Event loop only."""

    def __init__(
        self,
        gateway: Gateway,
        app: FastAPI,
        settings: ServerSettings,
        greeting: Callable[[], str],
        out: TextIO,
    ) -> None:
        self._gateway = gateway
        self._settings = settings
        self._greeting = greeting
        self._out = out
        self._signals: list[int] = []
        self._signalled = asyncio.Event()
        self._forced = asyncio.Event()
        self._http = _Uvicorn(
            uvicorn_config(
                app,
                settings,
                loop="none",  # it runs on ours
                lifespan="off",  # starting, draining and closing are told and timed here
                timeout_graceful_shutdown=_CLOSE_S,
            )
        )

    async def run(self, sock: socket.socket) -> int:
        """Until a signal has ended it, or starting has failed; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        http = loop.create_task(self._http.serve(sockets=[sock]), name="http")
        try:
            status = await self._start(http)
            if status is None:
                await self._until_signalled(http)
                status = await self._drain()
        finally:
            self._http.should_exit = True
            self._http.force_exit = self._forced.is_set()
            await self._gateway.close()
            await asyncio.wait({http})
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        if not http.cancelled() and http.exception() is not None:
            raise http.exception() or RuntimeError("the HTTP server broke")
        return status

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        self._signalled.set()
        if len(self._signals) > 1:
            self._forced.set()

    async def _start(self, http: asyncio.Task[None]) -> int | None:
        """Shows the stages; None once ready, else the exit status."""
        start = asyncio.create_task(self._gateway.start(), name="start")
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            with StageReporter(self._out) as reporter:
                waiting = {start, signalled, http}
                while not any(task.done() for task in waiting):
                    await asyncio.wait(
                        waiting, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    reporter.follow(self._gateway.health().progress)
            if not start.done():
                return 0
            await start
        except HeadraceError as error:
            self._say(f"headrace: {error.message}")
            return 2 if isinstance(error, ModelNotFetched) else 1
        finally:
            start.cancel()
            signalled.cancel()
            await asyncio.wait({start, signalled})
        gc.collect()
        gc.freeze()  # what exists now lives as long as the process
        self._say(self._greeting())
        return None

    async def _until_signalled(self, http: asyncio.Task[None]) -> None:
        signalled = asyncio.create_task(self._signalled.wait())
        await asyncio.wait({signalled, http}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()

    async def _drain(self) -> int:
        """Refuses new requests and lets the others finish, until a second signal."""
        self._say(
            f"draining: running requests may finish for {self._settings.drain_timeout:g} s;"
            " a second signal ends them at once"
        )
        drain = asyncio.create_task(self._gateway.drain(self._settings.drain_timeout))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({drain, forced}, return_when=asyncio.FIRST_COMPLETED)
        if self._forced.is_set():
            await self._gateway.drain(0.0)
        forced.cancel()
        await drain
        return 128 + self._signals[-1] if self._forced.is_set() else 0

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)
