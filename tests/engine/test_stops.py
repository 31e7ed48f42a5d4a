from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.stops import StopMatcher


def run(
    pieces: Sequence[str], stops: Sequence[str], *, include: bool = False
) -> tuple[str, str | None, int]:
    """What a client sees, the stop, and after how many pieces it ended."""
    matcher = StopMatcher(stops, include=include)
    seen = ""
    for count, piece in enumerate(pieces, 1):
        text, stop = matcher.push(piece)
        seen += text
        if stop is not None:
            return seen + matcher.flush(), stop, count
    return seen + matcher.flush(), None, len(pieces)


def naive(text: str, stops: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """The first place where a stop ends, and there the longest one."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("pieces", "stops", "seen", "stop", "count"),
    [
        (["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC", "DEFGHIJ", 5),
        (["xSTOPy"], ["STOP"], "x", "STOP", 1),
        (["a STOP", "PING"], ["STOPPING", "STOP"], "a ", "STOP", 1),
        (["a STOPPING"], ["STOP", "STOPPING"], "a ", "STOP", 1),
        (["xxEN", "EN", "D!"], ["END"], "xxEN", "END", 3),
        (["aab", "aac"], ["aabaaa", "baac"], "aa", "baac", 2),
        (["abc"], ["abcd", "bc"], "a", "bc", 1),
        (["no stop"], [], "no stop", None, 1),
        (["no stop"], ["", "zz"], "no stop", None, 1),
    ],
)
def test_stop_across_tokens(
    pieces: list[str], stops: list[str], seen: str, stop: str | None, count: int
) -> None:
    assert run(pieces, stops) == (seen, stop, count)


def test_an_included_stop_ends_the_text() -> None:
    assert run(["ABC", "DEF", "G", "HI", "JK"], ["DEFGHIJ"], include=True)[0] == "ABCDEFGHIJ"
    assert run(["xSTOPy"], ["STOP"], include=True)[0] == "xSTOP"


@pytest.mark.parametrize("text", ["bye\nUse", "bye\nUs", "bye\nUseful tips", "bye\n", "bye"])
@pytest.mark.parametrize("include", [True, False])
def test_text_held_back_is_not_lost(text: str, include: bool) -> None:
    assert run(list(text), ["\nUser:"], include=include) == (text, None, len(text))


def test_text_is_held_back_only_while_it_may_become_a_stop() -> None:
    matcher = StopMatcher(["\nUser:"], include=False)
    assert matcher.push("bye") == ("bye", None)
    assert matcher.push("\nUse") == ("", None)
    assert matcher.push("ful") == ("\nUseful", None)
    assert matcher.push(" \n") == (" ", None)
    assert matcher.push("\nU") == ("\n", None)
    assert matcher.flush() == "\nU"


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["X"], include=False)
    assert matcher.push("aXb") == ("a", "X")
    assert matcher.push("c") == ("", "X")
    assert matcher.flush() == ""


letters = st.text("ab\u00e9", max_size=12)
stop_lists = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4)


@given(st.lists(letters, max_size=6), stop_lists, st.booleans())
def test_equals_the_naive_search_whatever_the_split(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text = "".join(pieces)
    seen, stop, _ = run(pieces, stops, include=include)
    assert (seen, stop) == naive(text, stops, include=include)
    assert run(list(text), stops, include=include)[:2] == (seen, stop)


@given(st.lists(letters, max_size=6), stop_lists)
def test_never_leaks_a_beginning_and_never_holds_back_more(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops, include=False)
    whole = seen = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        whole += piece
        seen += text
        if stop is not None:
            break
        held = whole.removeprefix(seen)
        assert seen + held == whole
        beginnings = [n for s in stops for n in range(1, len(s)) if whole.endswith(s[:n])]
        assert len(held) == max(beginnings, default=0)


def test_a_very_long_stop_costs_no_more_per_token() -> None:
    stop = "ab" * 50_000
    matcher = StopMatcher([stop], include=False)
    assert matcher.push(stop[:-1] + "x") == (stop[:-1] + "x", None)
    for _ in range(200_000):
        assert matcher.push("b") == ("b", None)
