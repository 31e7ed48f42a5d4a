from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.events import FinishReason
from headrace.engine.base import RawLogprob, Sampled
from headrace.engine.sequence import Chunk
from support.transcript import (
    END,
    END_OF_TURN,
    TURN,
    make,
    play,
    processor,
    spell,
    token,
    words,
)

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
BYE, USE, US = token("bye"), token("\nUse"), token("\nUs")


# Stop strings


@pytest.mark.parametrize(("include", "text"), [(False, "ABC"), (True, "ABCDEFGHIJ")])
def test_a_stop_across_tokens_never_leaks(include: bool, text: str) -> None:
    ids = [token("ABC"), token("DEF"), *spell("G"), token("HIJ")]
    got = play(ids, stop=("DEFGHIJ",), include_stop_str_in_output=include)
    assert (got.text, got.finish, got.stop) == (text, STOP, "DEFGHIJ")
    assert [output.text for output in got.outputs[:3]] == ["ABC", "", ""]


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xSTOP")])
def test_a_stop_inside_one_token_cuts_it(include: bool, text: str) -> None:
    got = play([token("xSTOPy")], stop=("STOP",), include_stop_str_in_output=include)
    assert (got.text, got.finish, got.stop) == (text, STOP, "STOP")


@pytest.mark.parametrize("stops", [("DE", "DEFG"), ("DEFG", "DE")])
def test_of_two_stops_the_one_that_completes_first_wins(stops: tuple[str, ...]) -> None:
    got = play([token("ABC"), *spell("DE")], stop=stops)
    assert (got.text, got.finish, got.stop) == ("ABC", STOP, "DE")


def test_a_stop_of_half_written_characters_waits_for_the_whole() -> None:
    ids = spell("é🙂é")
    got = play(ids[:-2], stop=("🙂",))
    assert (got.text, got.finish, got.stop) == ("é", STOP, "🙂")
    assert [output.text for output in got.outputs] == ["", "é", "", "", "", ""]


def test_an_empty_stop_is_no_stop() -> None:
    assert play(spell("abc"), stop=("",), max_tokens=3).text == "abc"


@settings(deadline=None, max_examples=200)
@given(
    text=st.text("ab🙂\n", min_size=1, max_size=30),
    stops=st.lists(st.text("ab🙂\n", min_size=1, max_size=5), max_size=4).map(tuple),
    include=st.booleans(),
    by_bytes=st.booleans(),
)
def test_streamed_text_is_the_whole_text_cut_at_the_first_stop(
    text: str, stops: tuple[str, ...], include: bool, by_bytes: bool
) -> None:
    ids = spell(text) if by_bytes else words().encode(text).ids
    ends = {text.find(stop) + len(stop): stop for stop in stops if stop in text}
    used = len(ids)
    expected, finish = text, LENGTH
    if ends:
        end = min(ends)
        stop = max((s for s in stops if text[:end].endswith(s)), key=len)
        expected = text[:end] if include else text[: end - len(stop)]
        finish = STOP
        used = next(n for n in range(1, used + 1) if words().decode(ids[:n]).startswith(text[:end]))
    got = play(
        ids[:used], stop=stops, include_stop_str_in_output=include, max_tokens=len(ids), logprobs=1
    )
    assert (got.text, got.finish) == (expected, finish)


# Held text


def test_held_text_comes_with_the_end_token() -> None:
    got = play([BYE, USE, END], stop=("\nUser:",))
    assert (got.text, got.finish, got.stop) == ("bye\nUse", STOP, None)


def test_held_text_comes_when_tokens_run_out() -> None:
    got = play([BYE, US], stop=("\nUser:",), max_tokens=2)
    assert (got.text, got.finish) == ("bye\nUs", LENGTH)


def test_text_is_held_only_while_it_may_become_a_stop() -> None:
    got = play([BYE, USE, token("ful tips")], stop=("\nUser:",))
    assert [output.text for output in got.outputs] == ["bye", "", "\nUseful tips"]
    assert got.finish is None


def test_a_stop_complete_at_the_last_token_allowed_is_a_stop() -> None:
    ids = [BYE, USE, token("r: hello")]
    for seq in (make(stop=("\nUser:",), max_tokens=3), make(stop=("\nUser:",), max_length=5)):
        got = play(ids, seq=seq)
        assert (got.text, got.finish, got.stop) == ("bye", STOP, "\nUser:")


def test_half_a_character_at_the_end_shows_as_a_replacement() -> None:
    half = spell("🙂")[:3]
    assert play([BYE, *half], max_tokens=4).text == "bye\ufffd"
    assert play([BYE, *half, END]).text == "bye\ufffd"
    assert play([BYE, *half], stop=("\ufffd",), max_tokens=4).text == "bye"


def test_text_continues_a_prompt_with_its_leading_space() -> None:
    ids = words().encode(" the world").ids
    assert play(ids, max_tokens=len(ids)).text == " the world"


# End tokens


@pytest.mark.parametrize("end", [END, END_OF_TURN])
def test_each_end_id_ends_unseen_and_is_counted(end: int) -> None:
    got = play([BYE, end], logprobs=1)
    assert (got.text, got.finish, got.stop) == ("bye", STOP, None)
    assert got.token_ids == [BYE, end]
    assert b"".join(entry.raw for entry in got.logprobs) == b"bye"


def test_an_end_id_of_ordinary_text_is_not_shown_either() -> None:
    end = token("<stop>")
    got = play([BYE, end], stage=processor([end]), include_stop_str_in_output=True, logprobs=0)
    assert (got.text, got.finish, got.stop) == ("bye", STOP, None)
    assert b"".join(entry.raw for entry in got.logprobs) == b"bye"


def test_special_tokens_inside_are_not_shown() -> None:
    assert play([BYE, TURN, BYE], max_tokens=3).text == "byebye"


def test_ordinary_text_that_looks_like_a_marker_is_kept() -> None:
    text = "<|im_end|><|endoftext|>"
    got = play([*spell(text), END])
    assert (got.text, got.finish) == (text, STOP)


def test_ignore_eos_runs_to_the_limit() -> None:
    ids = [BYE, END, END_OF_TURN, *spell("abcdefghijklmnopq")]
    got = play(ids, ignore_eos=True, max_tokens=20)
    assert (got.text, got.finish) == ("byeabcdefghijklmnopq", LENGTH)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(
    ("stop_id", "include", "text"),
    [
        (token("<stop>"), False, "bye"),
        (token("<stop>"), True, "bye<stop>"),
        (TURN, False, "bye"),
        (TURN, True, "bye"),
    ],
)
def test_a_stop_token_ends_even_where_eos_is_ignored(
    ignore_eos: bool, stop_id: int, include: bool, text: str
) -> None:
    got = play(
        [BYE, stop_id],
        stop_token_ids=(stop_id,),
        include_stop_str_in_output=include,
        ignore_eos=ignore_eos,
        logprobs=0,
    )
    assert (got.text, got.finish, got.stop) == (text, STOP, stop_id)
    assert b"".join(entry.raw for entry in got.logprobs).decode() == text


def test_an_end_id_named_as_stop_token_is_still_the_models_end() -> None:
    got = play([BYE, END], stop_token_ids=(END,), include_stop_str_in_output=True)
    assert (got.text, got.finish, got.stop) == ("bye", STOP, None)
    ignored = play([BYE, END], stop_token_ids=(END,), ignore_eos=True)
    assert (ignored.text, ignored.finish, ignored.stop) == ("bye", STOP, END)


def test_an_end_token_at_the_limit_is_a_stop() -> None:
    assert play([BYE, END], max_tokens=2).finish is STOP


# min_tokens


def test_nothing_ends_within_min_tokens() -> None:
    ids = [*spell("ab"), END, END_OF_TURN, token("<stop>"), *spell("cdefg"), END]
    got = play(ids, min_tokens=10, stop_token_ids=(token("<stop>"),))
    assert (got.text, got.finish) == ("ab<stop>cdefg", STOP)
    assert len(got.token_ids) == 11


def test_stop_strings_are_looked_for_after_min_tokens() -> None:
    got = play(spell("xSx" + "xxS"), stop=("S",), min_tokens=3)
    assert (got.text, got.finish) == ("xSxxx", STOP)
    spanning = play(spell("aSTaST"), stop=("ST",), min_tokens=2)
    assert (spanning.text, spanning.finish) == ("aSTa", STOP)


def test_min_tokens_equal_to_max_tokens_ends_by_length() -> None:
    got = play([BYE, END], min_tokens=2, max_tokens=2, stop=("bye",))
    assert (got.text, got.finish) == ("bye", LENGTH)


# Limits


def test_length_ends_at_whichever_limit_comes_first() -> None:
    assert play(spell("abc"), max_tokens=3).finish is LENGTH
    assert play(spell("abc"), max_length=5).finish is LENGTH
    assert play(spell("abc"), max_tokens=3, max_length=9).finish is LENGTH
    assert play(spell("abc"), max_length=6).finish is None


# Log-probabilities


def test_bytes_of_logprobs_join_to_the_text_and_stand_with_their_tokens() -> None:
    text = "naïve 👩‍👩‍👧 café 日本"
    ids = words().encode(text).ids
    assert len(ids) > len(text) / 2
    got = play([*ids, END], logprobs=2)
    assert got.text == text
    assert b"".join(entry.raw for entry in got.logprobs).decode() == text
    assert all(len(entry.top) == 2 for entry in got.logprobs)
    assert any("\ufffd" in entry.text for entry in got.logprobs)


def test_logprobs_are_absent_unless_asked_for() -> None:
    assert [output.logprobs for output in play(spell("ab")).outputs] == [None, None]
    assert play(spell("ab"), logprobs=0).logprobs[0].top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_is_an_error_not_an_answer(bad: float) -> None:
    for raw in (RawLogprob(BYE, bad, ()), RawLogprob(BYE, -1.0, ((4, bad),)), None):
        stage, seq = processor(), make(logprobs=1)
        stage.begin(seq)
        seq.tokens.append(BYE)
        output = stage.process(Chunk(seq, 0, 2, samples=True), Sampled(BYE, raw))
        assert output is not None
        assert output.error
        assert output.finish is None
