"""The application: routes, what wraps them, and the life of the gateway behind them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from headrace import __version__
from headrace.api import (
    caching,
    chat,
    completions,
    embeddings,
    models,
    probes,
    scheduling,
    tokenize,
)
from headrace.api.base import Context, Gateway
from headrace.api.cache_control import CACHE_HEADERS
from headrace.api.errors import install_error_handlers
from headrace.api.generation import LIMIT_HEADERS, GenerationCalls
from headrace.api.middleware import BodyLimit, KeyCheck, RequestFrame
from headrace.config import Settings
from headrace.core.clock import Clock, Entropy, SystemClock, SystemEntropy

__all__ = ["create_app"]

log = logging.getLogger(__name__)

_EXPOSED = (
    "x-request-id",
    "openai-processing-ms",
    "retry-after",
    "retry-after-ms",
    "server-timing",
    *LIMIT_HEADERS,
    *CACHE_HEADERS,
)


def create_app(
    gateway: Gateway,
    settings: Settings,
    *,
    clock: Clock | None = None,
    entropy: Entropy | None = None,
    version: str = __version__,
    manage_gateway: bool = True,
) -> FastAPI:
    """The app that serves `gateway`.

    With `manage_gateway` the app starts the gateway beside serving, so that the probes tell of
    its progress from the first moment on, and closes it at the end; a start that fails leaves a
    server that is alive and never ready. Without it both are the caller's business.
    """
    clock = clock or SystemClock()
    entropy = entropy or SystemEntropy()
    server = settings.server

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if not manage_gateway:
            yield
            return
        starting = asyncio.create_task(_start(gateway))
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await gateway.close()

    app = FastAPI(
        title="Headrace",
        summary="Many clients, one language model: an OpenAI-compatible server",
        version=version,
        lifespan=lifespan,
        redirect_slashes=False,
        redoc_url=None,
    )
    app.state.context = Context(gateway, settings, clock, entropy)
    for room in (
        *(chat, completions, embeddings, models, tokenize),
        *(probes, scheduling, caching),
    ):
        app.include_router(room.router)
    install_error_handlers(app)

    open_paths = set(probes.PROBE_PATHS)
    if not server.metrics_need_key:
        open_paths.add(probes.METRICS_PATH)
    # Each wraps those above it: the last one meets a request first.
    app.add_middleware(BodyLimit, max_bytes=server.max_body_bytes, timeout=server.body_timeout)
    app.add_middleware(KeyCheck, gateway=gateway, open_paths=open_paths)
    app.add_middleware(
        RequestFrame,
        clock=clock,
        entropy=entropy,
        in_flight=gateway.metrics.http_in_flight,
        calls=GenerationCalls(gateway),
    )
    app.add_middleware(
        CORSMiddleware,
        allow_origins=server.cors.origins,
        allow_credentials=server.cors.credentials,
        allow_methods=("GET", "HEAD", "POST"),  # no PATCH: a web page is no operator
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )
    return app


async def _start(gateway: Gateway) -> None:
    try:
        await gateway.start()
    except Exception:
        log.exception("the gateway could not start")
