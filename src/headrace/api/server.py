"""uvicorn, set up for long streams."""

from __future__ import annotations

from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.api.sse import ABORT
from headrace.config import ServerSettings

__all__ = ["HttpProtocol", "uvicorn_config"]

MAX_HEAD_BYTES = 256 * 1024


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's fast parser, with a bound on request heads and a way to drop a connection.

    Closing waits until everything written is read, which a stalled client never does.
    """

    _head_bytes = 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        extensions: dict[str, Any] = {ABORT: self.transport.abort}
        self.scope["extensions"] = extensions

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("request head too large")  # the parser's caller answers 400


def uvicorn_config(app: ASGIApp, server: ServerSettings, **overrides: Any) -> uvicorn.Config:
    """The server's configuration; `overrides` are uvicorn's own names."""
    options: dict[str, Any] = {
        "host": server.host,
        "port": server.port,
        "http": HttpProtocol,
        "loop": "auto",
        "ws": "none",
        "lifespan": "on",
        "timeout_keep_alive": server.idle_timeout,
        "server_header": False,
        "access_log": False,
        "log_config": None,
        **overrides,
    }
    return uvicorn.Config(app, **options)
