"""The stream of events, folded into one JSON reply. There is no other way to make one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from headrace.api.durations import timings_object
from headrace.api.frames import ReplyHead, usage_object
from headrace.api.logprobs import LegacyLogprobs, chat_entries
from headrace.core.errors import BackendFailed
from headrace.core.events import (
    CacheNote,
    Delta,
    Event,
    Finish,
    FinishReason,
    Start,
    TokenLogprob,
    Usage,
)

__all__ = ["Answer", "chat_reply", "completion_reply", "fold"]


@dataclass(slots=True)
class Choice:
    """One choice of an answer, all of it once the stream has ended."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    stop: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; `choices` in order of index, each finished."""

    choices: tuple[Choice, ...]
    usage: Usage
    cache: CacheNote | None = None


async def fold(events: AsyncIterator[Event], choices: int) -> Answer:
    """Raises what the events raise, and BackendFailed for a stream that is cut short."""
    found = tuple(Choice() for _ in range(choices))
    usage: Usage | None = None
    cache: CacheNote | None = None
    async for event in events:
        if isinstance(event, Delta):
            choice = found[event.index]
            choice.pieces.append(event.text)
            choice.logprobs.extend(event.logprobs or ())
        elif isinstance(event, Finish):
            found[event.index].reason = event.reason
            found[event.index].stop = event.stop
        elif isinstance(event, Usage):
            usage = event
        elif isinstance(event, Start):
            cache = event.cache
    if usage is None or any(choice.reason is None for choice in found):
        raise BackendFailed("The backend ended the answer before all choices were complete.")
    return Answer(found, usage, cache)


def chat_reply(head: ReplyHead, answer: Answer, top_logprobs: int | None) -> dict[str, Any]:
    """A chat.completion object."""
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None
            if top_logprobs is None
            else {"content": chat_entries(choice.logprobs), "refusal": None},
            **_ending(choice),
        }
        for i, choice in enumerate(answer.choices)
    ]
    return _reply("chat.completion", head, choices, answer.usage)


def completion_reply(head: ReplyHead, answer: Answer, top_logprobs: int | None) -> dict[str, Any]:
    """A text_completion object."""
    choices = [
        {
            "index": i,
            "text": choice.text,
            "logprobs": None
            if top_logprobs is None
            else LegacyLogprobs(top_logprobs).render(choice.logprobs),
            **_ending(choice),
        }
        for i, choice in enumerate(answer.choices)
    ]
    return _reply("text_completion", head, choices, answer.usage)


def _ending(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.reason, "stop_reason": choice.stop}


def _reply(
    kind: str, head: ReplyHead, choices: list[dict[str, Any]], usage: Usage
) -> dict[str, Any]:
    reply = {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": choices,
        "usage": usage_object(usage),
    }
    timings = timings_object(usage)
    return reply if timings is None else {**reply, "timings": timings}
