"""Small tokenizers of every supported kind, made in the test, and text that is hard on them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they'll say we've done it; you'd think it's DON'T or don't.",
    "Zażółć gęślą jaźń. Füße, naïve café, Ελληνικά, Привет, мир!",
    "你好，世界。日本語のテキスト、한국어 문장도.",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    'def f(x: int) -> str:\n    return f"{x:>10}"  # 1_000\n\n\nclass A:\n\tpass\n',
    "for (int i=0; i<10; ++i) { a[i] += b[i]*2; }\r\n\r\n\tif (!ok) return;",
    "🙂 👩‍👩‍👧‍👦 🇩🇪🇯🇵 👍🏽 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "e\u0301 n\u0303 A\u030a o\u0323\u0302 \u1e9b\u0323 ﬁ ½ Å",
    "a  b   c    d\t\te\n\n\nf \n g  \n",
    "1 22 333 4444 55555 1234567890 3.14159 1,000,000 x1y22z ٣٤٥ १२३",
    "a  1   22    3\n4\t5",
    "trailing spaces   ",
    "line\nline\r\nline\rline",
    "http://example.com/a?b=c&d=%20#e user@mail.org <tag attr='v'/> {{x}} $y^2$",
    "\u200b\u00a0\u2028zero\ufeffwidth \x00\x01\x7f control",
    "x",
    "",
)
"""None begins with a space: there SentencePiece and its rewrites differ on purpose."""

_CORPUS = [*(text for text in TEXTS if text), "hello hello world world", "  the the  and and"] * 3

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERNS = {
    "llama-bpe": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""The split of each family, as its own tokenizer.json spells it."""

BYTE_LEVEL_KINDS = ("gpt-2", "smollm", *PATTERNS)


@cache
def byte_level(kind: str = "smollm", size: int = 600) -> Tokenizer:
    """A byte-level BPE with the pre-tokenizer of a family, trained on TEXTS. Do not change it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind in ("llama-bpe", "tekken")))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if kind in PATTERNS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERNS[kind]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif kind == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    return tokenizer


@cache
def sentencepiece_model(size: int = 700) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE with byte fallback in the manner of Llama 2, trained on TEXTS."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS),
        model_writer=proto,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<extra>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())


def byte_level_metadata(tokenizer: Tokenizer, pre: str | None, **extra: Any) -> dict[str, Any]:
    """The GGUF keys of a byte-level tokenizer; `extra` ones without their `tokenizer.ggml.`."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    model = json.loads(tokenizer.to_str())["model"]
    types = [
        CONTROL if text in SPECIALS else USER_DEFINED if text in MARKUP else NORMAL
        for text in tokens
    ]
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": vocabulary["<|endoftext|>"],
        "eos_token_id": vocabulary["<|im_end|>"],
        **extra,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def sentencepiece_metadata(
    model: sentencepiece.SentencePieceProcessor, **extra: Any
) -> dict[str, Any]:
    """The GGUF keys of a SentencePiece tokenizer."""
    ids = range(model.get_piece_size())
    keys = {
        "model": "llama",
        "pre": "default",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": [_sentencepiece_type(model, i) for i in ids],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
        **extra,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def _sentencepiece_type(model: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    if model.is_unknown(token_id):
        return UNKNOWN
    if model.is_control(token_id):
        return CONTROL
    if model.is_byte(token_id):
        return BYTE
    return USER_DEFINED if model.id_to_piece(token_id) == "<extra>" else NORMAL


def write_gguf(path: Path, metadata: Mapping[str, Any], architecture: str = "llama") -> Path:
    """A GGUF file that holds a header and no tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_folder(path: Path, tokenizer: Tokenizer, **files: Mapping[str, Any] | str) -> Path:
    """A model folder; `files` are by stem, JSON from mappings and .jinja from text."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    for stem, content in files.items():
        if isinstance(content, str):
            (path / f"{stem}.jinja").write_text(content, encoding="utf-8")
        else:
            (path / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def ids_of(tokenizer: Tokenizer, texts: Sequence[str] = TEXTS) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def id_of(tokenizer: Tokenizer, text: str) -> int:
    """The id of a token that must be there."""
    token_id = tokenizer.token_to_id(text)
    assert token_id is not None, text
    return token_id


def spelling(tokenizer: Tokenizer, token_id: int) -> str:
    """The vocabulary entry of an id that must be there."""
    text = tokenizer.id_to_token(token_id)
    assert text is not None, token_id
    return text
