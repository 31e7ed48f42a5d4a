"""A tokenizer.json made from the vocabulary in a GGUF file.

Byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`) vocabularies are understood. The split of
text into words before merging is not in the file, only its name: the ones here are those of the
families that the engine runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import orjson

from headrace.engine.models.errors import ModelError
from headrace.engine.models.tokenizer import (
    TokenizerBundle,
    added_token,
    template_post_processor,
)

__all__ = ["gguf_tokenizer_bundle", "load_gguf_tokenizer"]

log = logging.getLogger(__name__)

Metadata = Mapping[str, Any]


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Words:
    """How a byte-level vocabulary cuts text before merging."""

    pattern: str | None = None
    """None stands for GPT-2's pattern."""
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    """A word that is in the vocabulary is taken as it is, without merging."""
    add_bos: bool = False
    """Where the file does not say."""


_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)

_GPT2_WORDS = _Words()
_DIGIT_WORDS = _Words(single_digits=True)
_LLAMA3_WORDS = _Words(_LLAMA3, whole_words=True, add_bos=True)
_WORDS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "exaone4"), _GPT2_WORDS),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGIT_WORDS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3_WORDS),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Words(_LLAMA3)),
    "qwen2": _Words(_QWEN2, nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "stablelm2"), _Words(_QWEN2)),
    "tekken": _Words(_TEKKEN, whole_words=True, add_bos=True),
}

# Control tokens that end a turn or an answer, for files that name only one of them.
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "</s>",
    }
)


def load_gguf_tokenizer(path: Path, *, chat_template: str | None = None) -> TokenizerBundle:
    """Reads the header of `path`. Raises ModelError, naming the kind that is not supported."""
    from headrace.engine.models.gguf_file import read_gguf  # noqa: PLC0415 - it imports gguf

    return gguf_tokenizer_bundle(read_gguf(path).metadata, chat_template=chat_template)


def gguf_tokenizer_bundle(
    metadata: Metadata, *, chat_template: str | None = None
) -> TokenizerBundle:
    """The tokenizer of a header that is already read."""
    vocabulary = _Vocabulary(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(vocabulary, metadata)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary, metadata), True
    else:
        raise ModelError(f"GGUF tokenizer kind {kind!r} is not supported (gpt2 and llama are)")
    bos, eos = vocabulary.named("bos"), vocabulary.named("eos")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)) and bos is not None
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and eos is not None
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        **tokenizer,
        "post_processor": template_post_processor(
            bos if add_bos else None, eos if add_eos else None
        ),
    }
    return TokenizerBundle(
        tokenizer_json=orjson.dumps(tokenizer),
        chat_template=chat_template or metadata.get("tokenizer.chat_template"),
        bos_token=bos[0] if bos else None,
        eos_token=eos[0] if eos else None,
        add_bos=add_bos,
        add_eos=add_eos,
        eos_token_ids=vocabulary.end_ids(),
    )


class _Vocabulary:
    """The tokens of a file with their types."""

    def __init__(self, metadata: Metadata) -> None:
        self.tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
        if not self.tokens:
            raise ModelError("this GGUF file holds no tokenizer")
        self._types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or ()
        self._metadata = metadata
        self._defaults = (
            {"unknown": 0, "bos": 1, "eos": 2}
            if metadata.get("tokenizer.ggml.model") == "llama"
            else {}
        )
        self._control = set(self._control_ids())

    def named(self, role: str) -> tuple[str, int] | None:
        """Text and id of the token in a role such as `bos`."""
        token_id = self._metadata.get(f"tokenizer.ggml.{role}_token_id", self._defaults.get(role))
        if token_id is None or not 0 <= token_id < len(self.tokens):
            return None
        return self.tokens[token_id], int(token_id)

    def is_normal(self, token_id: int) -> bool:
        return token_id not in self._control and self._type(token_id) == _TokenType.NORMAL

    def added_tokens(self) -> list[dict[str, Any]]:
        """Those matched whole in text: control tokens, and user-defined ones, not special."""
        return [
            added_token(token_id, content=text, special=token_id in self._control)
            for token_id, text in enumerate(self.tokens)
            if token_id in self._control or self._type(token_id) == _TokenType.USER_DEFINED
        ]

    def end_ids(self) -> tuple[int, ...]:
        named = [self.named(role) for role in ("eos", "eot", "eom")]
        ids = [token[1] for token in named if token]
        ids += [i for i in sorted(self._control) if self.tokens[i] in _END_TEXTS]
        return tuple(dict.fromkeys(ids))

    def _type(self, token_id: int) -> int:
        return self._types[token_id] if token_id < len(self._types) else _TokenType.NORMAL

    def _control_ids(self) -> list[int]:
        """A padding or unknown token is no control token unless typed so: it may be a word."""
        marked = (_TokenType.CONTROL, _TokenType.UNKNOWN)
        ids = [token_id for token_id, kind in enumerate(self._types) if kind in marked]
        roles = ("bos", "eos", "eot", "eom", *(() if self._types else ("unknown",)))
        return ids + [token[1] for token in map(self.named, roles) if token]


def _byte_level(vocabulary: _Vocabulary, metadata: Metadata) -> tuple[dict[str, Any], bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        log.warning("the GGUF file does not name its pre-tokenizer; taking that of GPT-2")
    words = _WORDS.get(name or "default")
    if words is None:
        raise ModelError(f"GGUF pre-tokenizer {name!r} is not supported")
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError("this GGUF file holds a gpt2 tokenizer without merges")
    tokenizer = {
        "normalizer": {"type": "NFC"} if words.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _pre_tokenizers(words)},
        "decoder": _byte_level_step(use_regex=True),
        "model": _bpe(vocabulary, _split_merges(merges), ignore_merges=words.whole_words),
    }
    return tokenizer, words.add_bos


def _pre_tokenizers(words: _Words) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if words.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if words.pattern is not None:
        pattern = {"Regex": words.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    return [*steps, _byte_level_step(use_regex=words.pattern is None)]


def _byte_level_step(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _sentencepiece(vocabulary: _Vocabulary, metadata: Metadata) -> dict[str, Any]:
    prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    listed = metadata.get("tokenizer.ggml.merges")
    merges = (
        _split_merges(listed)
        if listed is not None
        else _merges_from_scores(vocabulary, metadata.get("tokenizer.ggml.scores") or ())
    )
    unknown = vocabulary.named("unknown")
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first" if prefix_space else "never",
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            merges,
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _bpe(
    vocabulary: _Vocabulary,
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {text: token_id for token_id, text in enumerate(vocabulary.tokens)},
        "merges": merges,
    }


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """The halves are parted by a space, which is never their first character."""
    halves = []
    for merge in merges:
        space = merge.find(" ", 1)
        halves.append((merge[:space], merge[space + 1 :]))
    return halves


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges whatever pair makes the piece of the best score; so the merges are
    all ways to make a piece of two, best piece first."""
    if len(scores) < len(vocabulary.tokens):
        raise ModelError("this GGUF file holds a llama tokenizer without scores or merges")
    pieces = {
        text: token_id
        for token_id, text in enumerate(vocabulary.tokens)
        if vocabulary.is_normal(token_id)
    }
    ways = [
        (-scores[token_id], -cut, cut - len(text), pieces[text[:cut]], text, cut)
        for text, token_id in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    ways.sort()
    return [(text[:cut], text[cut:]) for *_, text, cut in ways]
