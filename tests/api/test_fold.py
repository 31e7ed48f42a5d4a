"""The one reply is the stream, folded."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.api.fold import chat_reply, completion_reply, fold
from headrace.api.frames import ReplyHead
from headrace.core.errors import BackendFailed
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, TokenLogprob, Usage

pytestmark = pytest.mark.anyio

HEAD = ReplyHead("id", 1, "m")
ENTRY = TokenLogprob(1, "a", b"a", -0.5)


async def events(*items: Event) -> AsyncIterator[Event]:
    for item in items:
        yield item


async def test_choices_are_joined_under_their_index() -> None:
    answer = await fold(
        events(
            Start("m", "b", 3),
            Delta(1, "x", (1,), (ENTRY,)),
            Delta(0, "a", (1,), (ENTRY,)),
            Delta(0, "", (1,), (ENTRY,)),
            Finish(0, FinishReason.STOP, 7),
            Delta(1, "y", (1,)),
            Finish(1, FinishReason.LENGTH),
            Usage(3, 4, 2),
        ),
        2,
    )
    chat = chat_reply(HEAD, answer, 0)
    assert [choice["message"]["content"] for choice in chat["choices"]] == ["a", "xy"]
    assert [choice["finish_reason"] for choice in chat["choices"]] == ["stop", "length"]
    assert [choice["stop_reason"] for choice in chat["choices"]] == [7, None]
    assert len(chat["choices"][0]["logprobs"]["content"]) == 2
    assert chat["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    text = completion_reply(HEAD, answer, 0)
    assert text["object"] == "text_completion"
    assert text["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    for reply in (chat_reply, completion_reply):
        assert reply(HEAD, answer, None)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "items",
    [
        (),
        (Start("m", "b", 1),),
        (Start("m", "b", 1), Delta(0, "a"), Usage(1, 1)),
        (Start("m", "b", 1), Delta(0, "a"), Finish(0, FinishReason.STOP)),
    ],
)
async def test_an_answer_cut_short_is_a_failure(items: tuple[Event, ...]) -> None:
    with pytest.raises(BackendFailed):
        await fold(events(*items), 1)
