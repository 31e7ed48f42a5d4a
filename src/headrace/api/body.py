"""Request bodies: bytes to a validated model, without stopping the event loop for long ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from headrace.api.errors import invalid_body
from headrace.core.errors import InvalidRequest

__all__ = ["parse_object", "read_body", "read_object"]

_LARGE = 256 * 1024
"""Bodies longer than this many bytes are parsed in a thread."""

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The body as `model`. Raises InvalidRequest that names the field."""
    _refuse_foreign_form(request)
    raw = await request.body()
    if len(raw) > _LARGE:
        return await asyncio.to_thread(_parse, raw, model)
    return _parse(raw, model)


async def read_object(request: Request) -> dict[str, Any]:
    """The body as any JSON object, for those who know its keys. Raises InvalidRequest."""
    _refuse_foreign_form(request)
    return parse_object(await request.body())


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no lone surrogates, finite numbers, sane depth, and no key
    twice, since two readers of such a body may see two different requests."""
    try:
        value = orjson.loads(raw)
        # orjson keeps the last of equal keys in silence; the slower parser can tell.
        json.loads(raw, object_pairs_hook=_unique)
    except orjson.JSONDecodeError as error:
        reason = "it is not UTF-8" if "UTF-8" in error.msg else f"{error.msg} at {error.pos}"
        raise InvalidRequest(
            f"The body is not valid JSON: {reason}.", code="invalid_json"
        ) from None
    except _DuplicateKeyError:
        raise InvalidRequest(
            "The body is not valid JSON: a key occurs twice in one object.", code="invalid_json"
        ) from None
    except RecursionError:
        raise InvalidRequest(
            "The body is not valid JSON: it is nested too deeply.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return value


def _parse(raw: bytes, model: type[Model]) -> Model:
    try:
        return model.model_validate(parse_object(raw))
    except ValidationError as error:
        raise invalid_body(error) from None


class _DuplicateKeyError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) != len(pairs):
        raise _DuplicateKeyError


def _refuse_foreign_form(request: Request) -> None:
    """A web page can post text or a form anywhere without the browser asking first; JSON it
    cannot. So a body from a browser must say that it is JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in request.headers and kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest("Send the body with the header `Content-Type: application/json`.")
