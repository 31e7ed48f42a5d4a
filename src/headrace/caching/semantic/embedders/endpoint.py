"""Vectors from any server with OpenAI's /v1/embeddings."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import numpy as np

from headrace.caching.semantic.base import EmbeddingFailedError
from headrace.caching.semantic.embedders.batcher import Batcher

if TYPE_CHECKING:
    from headrace.caching.semantic.base import Vector

__all__ = ["EndpointEmbedder", "EndpointSettings"]

_LARGEST_ANSWER = 64 << 20
_BATCH = 64
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """`url` up to and with /v1. `dimensions` asks for shorter vectors, where the model can.
    `timeout_s` is for connecting and for each wait on the socket."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    dimensions: int | None = None
    timeout_s: float = 2.0
    max_characters: int = 2_000
    workers: int = 4


class _Item(msgspec.Struct):
    index: int
    embedding: list[float]


class _Answer(msgspec.Struct):
    data: list[_Item]


_read = msgspec.json.Decoder(_Answer)


class EndpointEmbedder:
    """Connections are kept, one for each worker thread; no proxy of the environment is used."""

    def __init__(self, settings: EndpointSettings) -> None:
        url = urlsplit(settings.url.rstrip("/"))
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"not an http address: {settings.url}")
        self._settings = settings
        self._secure = url.scheme == "https"
        self._host, self._port = url.hostname, url.port
        self._path = url.path + "/embeddings"
        self._dimensions = 0
        self._local = threading.local()
        self._connections: list[HTTPConnection] = []
        self._batcher: Batcher[str] | None = None

    @property
    def id(self) -> str:
        port = "" if self._port is None else f":{self._port}"
        return f"{self._host}{port}{self._path}|{self._settings.model}|{self._dimensions}"

    @property
    def dimensions(self) -> int:
        """0 until started: what the server gives decides it."""
        return self._dimensions

    @property
    def max_characters(self) -> int:
        return self._settings.max_characters

    async def start(self) -> None:
        if self._batcher is None:
            self._batcher = Batcher(
                self._run,
                lambda _text: 1,
                budget=_BATCH,
                workers=self._settings.workers,
                name="embeddings",
            )
        if not self._dimensions:
            found = len((await self._batcher.submit(["How long is a vector?"]))[0])
            wanted = self._settings.dimensions
            if not found or (wanted is not None and found != wanted):
                raise EmbeddingFailedError(f"vectors of {found} numbers, not {wanted}")
            self._dimensions = found

    async def embed(self, texts: Sequence[str]) -> list[Vector]:
        if self._batcher is None:
            raise EmbeddingFailedError("the embeddings endpoint is not started")
        if any(len(text) > self.max_characters for text in texts):
            raise EmbeddingFailedError(f"a text of more than {self.max_characters} characters")
        return await self._batcher.submit(texts)

    async def close(self) -> None:
        batcher, self._batcher = self._batcher, None
        connections, self._connections = self._connections, []
        for connection in connections:
            await asyncio.to_thread(connection.close)
        if batcher is not None:
            await batcher.close()

    # In worker threads.

    def _run(self, texts: list[str]) -> list[Vector]:
        body: dict[str, object] = {
            "model": self._settings.model,
            "input": texts,
            "encoding_format": "float",
        }
        if self._settings.dimensions is not None:
            body["dimensions"] = self._settings.dimensions
        data = self._post(msgspec.json.encode(body))
        try:
            items = sorted(_read.decode(data).data, key=lambda item: item.index)
        except msgspec.MsgspecError as error:
            raise EmbeddingFailedError(f"not an answer of /v1/embeddings: {error}") from None
        if [item.index for item in items] != list(range(len(texts))):
            raise EmbeddingFailedError(
                f"{len(items)} vectors for {len(texts)} texts, or misnumbered"
            )
        return [np.array(item.embedding, dtype=np.float32) for item in items]

    def _post(self, body: bytes) -> bytes:
        """A kept connection that the server has closed meanwhile is opened anew, once."""
        for fresh in (False, True):
            connection = self._connection(fresh)
            reused = connection.sock is not None
            try:
                return self._exchange(connection, body)
            except (OSError, HTTPException) as error:
                connection.close()
                if isinstance(error, TimeoutError) or not reused:
                    raise EmbeddingFailedError(f"{self._host}: {self._plain(error)}") from None
        raise EmbeddingFailedError(f"{self._host}: the connection was closed twice")

    def _exchange(self, connection: HTTPConnection, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._settings.api_key is not None:
            headers["Authorization"] = f"Bearer {self._settings.api_key}"
        connection.request("POST", self._path, body, headers)
        answer = connection.getresponse()
        data = answer.read(_LARGEST_ANSWER + 1)
        if len(data) > _LARGEST_ANSWER:
            connection.close()
            raise EmbeddingFailedError(f"{self._host}: an answer of more than 64 MiB")
        if answer.status != 200:
            said = data[:_SHOWN].decode(errors="replace")
            raise EmbeddingFailedError(f"{self._host}: status {answer.status}: {self._plain(said)}")
        return data

    def _connection(self, fresh: bool) -> HTTPConnection:
        kept: HTTPConnection | None = getattr(self._local, "connection", None)
        if kept is not None and not fresh:
            return kept
        timeout = self._settings.timeout_s
        connection = (
            HTTPSConnection(
                self._host, self._port, timeout=timeout, context=ssl.create_default_context()
            )
            if self._secure
            else HTTPConnection(self._host, self._port, timeout=timeout)
        )
        self._local.connection = connection
        self._connections.append(connection)
        if kept is not None and kept in self._connections:
            self._connections.remove(kept)
        return connection

    def _plain(self, said: object) -> str:
        """Without the key, which a server may echo."""
        key = self._settings.api_key
        return str(said).replace(key, "***") if key else str(said)
