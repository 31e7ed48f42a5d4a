"""From requests to events over a real engine process whose model is a hash."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from headrace.backends.engine import EngineBackend, cache_salt, choice_seed
from headrace.core.errors import (
    BackendFailed,
    BackendUnavailable,
    ContextLengthExceeded,
    InvalidRequest,
    ShuttingDown,
)
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, Usage
from headrace.core.health import State
from headrace.engine.wire import EngineConfig
from support.engine_backend import (
    LIMIT_S,
    LONG,
    ask,
    asked,
    at_rest,
    backend,
    text_of,
    texts,
    until,
)
from support.hash_engine import BAD_SCORES, POISON

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


async def test_the_order_of_events(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:
        events = await ask(engine, asked("hello", max_tokens=8))
        assert events[0] == Start("served", "engine", prompt_tokens=5, cached_tokens=0)
        assert all(isinstance(event, Delta) for event in events[1:-2])
        assert events[-2:] == [Finish(0, FinishReason.LENGTH), Usage(5, 8)]
        assert texts(events) == text_of("hello", 8)


async def test_what_it_says_of_itself(hash_builder: str) -> None:
    async with backend(hash_builder, max_context=100) as engine:
        (card,) = engine.models
        assert (card.id, card.context_length, card.vocab_size) == ("served", 100, 257)
        assert card.created > 1_700_000_000
        assert card.revision
        assert engine.health().state is State.READY
        assert engine.codec is not None
        assert engine.codec is engine.codec
        assert engine.codec.encode("hello") == list(b"hello")
        load = engine.load()
        assert (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)
        assert (load.max_running, load.kv_blocks, load.block_size) == (64, 256, 16)
        await ask(engine, asked())
        assert engine.load().recent_step_s


async def test_a_prompt_without_ids_is_tokenised(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:
        events = await ask(engine, asked("hello", prompt_token_ids=None))
        assert texts(events) == text_of("hello", 8)


async def test_choices_of_a_seeded_request_differ_and_repeat(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:
        request = asked("hello", n=3, temperature=1.0, seed=42, max_tokens=20)
        first, again = await ask(engine, request), await ask(engine, request)
        answers = [texts(first, index) for index in range(3)]
        assert len(set(answers)) == 3
        assert [texts(again, index) for index in range(3)] == answers
        alone = await ask(engine, asked("hello", temperature=1.0, seed=42, max_tokens=20))
        assert texts(alone) == answers[0]
        finishes = [event.index for event in first if isinstance(event, Finish)]
        assert sorted(finishes) == [0, 1, 2]
        assert [event for event in first if isinstance(event, Start)] == first[:1]
        assert first[-1] == Usage(5, 60)


async def test_unseeded_requests_vary(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:
        request = asked("hello", n=2, temperature=1.0, max_tokens=20)
        answers = set()
        for _ in range(2):
            events = await ask(engine, request)
            answers |= {texts(events, 0), texts(events, 1)}
        assert len(answers) == 4


async def test_stop_and_finish_reach_the_event(hash_builder: str) -> None:
    text = text_of("hello", 40)
    async with backend(hash_builder) as engine:
        events = await ask(engine, asked("hello", max_tokens=40, stop=(text[10:15],)))
        assert texts(events) == text[: text.index(text[10:15])]
        assert Finish(0, FinishReason.STOP, text[10:15]) in events


async def test_echo_with_scores(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:
        request = asked("hello", n=2, echo=True, logprobs=1, prompt_logprobs=1, max_tokens=2)
        events = await ask(engine, request)
        for index in (0, 1):
            prompt, *rest = [e for e in events if isinstance(e, Delta) and e.index == index]
            assert prompt.prompt
            assert (prompt.text, prompt.token_ids) == ("hello", tuple(b"hello"))
            assert prompt.logprobs is not None
            assert [entry.logprob for entry in prompt.logprobs] == [None, -1.0, -1.0, -1.0, -1.0]
            assert all(not delta.prompt and delta.logprobs for delta in rest)
            assert sum(len(delta.logprobs or ()) for delta in rest) == 2
        assert events[-1] == Usage(5, 4)


async def test_scoring_alone_generates_nothing(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:
        events = await ask(
            engine, asked("hello", echo=True, logprobs=0, prompt_logprobs=0, max_tokens=0)
        )
        assert texts(events) == "hello"
        assert events[-2:] == [Finish(0, FinishReason.LENGTH), Usage(5, 0)]


async def test_cached_tokens_are_the_tenants_own(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:

        async def cached(**changes: Any) -> int:
            events = await ask(engine, asked(LONG, **changes))
            assert isinstance(events[0], Start)
            assert isinstance(events[-1], Usage)
            assert events[0].cached_tokens == events[-1].cached_tokens
            assert texts(events) == text_of(LONG, 8)
            return events[-1].cached_tokens

        hit = (len(LONG) - 1) // 16 * 16
        assert await cached(tenant="a") == 0
        assert await cached(tenant="a") == hit
        assert await cached(tenant="b") == 0
        assert await cached(tenant="a", cache_salt="x") == 0
        assert await cached(tenant="a", cache_salt="x") == hit
        assert await cached(tenant="a", cache_salt="") == 0


class TestRefusals:
    async def test_context(self, hash_builder: str) -> None:
        async with backend(hash_builder, max_context=128) as engine:
            for length in (128, 200):
                with pytest.raises(ContextLengthExceeded, match="128") as refusal:
                    await ask(engine, asked("x" * length, max_tokens=1))
                assert str(length) in refusal.value.message
            events = await ask(engine, asked("x" * 127, max_tokens=1))
            assert events[-1] == Usage(127, 1)
            events = await ask(engine, asked("x" * 120, max_tokens=20))
            assert events[-1] == Usage(120, 8, cached_tokens=112)
            await at_rest(engine)

    @pytest.mark.parametrize("prompt", [(), (5, 999_999), (-1,)])
    async def test_prompt(self, hash_builder: str, prompt: tuple[int, ...]) -> None:
        async with backend(hash_builder) as engine:
            with pytest.raises(InvalidRequest):
                await ask(engine, asked(prompt))
            await ask(engine, asked())

    async def test_before_the_engine_is_ready(self, hash_builder: str) -> None:
        engine = EngineBackend(
            EngineConfig(model_path="hash", model_name="served"), builder=hash_builder
        )
        assert engine.models == ()
        assert engine.codec is None
        with pytest.raises(BackendUnavailable):
            await ask(engine, asked())
        await engine.close(0.0)
        with pytest.raises(ShuttingDown):
            await ask(engine, asked())


@pytest.mark.parametrize("token", [POISON, BAD_SCORES])
async def test_a_request_that_fails_is_alone(hash_builder: str, token: int) -> None:
    async with backend(hash_builder) as engine:
        bad = asked((65, token), max_tokens=50, n=2)
        neighbours = [ask(engine, asked(f"n{i}", max_tokens=50)) for i in range(4)]
        broken, *answers = await asyncio.gather(
            ask(engine, bad), *neighbours, return_exceptions=True
        )
        assert isinstance(broken, BackendFailed)
        for index, events in enumerate(answers):
            assert isinstance(events, list)
            assert texts(events) == text_of(f"n{index}", 50)
        assert engine.health().state is State.READY
        await at_rest(engine)


class TestCancel:
    async def test_closing_a_running_stream(self, hash_builder: str) -> None:
        async with backend(hash_builder) as engine:
            stream = engine.generate(asked(LONG, max_tokens=1900, n=2))
            async with asyncio.timeout(LIMIT_S), aclosing(stream):
                async for event in stream:
                    if isinstance(event, Delta):
                        break
            assert engine.client.open_sequences == 0
            await at_rest(engine)

    async def test_cancelling_the_reader(self, hash_builder: str) -> None:
        async with backend(hash_builder) as engine:
            tasks = [
                asyncio.create_task(ask(engine, asked(LONG, max_tokens=1900))) for _ in range(20)
            ]
            await until(lambda: engine.load().running == 20)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert engine.client.open_sequences == 0
            await at_rest(engine)

    async def test_a_queued_one_never_runs(self, hash_builder: str) -> None:
        async with backend(hash_builder, max_running=1) as engine:
            running = asyncio.create_task(ask(engine, asked("A", max_tokens=300)))
            await until(lambda: engine.load().running == 1)
            queued = asyncio.create_task(ask(engine, asked(LONG, max_tokens=1900)))
            await until(lambda: engine.load().waiting == 1)
            queued.cancel()
            await asyncio.gather(queued, return_exceptions=True)
            assert texts(await running) == text_of("A", 300)
            assert engine.client.stats.prefix_queries_total == 1
            await at_rest(engine)


async def test_a_crash_is_an_error_after_what_was_said(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:
        got: list[Event] = []

        async def break_while_reading() -> None:
            async for event in engine.generate(asked("hello", max_tokens=1900)):
                got.append(event)
                if len(got) == 4:
                    engine.client.inject_fault("exit")

        with pytest.raises(BackendFailed):
            await break_while_reading()
        assert isinstance(got[0], Start)
        assert text_of("hello", 1900).startswith(texts(got))
        await until(lambda: engine.health().state is State.READY)
        assert texts(await ask(engine, asked())) == text_of("hello", 8)


async def test_close_waits_for_the_answer(hash_builder: str) -> None:
    async with backend(hash_builder) as engine:
        running = asyncio.create_task(ask(engine, asked("A", max_tokens=300)))
        await until(lambda: engine.load().running == 1)
        await engine.close(LIMIT_S)
        assert texts(await running) == text_of("A", 300)


def test_salts_are_apart() -> None:
    names = ["", "a", "b", "ab", "b" * 300, "\ud800"]
    salts = {
        cache_salt(secret, tenant, salt)
        for secret in (b"1", b"2")
        for tenant in names
        for salt in [None, *names]
    }
    assert len(salts) == 2 * len(names) * (len(names) + 1)


def test_seeds_are_apart_and_in_range() -> None:
    seeds = [choice_seed(seed, choice) for seed in (-1, 0, 1, 11, 2**63) for choice in (0, 1, 11)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
