from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from headrace.engine.models.codec import TokenizerCodec
from headrace.engine.models.errors import ModelError
from headrace.engine.models.tokenizer import TokenizerBundle, load_tokenizer
from support.text_models import TEXTS, byte_level, id_of, ids_of, write_folder

BOS, EOS = "<|endoftext|>", "<|im_end|>"
NAMED = {"bos_token": BOS, "eos_token": EOS}


def original(*, bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer.from_str(byte_level("llama-bpe").to_str())
    if bos:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{BOS} $A",
                    pair=f"{BOS} $A {BOS} $B",
                    special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
                ),
            ]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def load(path: Path, tokenizer: Tokenizer, **files: Any) -> TokenizerBundle:
    return load_tokenizer(write_folder(path / "model", tokenizer, **files))


def tokens(bundle: TokenizerBundle, text: str) -> list[str]:
    return Tokenizer.from_buffer(bundle.tokenizer_json).encode(text).tokens


def test_ids_are_those_of_the_file_and_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    bundle = load(
        tmp_path,
        original(bos=True),
        tokenizer_config={**NAMED, "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
    assert ids_of(tokenizer) == ids_of(original())
    reference = AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    assert [tokenizer.encode(text).ids for text in TEXTS] == [reference.encode(t) for t in TEXTS]


@pytest.mark.parametrize(
    ("in_file", "config", "expected"),
    [
        (False, {}, ["x"]),
        (True, {}, [BOS, "x"]),
        (True, {"add_bos_token": True}, [BOS, "x"]),
        (True, {"add_bos_token": False}, ["x"]),
        (True, {"add_bos_token": None}, [BOS, "x"]),
        (False, {"add_bos_token": True}, [BOS, "x"]),
        (False, {"add_bos_token": True, "add_eos_token": True}, [BOS, "x", EOS]),
        (True, {"add_eos_token": True}, [BOS, "x", EOS]),
        (False, {"add_bos_token": True, "bos_token": None}, ["x"]),
    ],
)
def test_bos_and_eos_are_added_as_the_config_says(
    in_file: bool, config: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    bundle = load(tmp_path, original(bos=in_file), tokenizer_config={**NAMED, **config})
    assert tokens(bundle, "x") == expected
    assert bundle.add_bos is (expected[0] == BOS)
    assert bundle.add_eos is (expected[-1] == EOS)


def test_special_tokens_are_named_as_text_or_object(tmp_path: Path) -> None:
    bundle = load(
        tmp_path,
        original(),
        special_tokens_map={"bos_token": BOS, "eos_token": {"content": EOS, "lstrip": False}},
        tokenizer_config={},
    )
    assert (bundle.bos_token, bundle.eos_token) == (BOS, EOS)


def test_all_end_ids_are_found(tmp_path: Path) -> None:
    end = original().token_to_id(EOS)
    bundle = load(
        tmp_path,
        original(),
        tokenizer_config=NAMED,
        generation_config={"eos_token_id": [end, 7, 9]},
        config={"eos_token_id": 11},
    )
    assert bundle.eos_token_ids == (end, 7, 9, 11)
    bare = load(tmp_path / "bare", original())
    assert bare.eos_token_ids == ()


def test_tokens_declared_beside_the_file_are_added(tmp_path: Path) -> None:
    size = original().get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    bundle = load(
        tmp_path,
        original(),
        tokenizer_config={
            "added_tokens_decoder": {
                str(size): {"content": "<|new|>", "special": True, **flags},
                str(original().token_to_id("<think>")): {
                    "content": "<think>",
                    "special": True,
                    **flags,
                },
            },
            "pad_token": "!",
            "additional_special_tokens": ["</think>", {"content": "<tool_call>"}],
        },
    )
    tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
    assert tokenizer.token_to_id("<|new|>") == size
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    assert {"<|new|>", "<think>", "</think>", "<tool_call>", "!"} <= special
    assert "</tool_call>" not in special
    assert (
        tokenizer.decode(tokenizer.encode("a<|new|><think>b</tool_call>").ids) == "ab</tool_call>"
    )


def test_truncation_and_padding_of_the_file_are_dropped(tmp_path: Path) -> None:
    tokenizer = original()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    bundle = load(tmp_path, tokenizer)
    assert tokens(bundle, "x") == ["x"]
    assert len(tokens(bundle, "x y z x y z")) > 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config": {"chat_template": "config"}, "chat_template": "file"}, "file"),
        ({"chat_template": {"chat_template": "json"}}, "json"),
        (
            {
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "tool_use", "template": "tools"},
                        {"name": "default", "template": "plain"},
                    ]
                }
            },
            "plain",
        ),
        (
            {"tokenizer_config": {"chat_template": [{"name": "rag", "template": "only"}]}},
            "only",
        ),
    ],
)
def test_the_chat_template_is_found(
    files: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    assert load(tmp_path, original(), **files).chat_template == expected
    replaced = load_tokenizer(tmp_path / "model", chat_template="mine")
    assert replaced.chat_template == "mine"


def test_a_template_that_does_not_compile_is_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template, line 1"):
        load(tmp_path, original(), chat_template="{% if %}")
    bundle = load_tokenizer(tmp_path / "model", chat_template="better")
    assert bundle.chat_template == "better"


def test_a_bundle_makes_a_codec(tmp_path: Path) -> None:
    bundle = load(tmp_path, original(bos=True), tokenizer_config=NAMED)
    codec = TokenizerCodec.from_bundle(bundle)
    assert codec.encode("x") == [
        codec.encode(BOS)[-1],
        *codec.encode("x", add_special_tokens=False),
    ]


def test_unigram_vocabularies_work(tmp_path: Path) -> None:
    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("▁", -2.0),
        ("▁a", -1.0),
        ("b", -1.5),
        ("<", -9.0),
        ("/", -9.0),
        ("s", -9.0),
        (">", -9.0),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.decoder = decoders.Metaspace()
    config = {"eos_token": "</s>", "unk_token": "<unk>"}
    template = "{{ messages[0].content }}{{ eos_token }}"
    bundle = load(tmp_path, tokenizer, tokenizer_config=config, chat_template=template)
    assert bundle.eos_token_ids == (1,)
    from headrace.core.request import Message

    ids = TokenizerCodec.from_bundle(bundle).encode_chat([Message("user", "▁a</s>b")])
    assert ids == [3, 5, 6, 7, 8, 4, 1]


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="neither"):
        load_tokenizer(tmp_path / "model.bin")
    folder = write_folder(tmp_path / "broken", original())
    (folder / "tokenizer_config.json").write_bytes(b"{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_bytes(b"[]")
    with pytest.raises(ModelError, match="JSON object"):
        load_tokenizer(folder)
    with pytest.raises(ModelError, match="does not know"):
        load(tmp_path, original(), tokenizer_config={"bos_token": "<nope>", "add_bos_token": True})


def test_other_decoders_are_refused_at_load(tmp_path: Path) -> None:
    tokenizer = original()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        load(tmp_path, tokenizer)


def test_merges_spelled_in_the_old_way_are_guarded(tmp_path: Path) -> None:
    """tokenizer.json of old holds merges as text; a control token that merges make is cut off."""
    data = orjson.loads(original().to_str())
    data["model"]["merges"] = [" ".join(merge) for merge in data["model"]["merges"]]
    tokenizer = Tokenizer.from_str(orjson.dumps(data).decode())
    tokenizer.add_special_tokens([AddedToken("or", normalized=False)])
    folder = write_folder(tmp_path / "old", tokenizer, chat_template="{{ messages[0].content }}or")
    (folder / "tokenizer.json").write_bytes(
        orjson.dumps({**data, "added_tokens": orjson.loads(tokenizer.to_str())["added_tokens"]})
    )
    from headrace.core.request import Message

    codec = TokenizerCodec.from_bundle(load_tokenizer(folder))
    word = id_of(tokenizer, "or")
    ids = codec.encode_chat([Message("user", "for or lord")])
    assert ids.count(word) == 1
    assert codec.decode(ids) == "for or lordor"
