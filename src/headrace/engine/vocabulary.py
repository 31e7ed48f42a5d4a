"""What each token contributes to text, as bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson

from headrace.engine.models.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["DecoderScheme", "Vocabulary", "byte_alphabet", "decoder_scheme", "vocabulary"]

_META = "▁"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_ID = 2**32


@dataclass(frozen=True, slots=True)
class DecoderScheme:
    """How token texts become bytes.

    Either `byte_level`: each character of a token stands for one byte, and characters may span
    tokens. Or pieces of text, in which `▁` is a space if `metaspace`, and `<0xNN>` one byte if
    `byte_fallback`. At the very start of a text `strip_spaces` leading spaces are dropped.
    """

    byte_level: bool
    metaspace: bool = False
    byte_fallback: bool = False
    strip_spaces: int = 0


def decoder_scheme(decoder: Mapping[str, Any] | None) -> DecoderScheme:
    """Reads the decoder of a tokenizer.json. Raises ModelError for one of another kind."""
    steps = list(_flatten(decoder))
    kinds = {step["type"] for step in steps}
    if kinds in ({"ByteLevel"}, {"ByteLevel", "Fuse"}):
        return DecoderScheme(byte_level=True)
    unknown = kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not steps or unknown:
        names = ", ".join(sorted(unknown)) or "none"
        raise ModelError(f"tokenizer decoder kind is not supported: {names}")
    strip = 0
    for step in steps:
        if step["type"] == "Replace" and (step["pattern"], step["content"]) != (
            {"String": _META},
            " ",
        ):
            raise ModelError("tokenizer decoder is not supported: it replaces other than spaces")
        if step["type"] == "Strip":
            if step["content"] != " " or step["stop"] or "Fuse" not in kinds:
                raise ModelError("tokenizer decoder is not supported: it strips other than a start")
            strip = int(step["start"])
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            strip = 1
    return DecoderScheme(
        byte_level=False,
        metaspace=bool(kinds & {"Replace", "Metaspace"}),
        byte_fallback="ByteFallback" in kinds,
        strip_spaces=strip,
    )


def _flatten(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flatten(step)
    else:
        yield decoder


class Vocabulary:
    """The bytes of a tokenizer's tokens, worked out once each. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self.scheme = decoder_scheme(_decoder_json(tokenizer))
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )

    def raw(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that the tokenizer does not have."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._work_out(token_id)
        return known

    def _work_out(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < _MAX_ID else None
        if token is None:
            return b""
        if self.scheme.byte_level:
            try:
                return bytes(map(_BYTE_OF.__getitem__, token))
            except KeyError:
                return token.encode()
        if self.scheme.byte_fallback and (match := _FALLBACK.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace(_META, " ") if self.scheme.metaspace else token).encode()


@lru_cache(maxsize=4)
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of `tokenizer`, shared by all who ask."""
    return Vocabulary(tokenizer)


def _decoder_json(tokenizer: Tokenizer) -> Any:
    decoder = tokenizer.decoder
    return None if decoder is None else orjson.loads(decoder.__getstate__())


def byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    moved = {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    return {byte: moved.get(byte) or chr(byte) for byte in range(256)}


_BYTE_OF = {spelling: byte for byte, spelling in byte_alphabet().items()}
