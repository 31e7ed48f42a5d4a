"""The queue as its users see it, and its settings as their operator does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.access import require_admin, require_operator
from headrace.api.base import context_of, tenant_of
from headrace.api.body import read_object
from headrace.api.openapi import any_object, refusals

__all__ = ["router"]

router = APIRouter(tags=["scheduling"])


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
    require_admin(http)
    return _json(context_of(http).gateway.scheduling_config())


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
    require_operator(http)
    changes = await read_object(http)
    return _json(context_of(http).gateway.configure_scheduling(changes))


@router.get(
    "/scheduler/trace",
    operation_id="scheduler_trace",
    summary="Why the last steps of the engine had their size",
    response_class=Response,
    responses=refusals(401, 403),
)
async def trace(http: HttpRequest) -> Response:
    """For an admin's key; open where there are no keys."""
    require_admin(http)
    return _json({"steps": context_of(http).gateway.scheduling_trace()})


def _json(payload: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")
