"""Entries: the same stream comes out, and nothing else does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.caching.entry import CorruptEntryError, Entry, entry_of, pack, unpack
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, TokenLogprob, Usage

START = Start("m", "b", 4, 2)
STOP = FinishReason.STOP


def made(*events: Event) -> Entry | None:
    return entry_of(list(events), created=100.0, ttl_s=60.0, saved_s=2.5)


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, "é", b"\xc3\xa9", -0.5, (TokenLogprob(9, "x", b"x", -1.0),))


@st.composite
def streams(draw: st.DrawFn) -> list[Event]:
    """Choices whose deltas come in any order."""
    choices = draw(st.integers(1, 3))
    with_logprobs = draw(st.booleans())
    pieces: list[Event] = []
    for _ in range(draw(st.integers(0, 8))):
        ids = tuple(draw(st.lists(st.integers(0, 99), max_size=2)))
        pieces.append(
            Delta(
                draw(st.integers(0, choices - 1)),
                draw(st.text(max_size=4)) * draw(st.sampled_from([1, 1, 200])),
                ids,
                tuple(logprob(i) for i in ids) if with_logprobs else None,
            )
        )
    ends: list[Event] = [
        Finish(i, STOP, draw(st.sampled_from([None, "x", 7]))) for i in range(choices)
    ]
    return [START, *pieces, *ends, Usage(4, 9, 2)]


def told(events: tuple[Event, ...] | list[Event]) -> dict[int, object]:
    """What a client has of each choice when it is over."""
    found: dict[int, object] = {}
    for index in {e.index for e in events if isinstance(e, Delta | Finish)}:
        own = [e for e in events if isinstance(e, Delta) and e.index == index]
        found[index] = (
            "".join(e.text for e in own),
            [i for e in own for i in e.token_ids],
            [x for e in own for x in e.logprobs or ()],
            [e for e in events if isinstance(e, Finish) and e.index == index],
        )
    return found


@given(streams())
def test_the_same_answer_comes_out_in_fewer_pieces(stream: list[Event]) -> None:
    entry = made(*stream)
    assert entry is not None
    events = unpack(pack(entry)).events()
    assert events[0] == START
    assert events[-1] == Usage(4, 9, 2)
    assert told(events) == told(stream)
    assert len(events) <= len(stream)


def test_a_prompts_echo_stays_apart_from_the_answer() -> None:
    entry = made(
        START, Delta(0, "ab", (1,), None, True), Delta(0, "c", (2,)), Finish(0, STOP), Usage(4, 1)
    )
    assert entry is not None
    assert [e.prompt for e in entry.events() if isinstance(e, Delta)] == [True, False]


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_large_one_is_deflated(size: int) -> None:
    entry = made(START, Delta(0, "x" * size), Finish(0, STOP), Usage(4, 1))
    assert entry is not None
    assert entry.deflated is (size > 2048)
    assert entry.size < 3000
    assert (entry.created, entry.expires, entry.saved_s) == (100.0, 160.0, 2.5)
    (delta,) = [e for e in entry.events() if isinstance(e, Delta)]
    assert delta.text == "x" * size


@pytest.mark.parametrize(
    "events",
    [
        [],
        [START],
        [START, Usage(1, 1)],
        [START, Delta(0, "x"), Usage(1, 1)],
        [START, Delta(0, "x"), Finish(0, STOP)],
        [Delta(0, "x"), Finish(0, STOP), Usage(1, 1)],
        [START, Finish(0, STOP), Delta(0, "x"), Usage(1, 1)],
        [START, Finish(0, STOP), Finish(0, STOP), Usage(1, 1)],
        [START, Delta(1, "x"), Finish(0, STOP), Usage(1, 1)],
        [START, START, Finish(0, STOP), Usage(1, 1)],
        [START, Finish(0, STOP), Usage(1, 1), Usage(1, 1)],
    ],
)
def test_what_is_not_a_whole_answer_makes_no_entry(events: list[Event]) -> None:
    assert made(*events) is None


def damaged() -> list[bytes]:
    entry = made(START, Delta(0, "x" * 5000), Finish(0, STOP), Usage(4, 1))
    assert entry is not None
    good = pack(entry)
    return [
        b"",
        b"\x00",
        b"hello",
        good[:-1],
        good[:10],
        good + b"x",
        msgspec.msgpack.encode((99, entry)),
    ]


@pytest.mark.parametrize("data", damaged())
def test_damaged_bytes_are_no_entry(data: bytes) -> None:
    with pytest.raises(CorruptEntryError):
        unpack(data)


@pytest.mark.parametrize("deflated", [True, False])
def test_a_damaged_log_is_no_stream(deflated: bool) -> None:
    entry = Entry(b"\x00garbage", deflated, 0.0, 1.0, 0.0, 0, 0)
    with pytest.raises(CorruptEntryError):
        entry.events()
