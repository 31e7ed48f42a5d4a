"""Tokenising away from the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from headrace.core.codec import TextCodec
from headrace.core.errors import InvalidRequest, Overloaded
from headrace.core.request import Message, Request
from headrace.scheduling import Cost

__all__ = ["Tokeniser", "cost_of", "text_length", "tokenised"]

T = TypeVar("T")

_INLINE_CHARACTERS = 256
"""Up to here the work (under 1 us a character) costs about what the trip to a thread does (some
110 us), and far less than one step of the engine."""

_MAX_THREADS = 4
_CHARACTERS_PER_TOKEN = 4


class Tokeniser:
    """Runs codec work in a few threads; short work at once.

    Work that nothing else bounds is refused once `max_pending` calls wait.
    """

    def __init__(self, max_pending: int) -> None:
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="headrace-tokenise")
        self._max_pending = max_pending + threads
        self._pending = 0

    async def run(self, work: Callable[[], T], size: int, *, admitted: bool = False) -> T:
        """What `work` returns; `size` is the length of its text in characters. `admitted` says
        that the scheduler has let it in."""
        if size <= _INLINE_CHARACTERS:
            return work()
        if self._pending >= self._max_pending and not admitted:
            raise Overloaded("Too many texts wait to be tokenised.", retry_after_s=1.0)
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._pending -= 1

    def close(self) -> None:
        """Drops what has not begun; does not wait for what has."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def tokenised(request: Request, codec: TextCodec) -> Request:
    """The request with its prompt as token ids. Blocks: not for the event loop."""
    if request.messages is not None:
        ids = codec.encode_chat(request.messages, tools=request.extra_fields.get("tools"))
    elif isinstance(request.prompt, str):
        ids = codec.encode(request.prompt)
    else:
        ids = list(request.prompt or ())
    if not ids:
        raise InvalidRequest(
            "The prompt is empty, and this model has no token to begin with.", param="prompt"
        )
    return replace(request, prompt_token_ids=tuple(ids))


def text_length(content: str | Sequence[int] | Sequence[Message] | None) -> int:
    """Characters that tokenising has to read."""
    if isinstance(content, str):
        return len(content)
    return sum(len(m.content or "") for m in content or () if isinstance(m, Message))


def cost_of(request: Request, cached_tokens: int = 0) -> Cost:
    """Exact once there are token ids; before, a guess from the length of the text."""
    ids = request.prompt_token_ids
    if ids is None and isinstance(request.prompt, tuple):
        ids = request.prompt
    length = (
        text_length(request.messages or request.prompt) // _CHARACTERS_PER_TOKEN
        if ids is None
        else len(ids)
    )
    return Cost(
        request.n,
        length,
        request.sampling.max_tokens,
        exact=ids is not None,
        cached_tokens=cached_tokens,
    )
