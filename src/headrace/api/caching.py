"""The response cache as its operator and its users see it, and how they undo what it did."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.access import guarded, require_admin, require_operator
from headrace.api.base import context_of, tenant_of
from headrace.api.body import read_object
from headrace.api.openapi import any_object, refusals
from headrace.core.errors import InvalidRequest, NotFound, PermissionDenied

__all__ = ["router"]

router = APIRouter(tags=["cache"])

_ENTRY = re.compile(r"[0-9a-f]{64}")
_SCOPE = ("tenant", "model", "namespace")


@router.get(
    "/cache/stats",
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
    "/cache/invalidate",
    operation_id="invalidate_cache",
    summary="Forget all stored answers of a tenant, a model or a namespace",
    response_class=Response,
    responses=refusals(400, 401, 403, 404),
    openapi_extra=any_object("`tenant`, `model` and `namespace` as far as they matter; {} is all."),
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


@router.delete(
    "/cache/entries/{entry}",
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
    context_of(http).gateway.forget_cached(_entry(http.path_params["entry"], "entry"))
    return _json({"forgotten": True})


@router.post(
    "/cache/feedback",
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
        key = _entry(entry, "entry")
        if not good:
            gateway.forget_cached(key)
    else:
        if not isinstance(pair, str) or not _ENTRY.fullmatch(pair):
            raise InvalidRequest("'pair' should be the header x-cache-pair.", param="pair")
        if not gateway.judge_cached(pair, good=good):
            raise NotFound("This pair is not known, or not any more.", param="pair")
    return _json({"noted": True})


def _entry(text: object, param: str) -> bytes:
    if not isinstance(text, str) or not _ENTRY.fullmatch(text):
        raise InvalidRequest(f"'{param}' should be the header x-cache-entry.", param=param)
    return bytes.fromhex(text)


def _json(payload: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")
