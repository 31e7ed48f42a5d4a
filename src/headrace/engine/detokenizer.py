"""Tokens back to text, one at a time, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.engine.vocabulary import vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Detokenizer", "token_bytes", "token_text"]

_EACH_BYTE = "headrace.replace_each_byte"
_LONGEST_CHARACTER = 4


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)
_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Streams the text of one completion. Owned by one thread.

    The texts returned, joined, are what the tokenizer decodes the completion to where it follows
    `prompt_tail` (the prompt, or its last tokens): a leading space is dropped only where the
    tokenizer drops it and nothing but special tokens precedes, and a character that the prompt
    left half-written comes out whole. Bytes that can no longer become a character come out as
    U+FFFD. Byte-fallback tokens are read as SentencePiece does, one U+FFFD for each wrong byte.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._vocabulary = vocabulary(tokenizer)
        self._skipped = self._vocabulary.special_ids if skip_special_tokens else frozenset()
        scheme = self._vocabulary.scheme
        self._decoder = _utf8("replace" if scheme.byte_level else _EACH_BYTE)
        before = self._last_bytes(prompt_tail)
        self._strip = 0 if before else scheme.strip_spaces
        self._half = _half_character(before)

    def push(self, token_id: int) -> str:
        """The text that this token makes certain, often empty."""
        if token_id in self._skipped:
            return ""
        raw = self._vocabulary.raw(token_id)
        if raw and self._strip:
            raw = self._without_leading_spaces(raw)
        if raw and self._half:
            raw = self._with_half_character(raw)
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """The rest, once no more tokens come: U+FFFD for a character that stayed incomplete."""
        return self._decoder.decode(b"", final=True)

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(token_ids):
            if token_id not in self._skipped:
                tail = self._vocabulary.raw(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return tail

    def _without_leading_spaces(self, raw: bytes) -> bytes:
        stripped = raw.lstrip(b" ")
        dropped = min(self._strip, len(raw) - len(stripped))
        self._strip = self._strip - dropped if dropped == len(raw) else 0
        return raw[dropped:]

    def _with_half_character(self, raw: bytes) -> bytes:
        half, self._half = self._half, b""
        missing = _character_length(half[0]) - len(half)
        try:
            _utf8("strict").decode(half + raw[:missing])
        except UnicodeDecodeError:
            return raw  # The half is the prompt's own fault and shows there.
        return half + raw


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The token's exact bytes, also where they are only part of a character."""
    return vocabulary(tokenizer).raw(token_id)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token decoded alone: U+FFFD where it is only part of a character."""
    return vocabulary(tokenizer).raw(token_id).decode("utf-8", "replace")


def _half_character(text: bytes) -> bytes:
    """The bytes at the end of `text` that begin a character and do not complete it."""
    for length in range(1, min(_LONGEST_CHARACTER, len(text)) + 1):
        lead = text[-length]
        if lead & 0xC0 != 0x80:  # not a continuation byte
            half = text[-length:] if _character_length(lead) > length else b""
            try:
                _utf8("strict").decode(half)
            except UnicodeDecodeError:
                return b""
            return half
    return b""


def _character_length(lead: int) -> int:
    """Bytes of the UTF-8 character that begins with `lead`; 1 for a byte that begins none."""
    if 0xC2 <= lead <= 0xDF:
        return 2
    if 0xE0 <= lead <= 0xEF:
        return 3
    return 4 if 0xF0 <= lead <= 0xF4 else 1
