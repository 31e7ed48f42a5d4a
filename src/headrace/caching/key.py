"""The name under which an answer is kept: a keyed hash over everything that decides it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import msgspec

from headrace.core.request import Request

__all__ = ["KEY_BYTES", "SCHEMA", "KeyMaker", "last_question"]

KEY_BYTES = 32

SCHEMA = 1
"""Changes with every change of what a key covers."""

_LEFT_OUT = frozenset(
    ("id", "arrival", "user", "metadata", "priority", "tenant", "prompt_token_ids")
)
"""What does not decide the answer. A field that is added to Request is in the key unless it is
named here. The tenant is part of the scope."""

_KEPT = tuple(sorted(field.name for field in fields(Request) if field.name not in _LEFT_OUT))


def _plain(value: Any) -> Any:
    """For what JSON has no own word for."""
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError


_encoder = msgspec.json.Encoder(order="sorted", enc_hook=_plain)


class KeyMaker:
    """Keys of 32 bytes by keyed BLAKE2b: without the secret nobody can tell a request's key, or a
    request from its key. Safe from any thread."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise ValueError("a secret of at least 16 bytes")
        self._secret = hashlib.blake2b(secret, digest_size=32, person=b"headrace-cache").digest()

    def key(self, request: Request, scope: tuple[str | int, ...]) -> bytes:
        """The same for two requests that differ only in ways that do not decide the answer. `scope`
        is everything that decides it and is not in the request: tenant, model, namespace..."""
        return self._digest(b"exact", scope, [getattr(request, name) for name in _KEPT])

    def partition(self, request: Request, scope: tuple[str | int, ...]) -> tuple[bytes, str] | None:
        """The request without its last user message, and that message; None if it does not end with
        one. Messages of one partition may be compared: all else is equal."""
        text = last_question(request)
        if text is None:
            return None
        if request.messages is None:
            blank = replace(request, prompt="")
        else:
            blank = replace(
                request,
                messages=(*request.messages[:-1], replace(request.messages[-1], content=None)),
            )
        return self._digest(b"partition", scope, [getattr(blank, name) for name in _KEPT]), text

    def sample(self, key: bytes, number: int) -> bytes:
        """The key of one of several answers to one request."""
        return hashlib.blake2b(
            key + number.to_bytes(4, "little"), digest_size=32, key=self._secret
        ).digest()

    def _digest(self, kind: bytes, scope: tuple[str | int, ...], values: list[Any]) -> bytes:
        # JSON quotes and separates, so no part can imitate a border between two others.
        data = _encoder.encode((SCHEMA, scope, _KEPT, values))
        return hashlib.blake2b(kind + data, digest_size=32, key=self._secret).digest()


def last_question(request: Request) -> str | None:
    """What the user asked last: all that the semantic tier compares. Prompts without a
    conversation around them have no such part."""
    if not request.messages:
        return None
    last = request.messages[-1]
    if last.role != "user" or not last.content or last.tool_calls:
        return None
    return last.content
