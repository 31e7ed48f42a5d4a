"""Events to the bytes of a stream. Tokens are pasted between ready-made halves of a JSON object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import orjson

from headrace.api.durations import timings_object
from headrace.api.logprobs import LegacyLogprobs, chat_entries
from headrace.core.errors import BackendFailed
from headrace.core.events import Delta, Event, Finish, Start, Usage

__all__ = ["ChatFrames", "CompletionFrames", "Frames", "ReplyHead", "StreamShape", "usage_object"]

DONE = b"data: [DONE]\n\n"
NOTHING: Mapping[str, Any] = MappingProxyType({})
_MARK = "\x00text\x00"
_ESCAPES = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)
"""Legal inside JSON and SSE, but line breaks to clients that split with Python's splitlines."""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every piece of one reply repeats. `created` is Unix time in whole seconds."""

    id: str
    created: int
    model: str
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How many choices a stream has and what was asked to come with them."""

    choices: int
    include_usage: bool = False
    continuous_usage: bool = False
    top_logprobs: int | None = None


class Frames(Protocol):
    """One reply as server-sent events. `feed` returns what to send for an event, maybe nothing."""

    @property
    def complete(self) -> bool: ...

    def feed(self, event: Event) -> bytes: ...


def usage_object(usage: Usage) -> dict[str, Any]:
    """Usage as OpenAI spells it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def json_text(text: str) -> bytes:
    data = orjson.dumps(text)
    if not text.isascii():
        for raw, escaped in _ESCAPES:
            if raw in data:
                data = data.replace(raw, escaped)
    return data


def sse(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class _Frames(ABC):
    """What both endpoints' streams share: opening, closing, usage and the end."""

    kind = ""

    def __init__(self, head: ReplyHead, shape: StreamShape) -> None:
        self.complete = False
        self._shape = shape
        self._continuous = shape.include_usage and shape.continuous_usage
        self._envelope: dict[str, Any] = {
            "id": head.id,
            "object": self.kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._halves = [self._split(i) for i in range(shape.choices)]
        self._open = [False] * shape.choices
        self._finished = 0
        self._kept: dict[str, Any] | None = None
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def feed(self, event: Event) -> bytes:
        kind = type(event)
        if kind is Delta:
            return self._delta(event)  # type: ignore[arg-type]  # mypy cannot narrow by `type() is`
        if isinstance(event, Finish):
            return self._finish(event)
        if isinstance(event, Usage):
            return self._end(event)
        if isinstance(event, Start):
            self._prompt_tokens = event.prompt_tokens
        return b""

    def _delta(self, event: Delta) -> bytes:
        index = event.index
        if not event.prompt:
            self._completion_tokens += len(event.token_ids)
        if event.logprobs or self._continuous:
            frame = self._full(event) if event.text or event.logprobs else b""
        elif event.text:
            before, after = self._halves[index]
            frame = before + json_text(event.text) + after
        else:
            frame = b""
        return frame if self._open[index] else self._opening(index) + frame

    def _finish(self, event: Finish) -> bytes:
        """The last chunk of a stream has the timings. Without include_usage that is the one that
        closes the last choice, so it is kept for the Usage, which comes right behind it."""
        self._finished += 1
        opening = self._opening(event.index)
        closing = self._closing(event)
        if self._finished < self._shape.choices or self._shape.include_usage:
            return opening + self._frame(closing)
        self._kept = closing
        return opening

    def _end(self, usage: Usage) -> bytes:
        if self._finished != self._shape.choices:
            raise BackendFailed("The backend ended the answer before all choices were complete.")
        self.complete = True
        timings = timings_object(usage)
        last: dict[str, Any] = {} if timings is None else {"timings": timings}
        if self._kept is not None:
            return self._frame(self._kept, last) + DONE
        last["usage"] = usage_object(usage)
        return sse({**self._envelope, "choices": [], **last}) + DONE

    def _frame(self, choice: dict[str, Any], more: Mapping[str, Any] = NOTHING) -> bytes:
        payload = {**self._envelope, "choices": [choice], **more}
        if self._continuous:
            payload["usage"] = usage_object(Usage(self._prompt_tokens, self._completion_tokens))
        elif self._shape.include_usage:
            payload["usage"] = None
        return sse(payload)

    def _split(self, index: int) -> tuple[bytes, bytes]:
        payload = {**self._envelope, "choices": [self._choice(index, _MARK, None)]}
        if self._shape.include_usage:
            payload["usage"] = None
        before, _, after = sse(payload).partition(orjson.dumps(_MARK))
        return before, after

    def _opening(self, index: int) -> bytes:
        if self._open[index]:
            return b""
        self._open[index] = True
        return self._first(index)

    @abstractmethod
    def _first(self, index: int) -> bytes: ...

    @abstractmethod
    def _full(self, event: Delta) -> bytes: ...

    @abstractmethod
    def _closing(self, event: Finish) -> dict[str, Any]: ...

    @abstractmethod
    def _choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]: ...


class ChatFrames(_Frames):
    """chat.completion.chunk objects: a role, the pieces, and a finish reason for each choice."""

    kind = "chat.completion.chunk"

    def _first(self, index: int) -> bytes:
        choice = self._choice(index, "", None)
        choice["delta"] = {"role": "assistant", "content": ""}
        return self._frame(choice)

    def _full(self, event: Delta) -> bytes:
        entries = event.logprobs
        logprobs = None if entries is None else {"content": chat_entries(entries), "refusal": None}
        return self._frame(self._choice(event.index, event.text, logprobs))

    def _closing(self, event: Finish) -> dict[str, Any]:
        return {
            "index": event.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": event.reason,
            "stop_reason": event.stop,
        }

    def _choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": text},
            "logprobs": logprobs,
            "finish_reason": None,
        }


class CompletionFrames(_Frames):
    """text_completion objects."""

    kind = "text_completion"

    def __init__(self, head: ReplyHead, shape: StreamShape) -> None:
        super().__init__(head, shape)
        top = shape.top_logprobs or 0
        self._logprobs = [LegacyLogprobs(top) for _ in range(shape.choices)]

    def _first(self, index: int) -> bytes:
        del index
        return b""

    def _full(self, event: Delta) -> bytes:
        logprobs = None
        if event.logprobs is not None:
            logprobs = self._logprobs[event.index].render(event.logprobs)
        return self._frame(self._choice(event.index, event.text, logprobs))

    def _closing(self, event: Finish) -> dict[str, Any]:
        ending = {"finish_reason": event.reason, "stop_reason": event.stop}
        return self._choice(event.index, "", None) | ending

    def _choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
