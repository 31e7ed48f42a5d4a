"""The queue as its users see it, and its settings as their operator does."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.base import Context, context_of, tenant_of
from headrace.api.body import read_object
from headrace.api.openapi import any_object, refusals
from headrace.core.errors import PermissionDenied, Unauthorized

__all__ = ["router"]

router = APIRouter(tags=["scheduling"])

_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
"""Headers of proxies: with one of them, who is at the other end is anybody's guess."""


@router.get(
    "/scheduler/queue",
    operation_id="scheduler_queue",
    summary="What waits and runs, by model, priority class and tenant",
    response_class=Response,
    responses=refusals(401),
)
async def queue(http: HttpRequest) -> Response:
    """A tenant sees its own rows, an admin all. `depth` and `running` count choices, `tokens`
    prompt tokens still to be computed; times are seconds, and null where nothing is known yet."""
    rows = [asdict(row) for row in context_of(http).gateway.queue_view(tenant_of(http))]
    totals = {key: sum(row[key] for row in rows) for key in ("depth", "running", "tokens")}
    return _json({"rows": rows, **totals})


@router.get(
    "/scheduler/config",
    operation_id="get_scheduler_config",
    summary="The settings of the scheduler as of now",
    response_class=Response,
    responses=refusals(401, 403),
)
async def get_config(http: HttpRequest) -> Response:
    """For an admin's key; open where there are no keys."""
    context = context_of(http)
    if _guarded(context):
        _require_admin(http)
    return _json(context.gateway.scheduling_config())


@router.patch(
    "/scheduler/config",
    operation_id="patch_scheduler_config",
    summary="Change settings of the scheduler until the next start",
    response_class=Response,
    responses=refusals(400, 401, 403),
    openapi_extra=any_object("Settings to change, in the shape that GET returns."),
)
async def patch_config(http: HttpRequest) -> Response:
    """All of the changes are made, or none. Answers with the settings that then hold. For an
    admin's key; where there are no keys, for clients on the server's own machine."""
    context = context_of(http)
    if _guarded(context):
        _require_admin(http)
    else:
        _require_local(http)
    changes = await read_object(http)
    return _json(context.gateway.configure_scheduling(changes))


@router.get(
    "/scheduler/trace",
    operation_id="scheduler_trace",
    summary="Why the last steps of the engine had their size",
    response_class=Response,
    responses=refusals(401, 403),
)
async def trace(http: HttpRequest) -> Response:
    """For an admin's key; open where there are no keys."""
    context = context_of(http)
    if _guarded(context):
        _require_admin(http)
    return _json({"steps": context.gateway.scheduling_trace()})


def _guarded(context: Context) -> bool:
    """Whether there are keys, which is to say whether nobody gets in without one."""
    try:
        context.gateway.authenticate(None)
    except Unauthorized:
        return True
    return False


def _require_admin(http: HttpRequest) -> None:
    if not tenant_of(http).admin:
        raise PermissionDenied("This needs the key of an admin.")


def _require_local(http: HttpRequest) -> None:
    """A proxy beside the server makes everyone's address a local one, and a web page may have its
    own name point here; so neither a proxy's header nor a foreign host name may be there."""
    client = http.client
    if (
        client is None
        or not _is_loopback(client.host)
        or any(name in http.headers for name in _FORWARDED)
        or not _is_local_host(http.headers.get("host", ""))
    ):
        raise PermissionDenied(
            "Without API keys only clients on the server's own machine may change its settings."
        )


def _is_local_host(host: str) -> bool:
    """The Host header names this machine; its port does not matter."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower() == "localhost" or _is_loopback(name)


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped.is_loopback
    return found.is_loopback


def _json(payload: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")
