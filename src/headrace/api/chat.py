"""POST /v1/chat/completions"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.answer import Style, answer, new_head
from headrace.api.base import context_of, tenant_of
from headrace.api.body import read_body
from headrace.api.convert import Origin, chat_request
from headrace.api.fold import chat_reply
from headrace.api.frames import ChatFrames
from headrace.api.openapi import json_body, refusals
from headrace.api.schemas import ChatBody
from headrace.api.terms import TERM_HEADERS

__all__ = ["router"]

router = APIRouter(tags=["generation"])
_STYLE = Style(ChatFrames, chat_reply)


@router.post(
    "/v1/chat/completions",
    operation_id="create_chat_completion",
    summary="Answer a conversation",
    response_class=Response,
    responses=refusals(400, 401, 403, 404, 408, 413, 429, 503, 504),
    openapi_extra=json_body(ChatBody, TERM_HEADERS),
)
async def create_chat_completion(http: HttpRequest) -> Response:
    """As OpenAI's endpoint, with vLLM's additions to its parameters."""
    context = context_of(http)
    arrival = context.clock.monotonic()
    body = await read_body(http, ChatBody)
    tenant = tenant_of(http)
    card = context.gateway.model(tenant, body.model)
    head = new_head(context, "chatcmpl", card)
    origin = Origin(head.id, tenant.name, arrival, context.settings.limits)
    requests = (chat_request(body, origin),)
    return await answer(http, body, requests, head, _STYLE)
