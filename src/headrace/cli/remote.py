"""A running server, as the verbs that talk to one see it."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Remote", "RemoteError"]

_TIMEOUT_S = 600.0
_PIECE = 1 << 16


class RemoteError(Exception):
    """The server cannot be reached, or said no; the text tells which and why."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A connection for each call, so that threads may share it. Raises RemoteError."""

    url: str
    api_key: str | None = field(default=None, repr=False)

    def json(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[Any, dict[str, str]]:
        """The answer as JSON, and its headers in lower case."""
        data = None if body is None else json.dumps(body).encode()
        with closing(self._connect()) as connection:
            answer = self._ask(connection, method, path, data, headers or {})
            try:
                return json.loads(answer.read()), _lowered(answer)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise RemoteError(f"{self.url} broke off its answer: {error}") from None

    def send(self, path: str, data: bytes) -> Any:
        """POSTs bytes as they are."""
        with closing(self._connect()) as connection:
            answer = self._ask(connection, "POST", path, data, {})
            return json.loads(answer.read())

    def lines(self, path: str) -> Iterator[bytes]:
        """A streamed answer, line by line."""
        with closing(self._connect()) as connection:
            answer = self._ask(connection, "GET", path, None, {})
            try:
                yield from answer
            except (OSError, http.client.HTTPException) as error:
                raise RemoteError(f"{self.url} broke off its answer: {error}") from None

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RemoteError(f"{self.url} is not the URL of a server")
        try:
            if parts.scheme == "https":
                return http.client.HTTPSConnection(
                    parts.hostname,
                    parts.port,
                    timeout=_TIMEOUT_S,
                    context=ssl.create_default_context(),
                )
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
        except ValueError:
            raise RemoteError(f"{self.url} is not the URL of a server") from None

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json", **headers}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        base = urlsplit(self.url if "//" in self.url else f"http://{self.url}").path.rstrip("/")
        try:
            connection.request(method, base + path, data, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
            raise RemoteError(f"{self.url} cannot be reached: {reason or error}") from None
        if answer.status >= 400:
            raise RemoteError(_why(answer))
        return answer


def _lowered(answer: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.getheaders()}


def _why(answer: http.client.HTTPResponse) -> str:
    said = answer.read(_PIECE)
    try:
        return f"{answer.status}: {json.loads(said)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{answer.status} {answer.reason}"
