from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from headrace.engine.detokenizer import Detokenizer, token_bytes, token_text
from headrace.engine.models.errors import ModelError
from headrace.engine.models.gguf_tokenizer import gguf_tokenizer_bundle
from headrace.engine.vocabulary import byte_alphabet
from support.text_models import (
    TEXTS,
    byte_level,
    id_of,
    sentencepiece_metadata,
    sentencepiece_model,
    spelling,
)

BYTE_LEVEL = byte_level()
SENTENCEPIECE = Tokenizer.from_buffer(
    gguf_tokenizer_bundle(sentencepiece_metadata(sentencepiece_model())).tokenizer_json
)
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
EMOJI = "👩‍👩‍👧‍👦"


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], *, prompt: Sequence[int] = (), skip: bool = True
) -> list[str]:
    """The text of each token, and last what the end brings."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, prompt_tail=prompt)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token for each byte."""
    alphabet = byte_alphabet()
    names = [alphabet[b] if tokenizer is BYTE_LEVEL else f"<0x{b:02X}>" for b in raw]
    return [id_of(tokenizer, name) for name in names]


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_joined_text_is_the_full_decode(tokenizer: Tokenizer, text: str) -> None:
    ids = ids_of(tokenizer, text)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == text


@BOTH
def test_never_half_a_character(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, f"a{EMOJI}é世b")
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == f"a{EMOJI}é世b"
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces[:-1]


@BOTH
def test_text_comes_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    emoji = byte_ids(tokenizer, "\U0001f9a9".encode())
    detokenizer = Detokenizer(tokenizer, prompt_tail=ids_of(tokenizer, "x"))
    assert [detokenizer.push(token_id) for token_id in emoji] == ["", "", "", "\U0001f9a9"]
    assert detokenizer.flush() == ""


@BOTH
def test_an_incomplete_character_ends_as_the_full_decode_says(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "x\U0001f9a9")[:-1]
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "\ufffd" in pieces[-1]


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=40), st.booleans())
@example([id_of(BYTE_LEVEL, "ð"), id_of(BYTE_LEVEL, "Ł"), 0, 400], True)
def test_random_tokens_join_to_the_full_decode(ids: list[int], skip: bool) -> None:
    expected = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(BYTE_LEVEL, ids, skip=skip)) == expected


@given(
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=12),
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=12),
)
def test_random_tokens_after_a_prompt_continue_its_text(prompt: list[int], ids: list[int]) -> None:
    """A character that the prompt began comes out whole: the prompt's text, taken without what is
    incomplete at its end, and the completion are together the text of both."""
    text = "".join(stream(BYTE_LEVEL, ids, prompt=prompt))
    prompt_only = Detokenizer(BYTE_LEVEL)
    complete = "".join(map(prompt_only.push, prompt))
    incomplete = prompt_only.flush()
    whole = BYTE_LEVEL.decode([*prompt, *ids])
    assert whole in (complete + text, complete + incomplete + text)


_ORDINARY = [
    token_id
    for token_id in range(SENTENCEPIECE.get_vocab_size())
    if not spelling(SENTENCEPIECE, token_id).startswith("<")
]


@given(st.lists(st.one_of(st.sampled_from(_ORDINARY), st.text(max_size=4)), max_size=20))
def test_pieces_and_byte_tokens_join_to_the_full_decode(parts: list[int | str]) -> None:
    ids = [
        token_id
        for part in parts
        for token_id in ([part] if isinstance(part, int) else ids_of(SENTENCEPIECE, part))
    ]
    assert "".join(stream(SENTENCEPIECE, ids)) == SENTENCEPIECE.decode(ids)


@given(st.lists(st.integers(0, 255), max_size=12))
def test_byte_tokens_read_as_sentencepiece_reads_them(raw: list[int]) -> None:
    model = sentencepiece_model()
    ids = [model.piece_to_id(f"<0x{byte:02X}>") for byte in raw]
    prompt = ids_of(SENTENCEPIECE, "x")
    assert "x" + "".join(stream(SENTENCEPIECE, ids, prompt=prompt)) == model.decode([*prompt, *ids])


def test_a_leading_space_is_dropped_only_at_the_start_of_a_text() -> None:
    hello = ids_of(SENTENCEPIECE, "hello")
    assert spelling(SENTENCEPIECE, hello[0]) == "▁hello"
    bos = id_of(SENTENCEPIECE, "<s>")
    assert "".join(stream(SENTENCEPIECE, hello)) == "hello"
    assert "".join(stream(SENTENCEPIECE, hello, prompt=[bos])) == "hello"
    assert "".join(stream(SENTENCEPIECE, hello, prompt=[bos, *hello])) == " hello"
    assert "".join(stream(SENTENCEPIECE, hello, prompt=[*hello, bos])) == " hello"


def test_only_one_leading_space_is_dropped() -> None:
    space = id_of(SENTENCEPIECE, "▁")
    ids = [space, space, *ids_of(SENTENCEPIECE, "hello")]
    assert "".join(stream(SENTENCEPIECE, ids)) == SENTENCEPIECE.decode(ids) == "  hello"


def test_byte_level_keeps_leading_spaces() -> None:
    assert "".join(stream(BYTE_LEVEL, ids_of(BYTE_LEVEL, "  hello"))) == "  hello"


def test_a_character_begun_by_the_prompt_is_completed() -> None:
    emoji = byte_ids(BYTE_LEVEL, "\U0001f9a9".encode())
    for cut in range(1, 4):
        assert "".join(stream(BYTE_LEVEL, emoji[cut:], prompt=emoji[:cut])) == "\U0001f9a9"
    assert "".join(stream(BYTE_LEVEL, ids_of(BYTE_LEVEL, "ab"), prompt=emoji[:2])) == "ab"


@BOTH
def test_special_tokens_never_leak_and_lookalikes_stay(tokenizer: Tokenizer) -> None:
    special = [
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    ]
    prompt = ids_of(tokenizer, "x")
    plain = [i for i in ids_of(tokenizer, "<|im_en") if i not in special]
    ids = [*special, *plain, *special]
    assert "".join(stream(tokenizer, ids, prompt=prompt)).strip() == "<|im_en"
    shown = "".join(stream(tokenizer, ids, prompt=prompt, skip=False))
    assert all(spelling(tokenizer, token_id) in shown for token_id in special)


def test_added_tokens_outside_the_byte_alphabet_are_text() -> None:
    tokenizer = Tokenizer.from_str(BYTE_LEVEL.to_str())
    tokenizer.add_tokens([AddedToken("a b\u2581", normalized=False)])
    ids = tokenizer.encode("xa b\u2581y").ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "xa b\u2581y"


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    joined = b"".join(token_bytes(tokenizer, token_id) for token_id in ids_of(tokenizer, text))
    prefix = b" " if tokenizer is SENTENCEPIECE and text else b""
    assert joined == prefix + text.encode()


@BOTH
def test_text_of_a_token_alone(tokenizer: Tokenizer) -> None:
    part = ids_of(tokenizer, "x\U0001f9a9")[-1]
    assert token_text(tokenizer, part) == "\ufffd"
    assert token_bytes(tokenizer, part) == "\U0001f9a9".encode()[-1:]


def test_ids_outside_the_vocabulary_are_silent() -> None:
    assert stream(BYTE_LEVEL, [10**6, -1, 2**40]) == ["", "", "", ""]
    assert token_bytes(BYTE_LEVEL, 10**6) == b""
    assert token_text(BYTE_LEVEL, -1) == ""


def test_metaspace_decoder_drops_the_first_space_only() -> None:
    vocab = {"▁a": 0, "▁b": 1, "c": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    for ids in ([0, 1, 2], [2, 0, 1], [1, 1]):
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.CTC(),
        decoders.Sequence([decoders.Replace("x", "y"), decoders.Fuse()]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_other_decoders_are_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ModelError, match="decoder"):
        Detokenizer(tokenizer)


def test_a_long_answer_costs_the_same_per_token() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    ids = ids_of(BYTE_LEVEL, "hello world ") * 50_000
    assert sum(len(detokenizer.push(token_id)) for token_id in ids) == 12 * 50_000
