"""POST /v1/completions"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.answer import Style, answer, new_head
from headrace.api.base import context_of, tenant_of
from headrace.api.body import read_body
from headrace.api.convert import Origin, completion_requests
from headrace.api.fold import completion_reply
from headrace.api.frames import CompletionFrames
from headrace.api.openapi import json_body, refusals
from headrace.api.schemas import CompletionBody
from headrace.api.terms import TERM_HEADERS

__all__ = ["router"]

router = APIRouter(tags=["generation"])
_STYLE = Style(CompletionFrames, completion_reply)


@router.post(
    "/v1/completions",
    operation_id="create_completion",
    summary="Continue one or more prompts",
    response_class=Response,
    responses=refusals(400, 401, 403, 404, 408, 413, 429, 503, 504),
    openapi_extra=json_body(CompletionBody, TERM_HEADERS),
)
async def create_completion(http: HttpRequest) -> Response:
    """As OpenAI's endpoint. Choice i of prompt p has index p * n + i."""
    context = context_of(http)
    arrival = context.clock.monotonic()
    body = await read_body(http, CompletionBody)
    tenant = tenant_of(http)
    card = context.gateway.model(tenant, body.model)
    head = new_head(context, "cmpl", card)
    origin = Origin(head.id, tenant.name, arrival, context.settings.limits)
    requests = completion_requests(body, origin)
    return await answer(http, body, requests, head, _STYLE)
