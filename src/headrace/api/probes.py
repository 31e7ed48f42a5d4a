"""What orchestrators and scrapers ask. None of it needs a key, /metrics by setting."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.base import Context, context_of
from headrace.core.health import State
from headrace.telemetry import EXPOSITION_TYPE

__all__ = ["METRICS_PATH", "PROBE_PATHS", "router"]

PROBE_PATHS = frozenset({"/livez", "/readyz", "/health"})
METRICS_PATH = "/metrics"

router = APIRouter(tags=["operation"])


@router.get(
    "/livez",
    operation_id="livez",
    summary="200 as long as the process answers, also while it loads or drains",
    response_class=Response,
)
async def livez() -> Response:
    return Response(orjson.dumps({"status": "alive"}), media_type="application/json")


@router.get(
    "/readyz",
    operation_id="readyz",
    summary="200 if requests are taken, else 503, with the stages of starting up",
    response_class=Response,
)
async def readyz(http: HttpRequest) -> Response:
    status, payload = _readiness(context_of(http))
    return Response(orjson.dumps(payload), status_code=status, media_type="application/json")


@router.get(
    "/health",
    operation_id="health",
    summary="As /readyz, without a body",
    response_class=Response,
)
async def health(http: HttpRequest) -> Response:
    return Response(status_code=_readiness(context_of(http))[0])


@router.get(
    METRICS_PATH,
    operation_id="metrics",
    summary="Metrics in Prometheus' text format",
    response_class=Response,
)
async def metrics(http: HttpRequest) -> Response:
    return Response(context_of(http).gateway.exposition(), media_type=EXPOSITION_TYPE)


for _path, _endpoint in (("/livez", livez), ("/readyz", readyz), ("/health", health)):
    router.add_api_route(
        _path, _endpoint, methods=["HEAD"], response_class=Response, include_in_schema=False
    )


def _readiness(context: Context) -> tuple[int, dict[str, Any]]:
    found = context.gateway.health()
    draining = context.gateway.draining
    ready = found.state is State.READY and not draining
    payload = {
        "status": "draining" if draining else found.state.value,
        "detail": found.detail,
        "stages": [
            {
                "stage": step.stage.value,
                "fraction": step.fraction,
                "seconds": step.seconds,
                "detail": step.detail,
            }
            for step in found.progress
        ],
    }
    return (200 if ready else 503), payload
