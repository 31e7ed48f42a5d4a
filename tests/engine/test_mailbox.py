"""What a reader finds who comes early, late or never."""

from __future__ import annotations

import asyncio

import pytest

from headrace.core.errors import BackendFailed
from headrace.core.events import FinishReason, TokenLogprob
from headrace.engine.mailbox import Mailbox
from headrace.engine.wire import Output

pytestmark = pytest.mark.anyio


def score(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, str(token_id), b"", -1.0)


async def test_a_waiting_reader_gets_each_output_as_it_comes() -> None:
    box = Mailbox(range(1))
    for text in "abc":
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        box.put(Output(seq=0, text=text, token_ids=[1]))
        assert await reader == [Output(seq=0, text=text, token_ids=[1])]


async def test_a_late_reader_finds_one_merged_output_a_sequence() -> None:
    box = Mailbox(range(4, 6))
    box.put(Output(seq=4, started=True, cached_tokens=3, prompt_text="p", token_ids=[1]))
    box.put(Output(seq=5, started=True, text="x", token_ids=[7], logprobs=[score(7)]))
    box.put(Output(seq=4, text="a", token_ids=[2]))
    box.put(
        Output(
            seq=5, text="y", token_ids=[8], logprobs=[score(8)], finish=FinishReason.STOP, stop=8
        )
    )
    box.put(Output(seq=4, text="b", token_ids=[3]))
    assert await box.take() == [
        Output(
            seq=4, started=True, cached_tokens=3, prompt_text="p", text="ab", token_ids=[1, 2, 3]
        ),
        Output(
            seq=5,
            started=True,
            text="xy",
            token_ids=[7, 8],
            logprobs=[score(7), score(8)],
            finish=FinishReason.STOP,
            stop=8,
        ),
    ]


async def test_a_reader_that_never_comes_costs_one_slot() -> None:
    box = Mailbox(range(1))
    for token_id in range(10_000):
        box.put(Output(seq=0, text="x", token_ids=[token_id]))
    (output,) = await box.take()
    assert output.text == "x" * 10_000
    assert output.token_ids == list(range(10_000))


async def test_a_failure_comes_after_what_was_there() -> None:
    box = Mailbox(range(1))
    box.put(Output(seq=0, text="a"))
    box.fail(BackendFailed("gone"))
    assert await box.take() == [Output(seq=0, text="a")]
    with pytest.raises(BackendFailed, match="gone"):
        await box.take()


async def test_a_failure_wakes_the_reader() -> None:
    box = Mailbox(range(1))
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.fail(BackendFailed("gone"))
    with pytest.raises(BackendFailed):
        await reader


async def test_a_reader_can_be_cancelled_and_come_again() -> None:
    box = Mailbox(range(1))
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait({reader})
    box.put(Output(seq=0, text="a"))
    assert await box.take() == [Output(seq=0, text="a")]
