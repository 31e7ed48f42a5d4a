"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.base import context_of, tenant_of
from headrace.api.openapi import refusals
from headrace.backends.base import ModelCard

__all__ = ["router"]

router = APIRouter(tags=["models"])


@router.get(
    "/v1/models",
    operation_id="list_models",
    summary="The models that this server answers for",
    response_class=Response,
    responses=refusals(401),
)
async def list_models(http: HttpRequest) -> Response:
    cards = context_of(http).gateway.models(tenant_of(http))
    return _json({"object": "list", "data": [_model_object(card) for card in cards]})


@router.get(
    "/v1/models/{model:path}",
    operation_id="get_model",
    summary="One model",
    response_class=Response,
    responses=refusals(401, 404),
)
async def get_model(http: HttpRequest, model: str) -> Response:
    return _json(_model_object(context_of(http).gateway.model(tenant_of(http), model)))


def _model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "max_model_len": card.context_length,
    }


def _json(payload: dict[str, Any]) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")
