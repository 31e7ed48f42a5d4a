"""The response cache as its operator and its users see it, and how they undo what it did."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from headrace.api.access import guarded, require_admin, require_operator
from headrace.api.base import context_of, tenant_of
from headrace.api.body import read_object
from headrace.api.openapi import any_object, refusals
from headrace.caching import CorruptEntryError, Entry, pack, unpack
from headrace.core.errors import InvalidRequest, NotFound, PermissionDenied
from headrace.core.events import Delta, Finish

__all__ = ["router"]

router = APIRouter(tags=["cache"], prefix="/v1/cache")

_ENTRY = re.compile(r"[0-9a-f]{64}")
_SCOPE = ("tenant", "model", "namespace", "tag")


@router.get(
    "/stats",
    operation_id="cache_stats",
    summary="What the response cache holds and what it has saved",
    response_class=Response,
    responses=refusals(401, 403, 404),
)
async def stats(http: HttpRequest) -> Response:
    """For an admin's key; open where there are no keys. Counts are since the start."""
    require_admin(http)
    return _json(context_of(http).gateway.cache_stats())


@router.post(
    "/invalidate",
    operation_id="invalidate_cache",
    summary="Forget all stored answers of a tenant, a model, a namespace or a tag",
    response_class=Response,
    responses=refusals(400, 401, 403, 404),
    openapi_extra=any_object(
        "`tenant`, `model`, `namespace` and `tag` as far as they matter; {} is all."
    ),
)
async def invalidate(http: HttpRequest) -> Response:
    """None of them is found from now on, in any tier, here or on other replicas that share it.
    A tenant may forget what is its own, an admin anything."""
    if not guarded(http):
        require_operator(http)
    asked = await read_object(http)
    scope: dict[str, str | None] = {}
    for key, value in asked.items():
        if key not in _SCOPE:
            raise InvalidRequest(f"'{key[:64]}' is none of {', '.join(_SCOPE)}.", param=key[:64])
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"'{key}' should be a string.", param=key)
        scope[key] = value
    tenant = tenant_of(http)
    if guarded(http) and not tenant.admin:
        if scope.get("tenant", tenant.name) != tenant.name:
            raise PermissionDenied("Another tenant's answers need the key of an admin.")
        scope["tenant"] = tenant.name
    context_of(http).gateway.invalidate_cache(**scope)
    return _json({"invalidated": {name: scope.get(name) for name in _SCOPE}})


@router.get(
    "/entries/{entry}",
    operation_id="get_cache_entry",
    summary="One stored answer, and what is known of it",
    response_class=Response,
    responses=refusals(400, 401, 403, 404),
)
async def show(http: HttpRequest) -> Response:
    """`entry` is the header x-cache-entry. Who knows it has seen the answer."""
    entry = await context_of(http).gateway.cached(_key(http.path_params["entry"], "entry"))
    if entry is None:
        raise NotFound("There is no such entry, or not any more.", param="entry")
    return _json(_shown(entry, context_of(http).clock.wall()))


@router.delete(
    "/entries/{entry}",
    operation_id="forget_cache_entry",
    summary="Forget one stored answer",
    response_class=Response,
    responses=refusals(400, 401, 403, 404),
)
async def forget(http: HttpRequest) -> Response:
    """`entry` is the header x-cache-entry of an answer that came from the cache. Who knows it has
    seen the answer, and may have it computed anew."""
    if not guarded(http):
        require_operator(http)
    context_of(http).gateway.forget_cached(_key(http.path_params["entry"], "entry"))
    return _json({"forgotten": True})


@router.post(
    "/feedback",
    operation_id="cache_feedback",
    summary="Tell whether a stored answer fitted the question",
    response_class=Response,
    responses=refusals(400, 401, 403, 404),
    openapi_extra=any_object(
        "`good`: true or false, and `pair`, the header x-cache-pair of an answer found by meaning,"
        " or `entry`, the header x-cache-entry of any."
    ),
)
async def feedback(http: HttpRequest) -> Response:
    """A wrong pair of questions is never again taken for the same; a wrong entry is removed."""
    body = await read_object(http)
    good, pair, entry = body.get("good"), body.get("pair"), body.get("entry")
    if not isinstance(good, bool):
        raise InvalidRequest("'good' should be true or false.", param="good")
    if (pair is None) == (entry is None):
        raise InvalidRequest("Give either 'pair' or 'entry'.", param="pair")
    gateway = context_of(http).gateway
    if pair is None:
        key = _key(entry, "entry")
        if not good:
            gateway.forget_cached(key)
    else:
        if not isinstance(pair, str) or not _ENTRY.fullmatch(pair):
            raise InvalidRequest("'pair' should be the header x-cache-pair.", param="pair")
        if not gateway.judge_cached(pair, good=good):
            raise NotFound("This pair is not known, or not any more.", param="pair")
    return _json({"noted": True})


@router.get(
    "/export",
    operation_id="export_cache",
    summary="Every stored answer of this server, a JSON object a line",
    response_class=Response,
    responses=refusals(401, 403, 404),
)
async def export(http: HttpRequest) -> Response:
    """For an admin, or without keys for clients on the server's own machine: it is what users were
    answered. Names of entries are of use only to servers with the same caching.secret."""
    require_operator(http)
    entries = context_of(http).gateway.all_cached()

    async def lines() -> AsyncIterator[bytes]:
        async for key, entry in entries:
            line = {"key": key.hex(), "entry": base64.b64encode(pack(entry)).decode()}
            yield orjson.dumps(line) + b"\n"

    return StreamingResponse(lines(), media_type="application/jsonl")


@router.post(
    "/import",
    operation_id="import_cache",
    summary="Take over what another server has exported",
    response_class=Response,
    responses=refusals(400, 401, 403, 404),
)
async def take(http: HttpRequest) -> Response:
    """The body is lines of an export. Those that have expired are skipped."""
    require_operator(http)
    gateway = context_of(http).gateway
    entries = [
        _exported(line, number)
        for number, line in enumerate((await http.body()).splitlines(), 1)
        if line.strip()
    ]
    taken = sum([gateway.take_cached(key, entry) for key, entry in entries])
    return _json({"taken": taken, "skipped": len(entries) - taken})


def _exported(line: bytes, number: int) -> tuple[bytes, Entry]:
    try:
        item = orjson.loads(line)
        return bytes.fromhex(item["key"]), unpack(base64.b64decode(item["entry"], validate=True))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, binascii.Error):
        pass
    except CorruptEntryError:
        pass
    raise InvalidRequest(f"Line {number} is not one of an export; nothing was taken.")


def _shown(entry: Entry, now: float) -> dict[str, Any]:
    try:
        events = entry.events()
    except CorruptEntryError:
        raise NotFound("There is no such entry, or not any more.", param="entry") from None
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, Delta) and not event.prompt:
            texts[event.index] = texts.get(event.index, "") + event.text
    return {
        "created": entry.created,
        "expires": entry.expires,
        "age_s": round(max(0.0, now - entry.created), 3),
        "saved_s": round(entry.saved_s, 3),
        "bytes": entry.size,
        "prompt_tokens": entry.prompt_tokens,
        "completion_tokens": entry.completion_tokens,
        "tags": [tag for tag, _ in entry.tags],
        "choices": [
            {
                "index": event.index,
                "text": texts.get(event.index, ""),
                "finish_reason": event.reason.value,
            }
            for event in events
            if isinstance(event, Finish)
        ],
    }


def _key(text: object, param: str) -> bytes:
    if not isinstance(text, str) or not _ENTRY.fullmatch(text):
        raise InvalidRequest(f"'{param}' should be the header x-cache-entry.", param=param)
    return bytes.fromhex(text)


def _json(payload: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")
