"""Many clients at once, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator

import aiohttp
import pytest

from support.server import Server

pytestmark = [pytest.mark.model, pytest.mark.anyio, pytest.mark.timeout(300)]

CLIENTS = 64
TOPICS = ("rivers", "bread", "chess", "Saturn", "the sea", "maps", "glass", "bees")
OPENINGS = (
    "Tell me about {}.",
    "Write one line on {}.",
    "Why do people like {}?",
    "List three facts on {}.",
    "Explain {} to a child in a few simple words, with an example that is easy to follow.",
    "What is the history of {}?",
    "def {}():",
    "{}! {}! {}!",
)
PROMPTS = [opening.replace("{}", topic) for opening in OPENINGS for topic in TOPICS]


@pytest.fixture
async def session(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as opened:
        yield opened


async def stream(session: aiohttp.ClientSession, prompt: str, tokens: int) -> str:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
    }
    text = ""
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
    return text


async def test_sixty_four_streams_equal_their_solo_runs(
    server: Server, session: aiohttp.ClientSession
) -> None:
    together = await asyncio.gather(*(stream(session, prompt, 16) for prompt in PROMPTS))
    alone = [await stream(session, prompt, 16) for prompt in PROMPTS]
    assert len(PROMPTS) == CLIENTS
    assert together == alone
    assert len(set(alone)) > CLIENTS / 2, "the answers must tell the prompts apart"
    server.settle()


async def test_five_hundred_clients_leave_at_random_and_leave_nothing(
    server: Server, session: aiohttp.ClientSession
) -> None:
    rng = random.Random(500)
    outcomes = {"left": 0, "answered": 0}

    async def visit(patience: float, *, streaming: bool) -> None:
        body = {
            "model": "smollm2-135m-instruct",
            "prompt": f"Visitor {rng.random()} says",
            "max_tokens": rng.randrange(1, 40),
            "n": rng.choice((1, 1, 1, 2)),
            "ignore_eos": True,
            "stream": streaming,
        }
        try:
            async with asyncio.timeout(patience), session.post("/v1/completions", json=body) as r:
                assert r.status in {200, 503}, await r.text()
                await r.read()
                outcomes["answered"] += 1
        except TimeoutError:
            outcomes["left"] += 1

    await asyncio.gather(*(visit(rng.uniform(0, 6), streaming=i % 3 > 0) for i in range(500)))
    assert outcomes["left"] > 100
    server.settle()
    assert await stream(session, "Say hello.", 4), "the server still answers"
    server.settle()
