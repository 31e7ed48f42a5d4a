"""POST /v1/embeddings"""

from __future__ import annotations

import base64
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.base import context_of, tenant_of
from headrace.api.body import read_body
from headrace.api.openapi import json_body, refusals
from headrace.api.schemas import EmbeddingBody

__all__ = ["router"]

router = APIRouter(tags=["embeddings"])


@router.post(
    "/v1/embeddings",
    operation_id="create_embedding",
    summary="Vectors of texts",
    response_class=Response,
    responses=refusals(400, 401, 404, 429, 503),
    openapi_extra=json_body(EmbeddingBody),
)
async def create_embedding(http: HttpRequest) -> Response:
    """Unit vectors, in the order of the inputs. A text that is too long is refused, never cut."""
    body = await read_body(http, EmbeddingBody)
    made = await context_of(http).gateway.embed(
        tenant_of(http), body.model, body.input, body.dimensions
    )
    shown = _base64 if body.encoding_format == "base64" else _plain
    payload = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": shown(vector)}
            for index, vector in enumerate(made.vectors)
        ],
        "model": body.model,
        "usage": {"prompt_tokens": made.tokens, "total_tokens": made.tokens},
    }
    return Response(
        orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json"
    )


def _plain(vector: Any) -> Any:
    return vector


def _base64(vector: Any) -> str:
    """As OpenAI sends it: 32-bit floats, the least significant byte first."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
