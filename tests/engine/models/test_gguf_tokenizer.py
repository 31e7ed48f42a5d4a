from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from headrace.engine.models.errors import ModelError
from headrace.engine.models.gguf_tokenizer import gguf_tokenizer_bundle
from headrace.engine.models.tokenizer import TokenizerBundle, load_tokenizer
from support.text_models import (
    BYTE_LEVEL_KINDS,
    CONTROL,
    NORMAL,
    TEXTS,
    byte_level,
    byte_level_metadata,
    id_of,
    ids_of,
    sentencepiece_metadata,
    sentencepiece_model,
    spelling,
    write_gguf,
)


def load(path: Path, metadata: dict[str, Any]) -> TokenizerBundle:
    return load_tokenizer(write_gguf(path / "model.gguf", metadata))


def built(bundle: TokenizerBundle) -> Tokenizer:
    return Tokenizer.from_buffer(bundle.tokenizer_json)


def transformers_ids(path: Path, metadata: dict[str, Any]) -> list[list[int]]:
    from transformers import AutoTokenizer

    write_gguf(path / "reference.gguf", metadata)
    reference = AutoTokenizer.from_pretrained(str(path), gguf_file="reference.gguf")
    return [reference.encode(text) for text in TEXTS]


@pytest.mark.parametrize("kind", BYTE_LEVEL_KINDS)
def test_byte_level_ids_are_those_of_the_original_tokenizer(kind: str, tmp_path: Path) -> None:
    original = byte_level(kind)
    bundle = load(tmp_path, byte_level_metadata(original, kind))
    assert ids_of(built(bundle)) == ids_of(original)


@pytest.mark.parametrize("kind", BYTE_LEVEL_KINDS)
def test_byte_level_text_comes_back(kind: str, tmp_path: Path) -> None:
    tokenizer = built(load(tmp_path, byte_level_metadata(byte_level(kind), kind)))
    expected = (
        [byte_level(kind).normalizer.normalize_str(t) for t in TEXTS] if kind == "qwen2" else TEXTS
    )
    assert [tokenizer.decode(ids) for ids in ids_of(tokenizer)] == list(expected)


def test_the_kind_of_pre_tokenizer_matters() -> None:
    original = byte_level("qwen2", 900)
    by_kind = {
        kind: ids_of(built(gguf_tokenizer_bundle(byte_level_metadata(original, kind))))
        for kind in BYTE_LEVEL_KINDS
    }
    assert len({repr(ids) for ids in by_kind.values()}) == len(BYTE_LEVEL_KINDS)


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "tekken"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_byte_level_ids_are_those_of_transformers(kind: str, add_bos: bool, tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level(kind), kind, add_bos_token=add_bos)
    tokenizer = built(load(tmp_path, metadata))
    ours = [tokenizer.encode(text).ids for text in TEXTS]
    assert ours == transformers_ids(tmp_path, metadata)


def test_qwen2_ids_are_those_of_transformers_own_class(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    original = byte_level("qwen2")
    metadata = byte_level_metadata(original, "qwen2")
    reference = Qwen2Tokenizer(
        vocab=original.get_vocab(),
        merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
    )
    tokenizer = built(load(tmp_path, metadata))
    assert ids_of(tokenizer) == [reference.encode(text) for text in TEXTS]


def test_sentencepiece_ids_are_those_of_the_original_model(tmp_path: Path) -> None:
    original = sentencepiece_model()
    tokenizer = built(load(tmp_path, sentencepiece_metadata(original)))
    assert ids_of(tokenizer) == [original.encode(text) for text in TEXTS]
    assert [tokenizer.decode(ids) for ids in ids_of(tokenizer)] == list(TEXTS)


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(sentencepiece_model())
    tokenizer = built(load(tmp_path, metadata))
    ours = [tokenizer.encode(text).ids for text in TEXTS]
    assert ours == transformers_ids(tmp_path, metadata)


def test_sentencepiece_uses_byte_tokens_for_rare_characters() -> None:
    tokenizer = built(gguf_tokenizer_bundle(sentencepiece_metadata(sentencepiece_model())))
    assert tokenizer.encode("\U0001f9a9", add_special_tokens=False).tokens[1:] == [
        "<0xF0>",
        "<0x9F>",
        "<0xA6>",
        "<0xA9>",
    ]


def test_sentencepiece_without_prefix_space() -> None:
    metadata = sentencepiece_metadata(sentencepiece_model(), add_space_prefix=False)
    tokenizer = built(gguf_tokenizer_bundle(metadata))
    ids = tokenizer.encode("hello hello", add_special_tokens=False).ids
    assert not spelling(tokenizer, ids[0]).startswith("▁")
    assert tokenizer.decode(ids) == "hello hello"
    assert tokenizer.decode(tokenizer.encode(" hello", add_special_tokens=False).ids) == " hello"


def test_a_control_token_is_never_merged_from_text() -> None:
    metadata = sentencepiece_metadata(sentencepiece_model())
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    word = next(i for i, text in enumerate(tokens) if text == "▁hello")
    types[word] = CONTROL
    model = built(gguf_tokenizer_bundle(metadata))
    assert word not in model.encode("say hello").ids


@pytest.mark.parametrize(
    ("extra", "adds_bos"),
    [({}, False), ({"add_bos_token": True}, True), ({"add_bos_token": False}, False)],
)
def test_whether_bos_is_added_is_part_of_the_json(extra: dict[str, bool], adds_bos: bool) -> None:
    bundle = gguf_tokenizer_bundle(byte_level_metadata(byte_level(), "smollm", **extra))
    assert bundle.add_bos is adds_bos
    bos = [bundle.bos_token] if adds_bos else []
    assert built(bundle).encode("x").tokens == [*bos, "x"]


def test_families_that_begin_with_bos_do_so_where_the_file_is_silent() -> None:
    llama3 = gguf_tokenizer_bundle(byte_level_metadata(byte_level("llama-bpe"), "llama-bpe"))
    llama2 = gguf_tokenizer_bundle(sentencepiece_metadata(sentencepiece_model()))
    assert llama3.add_bos
    assert llama2.add_bos
    assert built(llama2).encode("x").tokens[0] == "<s>"


def test_eos_is_added_where_the_file_says_so() -> None:
    metadata = byte_level_metadata(byte_level(), "smollm", add_bos_token=True, add_eos_token=True)
    bundle = gguf_tokenizer_bundle(metadata)
    assert bundle.add_eos
    assert built(bundle).encode("x").tokens == ["<|endoftext|>", "x", "<|im_end|>"]


def test_all_ends_of_an_answer_are_found() -> None:
    tokenizer = byte_level()
    start, end, extra = (
        id_of(tokenizer, text) for text in ("<|endoftext|>", "<|im_end|>", "<think>")
    )
    metadata = byte_level_metadata(tokenizer, "smollm", eot_token_id=extra)
    assert gguf_tokenizer_bundle(metadata).eos_token_ids == (end, extra, start)


def test_padding_that_is_an_ordinary_word_stays_one() -> None:
    tokenizer = byte_level()
    word = id_of(tokenizer, "!")
    metadata = byte_level_metadata(tokenizer, "smollm", padding_token_id=word)
    model = built(gguf_tokenizer_bundle(metadata))
    assert model.decode(model.encode("no!").ids) == "no!"


def test_control_tokens_are_special_and_markup_is_not() -> None:
    tokenizer = built(gguf_tokenizer_bundle(byte_level_metadata(byte_level(), "smollm")))
    ids = tokenizer.encode("<|im_start|><think>x</think><|im_end|>").ids
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "<think>x</think>"


def test_template_travels_and_can_be_replaced(tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level(), "smollm")
    metadata["tokenizer.chat_template"] = "own"
    assert load(tmp_path, metadata).chat_template == "own"
    assert gguf_tokenizer_bundle(metadata, chat_template="other").chat_template == "other"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "'kimi-k2'"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer"),
        ({"tokenizer.ggml.merges": None}, "without merges"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, "without scores"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    metadata = {**byte_level_metadata(byte_level(), "smollm"), **changes}
    with pytest.raises(ModelError, match=named):
        gguf_tokenizer_bundle(metadata)


def test_a_file_that_names_no_pre_tokenizer_is_read_as_gpt2(
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = byte_level("gpt-2")
    bundle = gguf_tokenizer_bundle(byte_level_metadata(original, None))
    assert ids_of(built(bundle)) == ids_of(original)
    assert "pre-tokenizer" in caplog.text


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "a.gguf", byte_level_metadata(byte_level(), "smollm"))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        load_tokenizer(cut)


def test_an_entry_beyond_the_types_counts_as_a_word() -> None:
    metadata = byte_level_metadata(byte_level(), "smollm")
    metadata["tokenizer.ggml.token_type"] = [NORMAL]
    assert (
        built(gguf_tokenizer_bundle(metadata)).encode("hello").ids
        == byte_level().encode("hello").ids
    )


def test_gguf_is_imported_only_for_a_gguf_file() -> None:
    code = (
        "import sys, headrace.engine.models.tokenizer, headrace.engine.detokenizer;"
        "assert not {'gguf', 'torch', 'tokenizers', 'jinja2', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.model
def test_the_default_model_tokenises_as_transformers_does() -> None:
    from transformers import AutoTokenizer

    from headrace.engine.models.store import resolve

    path = resolve("smollm2-135m-instruct").path
    assert path is not None, "run `make model` first"
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # It reads `smollm` as GPT-2's split; the model itself also parts single digits.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bundle = load_tokenizer(path)
    tokenizer = built(bundle)
    assert [tokenizer.encode(text).ids for text in TEXTS] == [
        reference.encode(text) for text in TEXTS
    ]
    assert tokenizer.get_vocab_size() == len(reference)
    assert bundle.chat_template == reference.chat_template
    assert (bundle.bos_token, bundle.eos_token) == (reference.bos_token, reference.eos_token)
    assert bundle.eos_token_ids[0] == reference.eos_token_id
