"""Frames, whatever pieces they arrive in, and both ends of the socket pair."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import msgspec
import pytest

from headrace.core.events import FinishReason, TokenLogprob
from headrace.core.request import SamplingParams
from headrace.engine.transport import (
    ChannelClosed,
    EngineChannel,
    FrameDecoder,
    FrontChannel,
    encode_frame,
)
from headrace.engine.wire import (
    Abort,
    Alive,
    EngineConfig,
    EngineMessage,
    Failed,
    Fault,
    FrontMessage,
    Output,
    Progress,
    SetTargets,
    Shutdown,
    Step,
    StepStats,
    Submit,
)

pytestmark = pytest.mark.anyio

TOP = TokenLogprob(7, "\ufffd", b"\xf0", -0.5)
STEP = Step(
    outputs=[
        Output(seq=3, started=True, cached_tokens=16, prompt_text="é", text="a", token_ids=[5]),
        Output(
            seq=2**40,
            logprobs=[TokenLogprob(5, "a", b"a", -0.25, (TOP,))],
            finish=FinishReason.STOP,
            stop="END",
        ),
        Output(seq=5, finish=FinishReason.LENGTH),
        Output(seq=6, error="no", invalid=True),
    ],
    stats=StepStats(0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    blocks_added=[b"\x00" * 32],
)
FROM_ENGINE: list[EngineMessage] = [
    Progress("load_weights", 0.5, "layer 3"),
    Failed("broken", fatal=True),
    Alive(),
    STEP,
]
FROM_FRONT: list[FrontMessage] = [
    Submit(
        seq=1,
        group=1,
        prompt=[0, 2**31],
        sampling=SamplingParams(logit_bias=((5, -100.0),), stop=("x",), seed=-1),
        seed=2**63 - 1,
        salt=b"salt",
    ),
    Abort([1, 2]),
    SetTargets(1, 2),
    Fault("hang"),
    Shutdown(),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_frames_survive_any_cut(size: int) -> None:
    stream = b"".join(encode_frame(message) for message in FROM_ENGINE)
    decoder: FrameDecoder[EngineMessage] = FrameDecoder(EngineMessage)
    got = []
    for start in range(0, len(stream), size):
        got += decoder.feed(stream[start : start + size])
    assert got == FROM_ENGINE


@pytest.mark.parametrize(
    "stream",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        bytes(encode_frame({"type": "Nothing"})),
        bytes(encode_frame(Abort([1]))),
    ],
    ids=["too large", "not msgpack", "unknown", "of the other side"],
)
def test_what_is_no_frame_closes(stream: bytes) -> None:
    decoder: FrameDecoder[EngineMessage] = FrameDecoder(EngineMessage)
    with pytest.raises(ChannelClosed):
        decoder.feed(stream)


def test_engine_end_reads_all_that_is_there(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    channel = EngineChannel(theirs)
    config = EngineConfig(model_path="m", model_name="n", chat_template="x" * 100_000)
    assert channel.receive(0.0) == []
    ours.sendall(encode_frame(config))
    assert channel.receive_config() == config
    ours.sendall(b"".join(encode_frame(message) for message in FROM_FRONT))
    assert channel.receive(5.0) == FROM_FRONT
    assert channel.receive(0.0) == []
    ours.close()
    channel.wait_hang_up()
    with pytest.raises(ChannelClosed):
        channel.receive(0.0)
    with pytest.raises(ChannelClosed):
        channel.send(STEP)


async def test_front_end_hands_over_each_message_and_the_end(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    got: list[EngineMessage] = []
    closed = asyncio.Event()
    channel = await FrontChannel.open(ours, got.append, closed.set)
    engine = EngineChannel(theirs)
    channel.send(FROM_FRONT)
    assert await asyncio.to_thread(engine.receive, 5.0) == FROM_FRONT
    for message in FROM_ENGINE:
        engine.send(message)
    theirs.close()
    async with asyncio.timeout(5):
        await closed.wait()
    assert got == FROM_ENGINE
    channel.send(FROM_FRONT)  # nobody is there, nothing happens
    await channel.drain()


async def test_front_end_waits_for_an_engine_that_does_not_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    channel = await FrontChannel.open(ours, lambda _: None, lambda: None)
    engine = EngineChannel(theirs)
    sent = 0
    drained = asyncio.create_task(channel.drain())
    await drained
    while drained.done():
        channel.send(
            [Submit(seq=sent, group=0, prompt=[1] * 1000, sampling=SamplingParams(), seed=0)]
        )
        sent += 1
        drained = asyncio.create_task(channel.drain())
        await asyncio.sleep(0)
        assert sent < 10_000, "everything was buffered"
    got: list[FrontMessage] = []
    async with asyncio.timeout(10):
        while len(got) < sent:
            got += await asyncio.to_thread(engine.receive, 1.0)
        await drained
    assert [message.seq for message in got if isinstance(message, Submit)] == list(range(sent))
    channel.close()


async def test_garbage_from_the_engine_ends_the_channel(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    closed = asyncio.Event()
    await FrontChannel.open(ours, lambda _: None, closed.set)
    theirs.sendall(b"\x01\x00\x00\x00\xc1")
    async with asyncio.timeout(5):
        await closed.wait()


def test_a_step_of_64_sequences_is_small() -> None:
    outputs = [Output(seq=seq, text=" word", token_ids=[seq]) for seq in range(64)]
    frame = encode_frame(msgspec.structs.replace(STEP, outputs=outputs))
    assert len(frame) < 64 * 48
