"""The bytes of a stream, event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.api.frames import ChatFrames, CompletionFrames, ReplyHead, StreamShape
from headrace.core.errors import BackendFailed
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, TokenLogprob, Usage
from support.app import chunks_of, events_of, text_of

HEAD = ReplyHead("id-1", 5, "m", "fp_1")
START = Start("m", "b", 3)
STOP = Finish(0, FinishReason.STOP)


def body(frames: Any, *events: Event) -> str:
    joined: bytes = b"".join(frames.feed(event) for event in events)
    return joined.decode()


def test_a_chat_stream() -> None:
    frames = ChatFrames(HEAD, StreamShape(1))
    chunks = chunks_of(body(frames, START, Delta(0, "hi", (1,)), STOP, Usage(3, 1)))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "hi"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    for chunk in chunks:
        assert "usage" not in chunk
        del chunk["choices"]
        assert chunk == {
            "id": "id-1",
            "object": "chat.completion.chunk",
            "created": 5,
            "model": "m",
            "system_fingerprint": "fp_1",
        }
    assert frames.complete


def test_a_completion_stream() -> None:
    frames = CompletionFrames(HEAD, StreamShape(1))
    chunks = chunks_of(body(frames, START, Delta(0, "hi", (1,)), STOP, Usage(3, 1)))
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ("hi", None),
        ("", "stop"),
    ]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        'quotes " and \\ and \n\r\t and \x00\x1f\x7f',
        "\u2028\u2029\x85 look like line breaks",
        "\U0001f600 \u00e9 \u4e2d",
        "data: [DONE]\n\n",
        "\x00text\x00",
    ],
)
@pytest.mark.parametrize("kind", [ChatFrames, CompletionFrames])
def test_any_text_comes_through_on_one_line(text: str, kind: Any) -> None:
    sent = body(kind(HEAD, StreamShape(1)), START, Delta(0, text, (1,)), STOP, Usage(3, 1))
    assert text_of(chunks_of(sent)) == text
    assert len(sent.splitlines()) == 2 * len(events_of(sent))


def test_a_model_name_cannot_break_the_template() -> None:
    head = ReplyHead("id", 1, 'm"\x00text\x00\n')
    frames = ChatFrames(head, StreamShape(1))
    chunks = chunks_of(body(frames, START, Delta(0, "hi"), STOP, Usage(3, 1)))
    assert {chunk["model"] for chunk in chunks} == {head.model}
    assert text_of(chunks) == "hi"


def test_each_choice_opens_and_closes_once_under_its_index() -> None:
    frames = ChatFrames(HEAD, StreamShape(2, include_usage=True))
    chunks = chunks_of(
        body(
            frames,
            START,
            Delta(1, "b", (1,)),
            Delta(0, "a", (1,)),
            Finish(1, FinishReason.LENGTH),
            Delta(0, "c", (1,)),
            STOP,
            Usage(3, 3),
        )
    )
    *pieces, last = chunks
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in pieces:
        (choice,) = chunk["choices"]
        seen[choice["index"]].append(choice["delta"].get("role") or choice["finish_reason"])
        assert chunk["usage"] is None
    assert seen == {0: ["assistant", None, None, "stop"], 1: ["assistant", None, "length"]}
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_text_that_is_held_back_is_no_event() -> None:
    frames = CompletionFrames(HEAD, StreamShape(1))
    assert frames.feed(START) == b""
    assert frames.feed(Delta(0, "", (1,))) == b""


def test_a_choice_without_text_still_opens_and_closes() -> None:
    frames = ChatFrames(HEAD, StreamShape(1))
    chunks = chunks_of(body(frames, START, STOP, Usage(3, 0)))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"


def test_usage_on_every_event_counts_up() -> None:
    shape = StreamShape(1, include_usage=True, continuous_usage=True)
    frames = CompletionFrames(HEAD, shape)
    prompt = Delta(0, "p", (9, 9, 9), prompt=True)
    sent = body(
        frames, START, prompt, Delta(0, "a", (1, 2)), Delta(0, "b", (3,)), STOP, Usage(3, 3)
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks_of(sent)]
    assert counts == [0, 2, 3, 3, 3]


def test_continuous_usage_alone_changes_nothing() -> None:
    frames = ChatFrames(HEAD, StreamShape(1, continuous_usage=True))
    sent = body(frames, START, Delta(0, "a", (1,)), STOP, Usage(3, 1))
    assert "usage" not in sent


def test_logprobs_in_both_streams() -> None:
    entry = TokenLogprob(1, "a", b"a", -0.5)
    events = (
        START,
        Delta(0, "", (1,), (entry,)),
        Delta(0, "aa", (1,), (entry,)),
        STOP,
        Usage(3, 2),
    )
    chat = chunks_of(body(ChatFrames(HEAD, StreamShape(1, top_logprobs=0)), *events))
    with_scores = [c for c in chat if c["choices"][0]["logprobs"]]
    assert [len(c["choices"][0]["logprobs"]["content"]) for c in with_scores] == [1, 1]
    legacy = chunks_of(body(CompletionFrames(HEAD, StreamShape(1, top_logprobs=0)), *events))
    offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in legacy[:2]]
    assert offsets == [[0], [1]]


@pytest.mark.parametrize("events", [(START, Usage(3, 0)), (START, Delta(0, "a"), Usage(3, 1))])
def test_an_answer_without_all_its_ends_is_a_failure(events: tuple[Event, ...]) -> None:
    frames = ChatFrames(HEAD, StreamShape(1))
    with pytest.raises(BackendFailed):
        body(frames, *events)
    assert not frames.complete


def test_the_stop_that_ended_it() -> None:
    frames = ChatFrames(HEAD, StreamShape(1))
    sent = body(frames, START, Finish(0, FinishReason.STOP, "END"), Usage(3, 0))
    assert json.loads(events_of(sent)[-2])["choices"][0]["stop_reason"] == "END"
