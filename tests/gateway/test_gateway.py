"""One request from end to end, and what a backend may do to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.backends.base import Capabilities
from headrace.core.clock import VirtualClock
from headrace.core.errors import (
    BackendFailed,
    BackendUnavailable,
    InvalidRequest,
    ModelNotFound,
    UnsupportedField,
)
from headrace.core.events import Delta, Finish, Start, Timings, Usage
from headrace.core.health import State
from headrace.core.request import Endpoint, Message, PriorityClass
from headrace.gateway import DEFAULT_TENANT, Gateway, Tenant
from support.backend import CharacterCodec, FakeBackend, request
from support.gateway import Client, assert_nothing_left, outcomes, quiet, small_gateway

pytestmark = pytest.mark.anyio


async def test_an_answer_passes_through_event_by_event(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.auto = True
    client = Client(gateway, request("abc"))
    await client.done()
    assert [type(event) for event in client.events] == [Start, Delta, Finish, Usage]
    sent = backend.calls[0].request
    assert sent.prompt_token_ids == (1, 97, 98, 99)
    assert sent.tenant == "default"
    assert outcomes(gateway) == {"stop": 1}
    assert_nothing_left(gateway, backend)


async def test_the_tenant_of_the_key_replaces_what_the_request_says(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.auto = True
    asked = request(tenant="somebody-else")
    async for _ in gateway.generate(asked, Tenant("key-1")):
        pass
    assert backend.calls[0].request.tenant == "key-1"


async def test_a_conversation_is_rendered_by_the_template(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.auto = True
    await Client(gateway, request(messages=(Message("user", "hi"),))).done()
    ids = backend.calls[0].request.prompt_token_ids
    assert ids is not None
    assert "".join(map(chr, ids[1:])) == "user:hi;assistant:"


async def test_long_text_is_tokenised_off_the_event_loop_and_short_text_on_it(
    backend: FakeBackend, clock: VirtualClock
) -> None:
    backend.auto = True
    backend.models = (replace(backend.models[0], context_length=10_000),)
    gateway = small_gateway(backend, clock)
    await Client(gateway, request("a" * 5000)).done()
    await Client(gateway, request("a")).done()
    assert backend.codec is not None
    threads = backend.codec.threads
    assert threads[0].startswith("headrace-tokenise")
    assert threads[1] == "MainThread"
    await gateway.close()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"echo": True}, "echo"),
        ({"n": 2}, "n"),
        ({"sampling": {"logprobs": 0}}, "logprobs"),
        ({"sampling": {"prompt_logprobs": 1}}, "logprobs"),
        ({"sampling": {"top_k": 1}}, "top_k"),
        ({"sampling": {"min_p": 0.1}}, "min_p"),
        ({"sampling": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"sampling": {"logit_bias": ((5, 1.0),)}}, "logit_bias"),
        ({"sampling": {"min_tokens": 1}}, "min_tokens"),
        ({"sampling": {"ignore_eos": True}}, "ignore_eos"),
        ({"sampling": {"stop_token_ids": (5,)}}, "stop_token_ids"),
        ({"sampling": {"include_stop_str_in_output": True}}, "include_stop_str_in_output"),
        ({"extra_fields": {"tools": [{}]}}, "tools"),
        ({"extra_fields": {"response_format": {"type": "json_object"}}}, "response_format"),
    ],
)
async def test_what_the_backend_lacks_is_refused_by_name(
    gateway: Gateway, backend: FakeBackend, asked: dict[str, Any], field: str
) -> None:
    backend.capabilities = Capabilities(frozenset(Endpoint), frozenset())
    backend.auto = True
    refused = Client(gateway, request(**asked))
    plain = Client(gateway, request())
    await refused.done()
    await plain.done()
    assert isinstance(refused.error, UnsupportedField)
    assert refused.error.param == field
    assert plain.error is None

    backend.capabilities = Capabilities(frozenset(Endpoint), frozenset({field}))
    honoured = Client(gateway, request(**asked))
    await honoured.done()
    assert honoured.error is None


async def test_an_endpoint_the_backend_lacks_is_refused(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.capabilities = Capabilities(frozenset({Endpoint.CHAT}), frozenset())
    client = Client(gateway, request())
    await client.done()
    assert isinstance(client.error, InvalidRequest)
    assert "/v1/completions" in client.error.message


async def test_chat_without_a_template_is_refused(gateway: Gateway, backend: FakeBackend) -> None:
    assert backend.codec is not None
    backend.codec.has_chat_template = False
    client = Client(gateway, request(messages=(Message("user", "hi"),)))
    await client.done()
    assert isinstance(client.error, InvalidRequest)
    assert client.error.param == "messages"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": (3, 256)}, "prompt"),
        ({"prompt": (3, -1)}, "prompt"),
        ({"prompt": ()}, "prompt"),
        ({"sampling": {"logit_bias": ((999_999_999, 5.0),)}}, "logit_bias"),
        ({"sampling": {"logit_bias": ((-1, 5.0),)}}, "logit_bias"),
        ({"sampling": {"stop_token_ids": (256,)}}, "stop_token_ids"),
    ],
)
async def test_token_ids_outside_the_vocabulary_are_refused(
    gateway: Gateway, backend: FakeBackend, asked: dict[str, Any], param: str
) -> None:
    client = Client(gateway, request(**asked))
    await client.done()
    assert isinstance(client.error, InvalidRequest)
    assert client.error.status == 400
    assert client.error.param == param
    assert backend.calls == []
    assert_nothing_left(gateway, backend)


async def test_an_empty_prompt_is_the_beginning_token_or_refused(clock: VirtualClock) -> None:
    with_bos = FakeBackend()
    with_bos.auto = True
    gateway = small_gateway(with_bos, clock)
    await Client(gateway, request("")).done()
    assert with_bos.calls[0].request.prompt_token_ids == (1,)
    await gateway.close()

    without = FakeBackend(codec=CharacterCodec(bos=None))
    gateway = small_gateway(without, clock)
    client = Client(gateway, request(""))
    await client.done()
    assert isinstance(client.error, InvalidRequest)
    assert client.error.param == "prompt"
    await gateway.close()


async def test_without_a_tokenizer_the_prompt_goes_on_as_it_is(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.codec = None
    backend.auto = True
    asked = request("a" * 1000)
    client = Client(gateway, asked)
    await client.done()
    assert client.error is None
    assert backend.calls[0].request == replace(asked, priority=PriorityClass.STANDARD)
    with pytest.raises(InvalidRequest):
        await gateway.detokenize(DEFAULT_TENANT, "fake", [1])


@pytest.mark.parametrize("state", [s for s in State if s is not State.READY])
async def test_a_backend_that_is_not_ready_refuses_at_once(
    gateway: Gateway, backend: FakeBackend, state: State
) -> None:
    backend.state = state
    client = Client(gateway, request())
    await client.done()
    assert isinstance(client.error, BackendUnavailable)
    assert client.error.retry_after_s
    assert outcomes(gateway) == {"refused_unavailable": 1}
    assert_nothing_left(gateway, backend)


async def test_who_waits_when_the_backend_breaks_is_refused_and_not_sent_there(
    gateway: Gateway, backend: FakeBackend
) -> None:
    clients = [Client(gateway, request()) for _ in range(5)]
    await quiet()
    assert len(backend.calls) == 4
    backend.state = State.RESTARTING
    for call in backend.open:
        call.say(BackendFailed("broken"))
    for client in clients:
        await client.done()
    assert isinstance(clients[4].error, BackendUnavailable)
    assert len(backend.calls) == 4
    assert_nothing_left(gateway, backend)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(lambda call: call.say(RuntimeError("the words of a prompt")), id="exception"),
        pytest.param(lambda call: call.say(StopAsyncIteration()), id="end"),
    ],
)
@pytest.mark.parametrize("started", [False, True])
async def test_a_broken_stream_is_a_clean_error_and_never_a_normal_end(
    gateway: Gateway,
    backend: FakeBackend,
    caplog: pytest.LogCaptureFixture,
    broken: Callable[[object], None],
    started: bool,
) -> None:
    client = Client(gateway, request())
    await quiet()
    if started:
        backend.calls[0].start()
        backend.calls[0].token()
    with caplog.at_level(logging.ERROR, "headrace"):
        broken(backend.calls[0])
        await client.done()
    assert isinstance(client.error, BackendFailed)
    assert len(client.events) == 2 * started
    assert "RuntimeError" not in client.error.message
    assert "prompt" not in caplog.text
    assert outcomes(gateway) == {"failed": 1}
    assert_nothing_left(gateway, backend)


async def test_the_error_of_a_backend_reaches_the_caller_as_it_is(
    gateway: Gateway, backend: FakeBackend
) -> None:
    client = Client(gateway, request())
    await quiet()
    raised = BackendUnavailable("gone for now", retry_after_s=3)
    backend.calls[0].say(raised)
    await client.done()
    assert client.error is raised


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "..%2f",
        "/abs",
        "http://127.0.0.1/x",
        "org/unknown",
        "",
        "a\x00b",
        "a\nb",
        "\ud800",
        "\u202eevil",
        "x" * 10_000,
    ],
)
async def test_an_unknown_model_is_named_safely_and_leaves_no_trace(
    gateway: Gateway, backend: FakeBackend, name: str
) -> None:
    before = set(series(gateway))
    client = Client(gateway, request(model=name))
    await client.done()
    error = client.error
    assert isinstance(error, ModelNotFound)
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert len(error.message) < 200
    assert error.message.isprintable()
    error.message.encode()
    with pytest.raises(ModelNotFound):
        gateway.model(DEFAULT_TENANT, name)
    assert outcomes(gateway) == {"refused_model_not_found": 1}
    assert set(series(gateway)) == before
    assert backend.calls == []


def series(gateway: Gateway) -> list[str]:
    return [line.rpartition(" ")[0] for line in gateway.exposition().decode().splitlines()]


async def test_models_are_listed_once_and_the_ready_backend_serves(clock: VirtualClock) -> None:
    down, up = FakeBackend(), FakeBackend()
    down.state, up.auto = State.RESTARTING, True
    gateway = small_gateway([down, up], clock)
    assert [card.id for card in gateway.models(DEFAULT_TENANT)] == ["fake"]
    assert gateway.model(DEFAULT_TENANT, "fake").context_length == 128
    client = Client(gateway, request())
    await client.done()
    assert client.error is None
    assert (len(down.calls), len(up.calls)) == (0, 1)
    assert gateway.health().state is State.READY
    up.state = State.FAILED
    assert gateway.health().state is State.RESTARTING
    await gateway.close()


async def test_before_models_are_known_the_answer_is_later_and_not_never(
    gateway: Gateway, backend: FakeBackend
) -> None:
    backend.models, backend.state = (), State.STARTING
    client = Client(gateway, request())
    await client.done()
    assert isinstance(client.error, BackendUnavailable)
    assert client.error.retry_after_s
    assert gateway.health().state is State.STARTING
    assert gateway.exposition()
    await gateway.start()
    assert gateway.health().state is State.READY


async def test_tokenize_and_back(gateway: Gateway) -> None:
    async def tokenize(content: str | list[Message], *, special: bool = True) -> list[int]:
        return await gateway.tokenize(
            DEFAULT_TENANT,
            "fake",
            content,
            add_special_tokens=special,
            add_generation_prompt=False,
        )

    assert await tokenize("ab") == [1, 97, 98]
    assert await tokenize("ab", special=False) == [97, 98]
    assert len(await tokenize("a" * 1000)) == 1001
    chat = await tokenize([Message("user", "hi")])
    assert await gateway.detokenize(DEFAULT_TENANT, "fake", chat[1:]) == "user:hi;"
    assert await gateway.token_texts(DEFAULT_TENANT, "fake", [97, 98]) == ["a", "b"]
    for bad in ([256], [-1]):
        with pytest.raises(InvalidRequest):
            await gateway.detokenize(DEFAULT_TENANT, "fake", bad)
        with pytest.raises(InvalidRequest):
            await gateway.token_texts(DEFAULT_TENANT, "fake", bad)
    with pytest.raises(ModelNotFound):
        await gateway.detokenize(DEFAULT_TENANT, "nope", [1])


async def test_the_answer_tells_where_its_time_went(
    backend: FakeBackend, clock: VirtualClock
) -> None:
    gateway = small_gateway(backend, clock)
    client = Client(gateway, request("hello", arrival=clock.monotonic()))
    await quiet()
    (call,) = backend.calls
    clock.advance(2.0)
    call.start()
    await quiet()
    clock.advance(3.0)
    call.token()
    await quiet()
    clock.advance(4.0)
    call.token()
    call.finish()
    await client.done()
    start, end = client.events[0], client.events[-1]
    assert isinstance(start, Start)
    assert isinstance(end, Usage)
    assert start.queue_s == 0.0
    assert end.timings == Timings(queue_s=0.0, prefill_s=5.0, decode_s=4.0, total_s=9.0)
    await gateway.close()
