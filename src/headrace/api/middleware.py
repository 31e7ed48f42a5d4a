"""What every request passes before a route sees it. Plain ASGI: a wrapper that copies messages
through queues would cost each token more than all the rest of the way."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable

from prometheus_client import Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.auth import credential_of
from headrace.api.base import Gateway
from headrace.api.errors import error_response, internal_error
from headrace.api.generation import GenerationCalls, note_refusal
from headrace.core.clock import Clock, Entropy
from headrace.core.errors import HeadraceError, PayloadTooLarge, RequestTimeout, Unauthorized

__all__ = ["BodyLimit", "KeyCheck", "RequestFrame"]

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_LINGER_S = 1.0
_BODYLESS = frozenset({"GET", "HEAD", "OPTIONS"})


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


class RequestFrame:
    """Gives each request its id and each answer the headers that OpenAI's have.

    A sane `x-request-id` of the caller is kept, else a new one is made. It is also the last net:
    an unforeseen exception is logged under that id and answered with a plain 500. `calls` adds
    what the generation endpoints have besides, here because each wrapper more costs every token.
    """

    def __init__(
        self,
        app: ASGIApp,
        clock: Clock,
        entropy: Entropy,
        in_flight: Gauge,
        calls: GenerationCalls | None = None,
    ) -> None:
        self._app = app
        self._in_flight = in_flight
        self._calls = calls
        self._clock = clock
        self._entropy = entropy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = self._clock.monotonic()
        given = _header(scope, b"x-request-id")
        if given is None or not _REQUEST_ID.fullmatch(given):
            given = b"req_" + self._entropy.token(16).encode()
        scope.setdefault("state", {})["request_id"] = given.decode()
        started = False
        calls = self._calls

        async def framed(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                took = round((self._clock.monotonic() - began) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", given),
                    (b"openai-processing-ms", str(took).encode()),
                    (b"openai-version", b"2020-10-01"),
                    *(calls.headers(scope) if calls is not None else ()),
                ]
            await send(message)

        self._in_flight.inc()
        try:
            await self._app(scope, receive, framed)
        except Exception:
            if started:
                raise  # the answer cannot be completed: the server logs it and hangs up
            log.exception("request %s failed", given.decode())
            fault = internal_error()
            note_refusal(scope, fault)
            await error_response(fault)(scope, receive, framed)
        finally:
            self._in_flight.dec()
            if calls is not None:
                calls.ended(scope, answered=started)


class KeyCheck:
    """Everything but `open_paths` needs a key that the gateway knows; `state.tenant` is whose."""

    def __init__(self, app: ASGIApp, gateway: Gateway, open_paths: Iterable[str]) -> None:
        self._app = app
        self._gateway = gateway
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                tenant = self._gateway.authenticate(credential_of(scope["headers"]))
            except Unauthorized as refusal:
                note_refusal(scope, refusal)
                await error_response(refusal)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads each body before its route runs: no more than `max_bytes`, within `timeout` seconds.

    A declared length that is too large is refused unread, an undeclared one as soon as it is.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _BODYLESS:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except HeadraceError as refusal:
            note_refusal(scope, refusal)
            await _refuse_unread(refusal, receive, send)
            return
        if body is None:
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, or None if the client left meanwhile."""
        declared = _header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large()
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise RequestTimeout(
                f"The body did not arrive within {self._timeout:g} seconds."
            ) from None

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The body is larger than {self._max_bytes} bytes.")


def _replay(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


async def _refuse_unread(refusal: HeadraceError, receive: Receive, send: Send) -> None:
    """Answers at once, then looks away while the client may still be sending, and closes.

    Closing at once would reset the connection, and the client might never see the answer.
    """
    response = error_response(refusal, {"connection": "close"})
    await send(
        {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
    )
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    try:
        async with asyncio.timeout(_LINGER_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
