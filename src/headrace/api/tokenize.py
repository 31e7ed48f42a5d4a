"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.base import Context, context_of, tenant_of
from headrace.api.body import read_body
from headrace.api.convert import core_messages
from headrace.api.openapi import json_body, refusals
from headrace.api.schemas import DetokenizeBody, TokenizeBody
from headrace.backends.base import ModelCard
from headrace.core.errors import BackendUnavailable, InvalidRequest
from headrace.core.request import Message
from headrace.gateway import Tenant

__all__ = ["router"]

router = APIRouter(tags=["tokens"])


@router.post(
    "/tokenize",
    operation_id="tokenize",
    summary="Token ids of a prompt or a conversation",
    response_class=Response,
    responses=refusals(400, 401, 404),
    openapi_extra=json_body(TokenizeBody),
)
async def tokenize(http: HttpRequest) -> Response:
    context = context_of(http)
    tenant = tenant_of(http)
    body = await read_body(http, TokenizeBody)
    card = _card(context, tenant, body.model)
    content, special = _content(body)
    ids = await context.gateway.tokenize(
        tenant,
        card.id,
        content,
        add_special_tokens=special,
        add_generation_prompt=body.add_generation_prompt,
    )
    texts = None
    if body.return_token_strs:
        texts = await context.gateway.token_texts(tenant, card.id, ids)
    payload = {
        "count": len(ids),
        "max_model_len": card.context_length,
        "tokens": ids,
        "token_strs": texts,
    }
    return Response(orjson.dumps(payload), media_type="application/json")


@router.post(
    "/detokenize",
    operation_id="detokenize",
    summary="Text of token ids",
    response_class=Response,
    responses=refusals(400, 401, 404),
    openapi_extra=json_body(DetokenizeBody),
)
async def detokenize(http: HttpRequest) -> Response:
    context = context_of(http)
    tenant = tenant_of(http)
    body = await read_body(http, DetokenizeBody)
    card = _card(context, tenant, body.model)
    text = await context.gateway.detokenize(tenant, card.id, body.tokens)
    return Response(orjson.dumps({"prompt": text}), media_type="application/json")


def _content(body: TokenizeBody) -> tuple[str | Sequence[Message], bool]:
    """What to encode, and whether the tokenizer adds its own special tokens to it."""
    if body.messages is not None and body.prompt is None:
        return core_messages(body.messages), bool(body.add_special_tokens)
    if body.prompt is not None and body.messages is None:
        return body.prompt, body.add_special_tokens is not False
    raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")


def _card(context: Context, tenant: Tenant, name: str | None) -> ModelCard:
    if name is not None:
        return context.gateway.model(tenant, name)
    cards = context.gateway.models(tenant)
    if not cards:
        raise BackendUnavailable("No model is ready yet.")
    return cards[0]
