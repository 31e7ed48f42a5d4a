"""The context limit, to the token."""

from __future__ import annotations

import pytest

from headrace.core.clock import VirtualClock
from headrace.core.errors import ContextLengthExceeded
from headrace.core.request import Endpoint, Message
from headrace.gateway import Gateway
from support.backend import FakeBackend, request
from support.gateway import Client, assert_nothing_left, outcomes, small_gateway

pytestmark = pytest.mark.anyio

LIMIT = 128


async def ask(gateway: Gateway, prompt: int, max_tokens: int | None, endpoint: Endpoint) -> Client:
    sampling = {"max_tokens": max_tokens}
    if endpoint is Endpoint.CHAT:
        frame = len("user:;assistant:") + 1
        message = Message("user", "a" * (prompt - frame))
        client = Client(gateway, request(messages=(message,), sampling=sampling))
    else:
        client = Client(gateway, request((7,) * prompt, sampling=sampling))
    await client.done()
    return client


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sent"),
    [
        (127, 1, 1),
        (120, 8, 8),
        (120, None, 8),
        (127, None, 1),
        (50, 0, 0),
        (200, None, None),
        (200, 1, None),
        (128, 1, None),
        (128, None, None),
        (120, 20, None),
        (120, 9, None),
    ],
)
async def test_a_request_fits_or_is_refused_with_the_counts(  # noqa: PLR0917 - a table
    gateway: Gateway,
    backend: FakeBackend,
    endpoint: Endpoint,
    prompt: int,
    max_tokens: int | None,
    sent: int | None,
) -> None:
    backend.auto = True
    client = await ask(gateway, prompt, max_tokens, endpoint)
    if sent is not None:
        assert client.error is None
        (call,) = backend.calls
        assert call.prompt_tokens == prompt
        assert call.request.sampling.max_tokens == sent
    else:
        error = client.error
        assert isinstance(error, ContextLengthExceeded)
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert error.param == ("messages" if endpoint is Endpoint.CHAT else "prompt")
        assert str(LIMIT) in error.message
        assert str(prompt) in error.message
        if max_tokens is not None and prompt < LIMIT:
            assert str(max_tokens) in error.message
            assert str(prompt + max_tokens) in error.message
        assert backend.calls == []
        assert client.events == []
        assert outcomes(gateway) == {"refused_context_length": 1}
    assert_nothing_left(gateway, backend)


@pytest.mark.parametrize(("blocks", "limit"), [(0, 128), (4, 64), (100, 128)])
async def test_the_limit_is_the_smaller_of_context_and_kv_cache(blocks: int, limit: int) -> None:
    backend = FakeBackend()
    backend.auto, backend.kv_blocks = True, blocks
    gateway = small_gateway(backend, VirtualClock())
    fits = await ask(gateway, limit - 1, 1, Endpoint.COMPLETION)
    too_long = await ask(gateway, limit, 1, Endpoint.COMPLETION)
    assert fits.error is None
    assert isinstance(too_long.error, ContextLengthExceeded)
    assert f"limit is {limit} " in too_long.error.message
    await gateway.close()


async def test_a_minimum_that_cannot_fit_is_refused(gateway: Gateway) -> None:
    sampling = {"max_tokens": None, "min_tokens": 9}
    client = Client(gateway, request((7,) * 120, sampling=sampling))
    await client.done()
    assert isinstance(client.error, ContextLengthExceeded)
    assert "min_tokens" in client.error.message
