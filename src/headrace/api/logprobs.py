"""Log-probabilities in the two shapes that OpenAI's endpoints give them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from headrace.core.events import TokenLogprob

__all__ = ["LegacyLogprobs", "chat_entries"]

_FLOOR = -9999.0
"""Stands for a probability of zero, since JSON has no infinity."""


def chat_entries(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """The list that goes into `logprobs.content` of a chat choice."""
    return [
        {**_chat_entry(entry), "top_logprobs": [_chat_entry(best) for best in entry.top]}
        for entry in entries
    ]


class LegacyLogprobs:
    """Builds the parallel lists of /v1/completions for one choice, piece by piece.

    `text_offset` counts characters of the choice's text, from its start.
    """

    __slots__ = ("_decoder", "_offset", "_top")

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def render(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "text_offset": [self._advance(entry) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "tokens": [_legacy_text(entry) for entry in entries],
            "top_logprobs": [self._best(entry) for entry in entries],
        }

    def _advance(self, entry: TokenLogprob) -> int:
        """Where the token's text starts; inside a character, where that starts."""
        start = self._offset
        self._offset += len(self._decoder.decode(entry.raw))
        return start

    def _best(self, entry: TokenLogprob) -> dict[str, float | None] | None:
        if entry.logprob is None or not self._top:
            return None
        return {_legacy_text(best): _finite(best.logprob) for best in (*entry.top, entry)}


def _chat_entry(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token": entry.text,
        "logprob": _FLOOR if entry.logprob is None else _finite(entry.logprob),
        "bytes": list(entry.raw),
    }


def _finite(logprob: float | None) -> float | None:
    """NaN and infinities have no place in JSON; every comparison with NaN is false."""
    if logprob is None:
        return None
    return min(logprob, 0.0) if logprob > _FLOOR else _FLOOR


def _legacy_text(entry: TokenLogprob) -> str:
    """A token that is part of a character is spelt in bytes, so that no two look the same."""
    try:
        entry.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.raw)
    return entry.text
