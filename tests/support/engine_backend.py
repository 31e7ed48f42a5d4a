"""Requests to an EngineBackend over a real engine process whose model is a hash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from headrace.backends.base import Backend
from headrace.backends.engine import EngineBackend, Timings
from headrace.core.events import Delta, Event
from headrace.core.request import Endpoint, Request, SamplingParams
from headrace.engine.wire import EngineConfig
from support.hash_engine import answer

LIMIT_S = 20.0
LONG = "a prompt of several blocks, the same for everyone who asks, so that it can be shared"


def asked(prompt: str | tuple[int, ...] = "hello", **changes: Any) -> Request:
    """A greedy completion. Names of sampling parameters go to the sampling parameters."""
    sampling = {
        name: changes.pop(name) for name in SamplingParams.__struct_fields__ if name in changes
    }
    ids = tuple(prompt.encode()) if isinstance(prompt, str) else prompt
    return Request(
        endpoint=Endpoint.COMPLETION,
        model="served",
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
        arrival=0.0,
        **{"id": "r", "prompt": prompt, "prompt_token_ids": ids, **changes},
    )


def text_of(prompt: str, tokens: int) -> str:
    return bytes(answer(list(prompt.encode()), tokens)).decode()


@asynccontextmanager
async def backend(builder: str, **config: Any) -> AsyncIterator[EngineBackend]:
    engine = EngineBackend(
        EngineConfig(
            model_path="hash",
            model_name="served",
            **{"fault_hooks": True, "max_context": 2048, **config},
        ),
        timings=Timings(first_backoff=0.05),
        builder=builder,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            await engine.start()
        yield engine
    finally:
        await engine.close(0.0)


async def ask(engine: Backend, request: Request) -> list[Event]:
    async with asyncio.timeout(LIMIT_S):
        return [event async for event in engine.generate(request)]


def texts(events: list[Event], index: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.index == index)


async def at_rest(engine: EngineBackend) -> None:
    await until(lambda: (engine.load().running, engine.load().kv_blocks_used) == (0, 0))


async def until(holds: Callable[[], bool]) -> None:
    """Gives the loop its turns until it holds."""
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0)
