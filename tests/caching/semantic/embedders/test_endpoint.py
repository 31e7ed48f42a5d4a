"""An embeddings server that may do anything."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from headrace.caching.semantic.base import EmbeddingFailedError
from headrace.caching.semantic.embedders.endpoint import EndpointEmbedder, EndpointSettings

pytestmark = pytest.mark.anyio

KEY = "sk-hidden"


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mode: ClassVar[str] = "ok"
    asked: ClassVar[list[tuple[str, dict[str, Any], str | None]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, body, self.headers.get("authorization")))
        size = body.get("dimensions") or 3
        data: list[dict[str, Any]] = [
            {"index": n, "embedding": [float(len(text)), 1.0, 2.0, 3.0][:size]}
            for n, text in enumerate(body["input"])
        ]
        status, payload = 200, json.dumps({"data": data[::-1], "model": "m"}).encode()
        if self.mode == "slow":
            time.sleep(0.5)
        elif self.mode == "garbage":
            payload = b"<html>"
        elif self.mode == "fewer":
            payload = json.dumps({"data": data[1:]}).encode()
        elif self.mode == "misnumbered":
            payload = json.dumps({"data": [{**item, "index": 7} for item in data]}).encode()
        elif self.mode == "denied":
            status, payload = 401, f"key {KEY} is unknown".encode()
        elif self.mode == "fails":
            status, payload = 500, b"oops"
        elif self.mode == "hangs up":
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Server.mode, Server.asked = "ok", []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def embedder(url: str, **more: Any) -> EndpointEmbedder:
    return EndpointEmbedder(EndpointSettings(url=url, model="m", api_key=KEY, **more))


async def test_vectors_come_in_the_order_of_the_texts(url: str) -> None:
    made = embedder(url)
    await made.start()
    found = await made.embed(["a", "bbb", "cc"])
    assert [vector[0] for vector in found] == [1.0, 3.0, 2.0]
    assert made.dimensions == 3
    path, body, key = Server.asked[-1]
    assert path == "/v1/embeddings"
    assert body["model"] == "m"
    assert key == f"Bearer {KEY}"
    await made.close()


async def test_shorter_vectors_are_asked_for(url: str) -> None:
    made = embedder(url, dimensions=2)
    await made.start()
    assert (await made.embed(["a"]))[0].shape == (2,)
    assert Server.asked[-1][1]["dimensions"] == 2
    await made.close()


@pytest.mark.parametrize(
    "mode", ["garbage", "fewer", "misnumbered", "denied", "fails", "hangs up", "slow"]
)
async def test_whatever_it_does_is_a_failure_without_the_key(url: str, mode: str) -> None:
    made = embedder(url, timeout_s=0.2)
    await made.start()
    Server.mode = mode
    with pytest.raises(EmbeddingFailedError) as caught:
        await made.embed(["some", "texts"])
    assert KEY not in str(caught.value)
    assert KEY not in repr(made._settings)
    Server.mode = "ok"
    assert len(await made.embed(["some", "texts"])) == 2
    await made.close()


async def test_there_is_nobody() -> None:
    with pytest.raises(EmbeddingFailedError):
        await embedder("http://127.0.0.1:1/v1", timeout_s=0.5).start()
