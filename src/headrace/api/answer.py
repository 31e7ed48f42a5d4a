"""From requests to an HTTP answer, whole or streamed, for both generation endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.api.base import Context, Gateway, context_of, tenant_of
from headrace.api.cache_control import cache_headers
from headrace.api.durations import server_timing
from headrace.api.fold import Answer, fold
from headrace.api.frames import Frames, ReplyHead, StreamShape
from headrace.api.generation import hand_over
from headrace.api.merge import closing, merge
from headrace.api.schemas import GenerationBody, StreamOptions
from headrace.api.sse import ClientGone, EventStream, until_gone
from headrace.api.terms import terms_of
from headrace.backends.base import ModelCard
from headrace.core.events import Event
from headrace.core.request import Request
from headrace.gateway import Tenant
from headrace.gateway.claims import Terms

__all__ = ["Style", "answer", "new_head"]

_MANY_ENTRIES = 4096
"""Replies with more log-probabilities than this are rendered in a thread."""


@dataclass(frozen=True, slots=True)
class Style:
    """How an endpoint writes an answer in either mode."""

    frames: Callable[[ReplyHead, StreamShape], Frames]
    reply: Callable[[ReplyHead, Answer, int | None], dict[str, Any]]


def new_head(context: Context, prefix: str, card: ModelCard) -> ReplyHead:
    """The head of a new reply of `card`'s model, its id starting with `prefix`."""
    return ReplyHead(
        id=f"{prefix}-{context.entropy.token(16)}",
        created=int(context.clock.wall()),
        model=card.id,
        fingerprint=f"fp_{card.revision[:12]}" if card.revision else None,
    )


async def answer(
    http: HttpRequest,
    body: GenerationBody,
    requests: tuple[Request, ...],
    head: ReplyHead,
    style: Style,
) -> Response:
    """Raises the refusal of any of `requests` as long as nothing has been sent."""
    context = context_of(http)
    n = requests[0].n
    choices = len(requests) * n
    top_logprobs = requests[0].sampling.logprobs
    terms = terms_of(http, body)
    context.gateway.require_possible(tenant_of(http), len(requests), choices)
    hand_over(http.scope)
    events = _events(context.gateway, tenant_of(http), requests, terms)
    if body.stream:
        options = body.stream_options or StreamOptions()
        shape = StreamShape(
            choices, options.include_usage, options.continuous_usage_stats, top_logprobs
        )
        server = context.settings.server
        return EventStream(
            events,
            style.frames(head, shape),
            keep_alive=server.sse_keep_alive,
            stall=server.stalled_reader_timeout,
        )
    try:
        whole = await until_gone(http.receive, _fold(events, choices))
    except ClientGone:
        return Response(status_code=499)
    entries = sum(len(choice.logprobs) for choice in whole.choices)
    if entries > _MANY_ENTRIES:
        content = await asyncio.to_thread(_render, style, head, whole, top_logprobs)
    else:
        content = _render(style, head, whole, top_logprobs)
    response = Response(content, media_type="application/json")
    response.raw_headers.append((b"server-timing", server_timing(whole.usage)))
    response.raw_headers.extend(cache_headers(whole.cache))
    return response


def _events(
    gateway: Gateway, tenant: Tenant, requests: tuple[Request, ...], terms: Terms
) -> AsyncIterator[Event]:
    streams = [gateway.generate(request, tenant, terms) for request in requests]
    return streams[0] if len(streams) == 1 else merge(streams, requests[0].n)


async def _fold(events: AsyncIterator[Event], choices: int) -> Answer:
    async with closing(events) as stream:
        return await fold(stream, choices)


def _render(style: Style, head: ReplyHead, whole: Answer, top_logprobs: int | None) -> bytes:
    return orjson.dumps(style.reply(head, whole, top_logprobs))
