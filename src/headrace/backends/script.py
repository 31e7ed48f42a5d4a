"""Answers written beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.backends.bytecodec import ByteCodec
from headrace.core.events import FinishReason, TokenLogprob
from headrace.core.request import Request

__all__ = ["Line", "Piece", "Script", "echo_script", "pieces"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to a choice. Without `token_ids` these are the text's bytes."""

    text: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.text.encode()) if self.token_ids is None else self.token_ids


@dataclass(frozen=True, slots=True)
class Line:
    """One choice: its pieces, and how it ends if `max_tokens` does not end it first."""

    pieces: tuple[Piece, ...]
    reason: FinishReason = FinishReason.STOP
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """The answer to one request. Choice i gets line i; with fewer lines they repeat.

    `refuse` is raised instead of Start; `fail` once `fail_after` deltas have been sent.
    """

    lines: tuple[Line, ...]
    cached_tokens: int = 0
    refuse: Exception | None = None
    fail: Exception | None = None
    fail_after: int = 0


def pieces(*parts: str | Sequence[int]) -> tuple[Piece, ...]:
    """A piece for each string or run of bytes; bytes that end inside a character show nothing
    until a later piece completes it."""
    found = []
    held = b""
    for part in parts:
        raw = part.encode() if isinstance(part, str) else bytes(part)
        held += raw
        try:
            text, held = held.decode(), b""
        except UnicodeDecodeError:
            text = ""
        found.append(Piece(text, tuple(raw)))
    return tuple(found)


def echo_script(request: Request) -> Script:
    """Says the last message, or the prompt, again, word by word."""
    if request.messages is not None:
        text = request.messages[-1].content or ""
    elif isinstance(request.prompt, str):
        text = request.prompt
    else:
        text = ByteCodec().decode(request.prompt or ())
    words = text.split(" ")
    spaced = [word if i == 0 else f" {word}" for i, word in enumerate(words)]
    return Script((Line(pieces(*spaced)),))
