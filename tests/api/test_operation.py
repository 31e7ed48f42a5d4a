"""Models, tokens, probes and the app's own life."""

from __future__ import annotations

import asyncio

import anyio
import httpx2
import pytest

from headrace import __version__
from headrace.api import create_app
from headrace.backends.scripted import ScriptedBackend
from headrace.config import Settings
from headrace.core.clock import SystemClock
from headrace.core.health import Health, Stage, StageProgress, State
from headrace.gateway import Gateway
from headrace.telemetry import Metrics
from support.app import MODEL, refusal_of, site

pytestmark = pytest.mark.anyio


async def test_models() -> None:
    async with site(ScriptedBackend(model="org/name", context_length=64)) as s:
        card = {
            "id": "org/name",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "headrace",
            "max_model_len": 64,
        }
        assert (await s.client.get("/v1/models")).json() == {"object": "list", "data": [card]}
        assert (await s.client.get("/v1/models/org/name")).json() == card
        assert refusal_of(await s.client.get("/v1/models/x"), 404)["code"] == "model_not_found"
        refusal_of(await s.client.get("/v1/models/..%2f..%2fetc"), 404)


async def test_tokens_of_a_prompt() -> None:
    async with site() as s:
        body = {"model": MODEL, "prompt": "hi"}
        response = await s.client.post("/tokenize", json=body)
        assert response.json() == {
            "count": 3,
            "max_model_len": 4096,
            "tokens": [256, 104, 105],
            "token_strs": None,
        }
        bare = {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}
        found = (await s.client.post("/tokenize", json=bare)).json()
        assert (found["tokens"], found["token_strs"]) == ([104, 105], ["h", "i"])


async def test_tokens_of_a_conversation() -> None:
    async with site() as s:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        with_prompt = (await s.client.post("/tokenize", json=body)).json()["tokens"]
        without = await s.client.post("/tokenize", json={**body, "add_generation_prompt": False})
        assert with_prompt[: without.json()["count"]] == without.json()["tokens"]
        await s.chat("hi")
        assert s.backend.counters.requests[0].prompt_token_ids == tuple(with_prompt)
        wrongs: list[dict[str, object]] = [
            {**body, "prompt": "hi"},
            {},
            {"prompt": ["a"]},
            {"messages": []},
        ]
        for wrong in wrongs:
            refusal_of(await s.client.post("/tokenize", json=wrong), 400)
        unknown = {"prompt": "a", "model": "x"}
        refusal_of(await s.client.post("/tokenize", json=unknown), 404)


async def test_text_of_tokens() -> None:
    async with site() as s:
        response = await s.client.post("/detokenize", json={"tokens": [104, 105]})
        assert response.json() == {"prompt": "hi"}
        for tokens in ([260], [-1], "hi", ["a"], None, [2**40]):
            response = await s.client.post("/detokenize", json={"tokens": tokens})
            assert refusal_of(response, 400)["param"] == "tokens"


async def test_readiness_follows_the_backend() -> None:
    async with site(started=False) as s:
        progress = (
            StageProgress(Stage.DOWNLOAD, 1.0, 2.5),
            StageProgress(Stage.LOAD_WEIGHTS, 0.25, 1.0, "layer 3"),
        )
        s.backend.set_health(Health(State.STARTING, "loading", progress))
        response = await s.client.get("/readyz")
        assert response.status_code == 503
        body = response.json()
        assert body["status"] == "starting"
        assert body["stages"][1] == {
            "stage": "load_weights",
            "fraction": 0.25,
            "seconds": 1.0,
            "detail": "layer 3",
        }
        assert (await s.client.get("/health")).status_code == 503
        assert (await s.client.get("/livez")).status_code == 200
        refusal_of(await s.chat(), 503)
        refusal_of(await s.chat(stream=True), 503)
        await s.gateway.start()
        for path in ("/readyz", "/health", "/livez"):
            assert (await s.client.get(path)).status_code == 200
            assert (await s.client.head(path)).status_code == 200
        for state in (State.RESTARTING, State.FAILED):
            s.backend.set_health(Health(state))
            assert (await s.client.get("/health")).status_code == 503


async def test_draining_ends_readiness_at_once_and_streams_later() -> None:
    paused, go = asyncio.Event(), asyncio.Event()

    async def pace(_request: object, step: int) -> None:
        if step == 2:
            paused.set()
            await go.wait()

    async with site(ScriptedBackend(pace=pace)) as s:
        running = asyncio.create_task(s.chat("one two three", stream=True))
        await paused.wait()
        drain = asyncio.create_task(s.gateway.drain(60))
        await anyio.wait_all_tasks_blocked()
        ready = await s.client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert (await s.client.get("/livez")).status_code == 200
        refused = await s.chat("new")
        assert refusal_of(refused, 503)["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        go.set()
        assert (await running).text.endswith("data: [DONE]\n\n")
        await drain


async def test_a_drain_that_runs_out_ends_streams_with_an_error() -> None:
    paused = asyncio.Event()

    async def pace(_request: object, step: int) -> None:
        if step == 2:
            paused.set()
            await asyncio.Event().wait()

    async with site(ScriptedBackend(pace=pace)) as s:
        running = asyncio.create_task(s.chat("one two three", stream=True))
        await paused.wait()
        await s.gateway.drain(0.01)
        body = (await running).text
        assert '"shutting_down"' in body
        assert "[DONE]" not in body
        assert s.backend.counters.cancelled == 1


async def test_the_queue_is_bounded_and_refuses_before_the_stream_starts() -> None:
    go = asyncio.Event()

    async def pace(_request: object, step: int) -> None:
        if step == 0:
            await go.wait()

    backend = ScriptedBackend(pace=pace, max_running=2)
    async with site(backend, limits={"max_queue": 4}) as s:
        calls = [asyncio.create_task(s.chat("x", stream=i % 2 > 0)) for i in range(50)]
        await anyio.wait_all_tasks_blocked()
        refused = [task.result() for task in calls if task.done()]
        assert len(refused) == 44
        for response in refused:
            assert refusal_of(response, 503)["code"] == "overloaded"
            assert "retry-after" in response.headers
        waiting = [task for task in calls if not task.done()]
        waiting.pop().cancel()
        await anyio.wait_all_tasks_blocked()
        again = asyncio.create_task(s.chat("x"))
        await anyio.wait_all_tasks_blocked()
        assert not again.done()
        refusal_of(await s.chat("x", n=4), 503)
        go.set()
        for task in [*waiting, again]:
            assert (await task).status_code == 200


async def test_metrics_have_a_type_that_prometheus_knows() -> None:
    async with site() as s:
        response = await s.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "vllm:num_requests_running" in response.text
        assert "headrace_http_requests_in_flight 1.0" in response.text


async def test_docs_show_what_bodies_are_made_of() -> None:
    async with site() as s:
        spec = (await s.client.get("/openapi.json")).json()
        assert "$defs" not in str(spec)
        content = spec["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]
        assert set(schema["required"]) == {"model", "messages"}
        assert "description" in schema["properties"]["min_tokens"]
        roles = schema["properties"]["messages"]["items"]["properties"]["role"]["enum"]
        assert "assistant" in roles
        assert (await s.client.get("/docs")).status_code == 200
        operations = [
            operation["operationId"]
            for path in spec["paths"].values()
            for operation in path.values()
        ]
        assert len(operations) == len(set(operations))
        assert {"create_chat_completion", "cache_stats"} <= set(operations)


async def test_the_app_serves_while_the_gateway_starts() -> None:
    backend = ScriptedBackend()
    go, closed = asyncio.Event(), asyncio.Event()

    class Slow(Gateway):
        async def start(self) -> None:
            await go.wait()
            await super().start()

        async def close(self) -> None:
            closed.set()
            await super().close()

    settings = Settings()
    gateway = Slow([backend], settings, clock=SystemClock(), metrics=Metrics())
    app = create_app(gateway, settings)
    assert app.version == __version__
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        go.set()
        await anyio.wait_all_tasks_blocked()
        assert (await client.get("/readyz")).status_code == 200
    assert closed.is_set()


async def test_a_start_that_fails_leaves_the_probes(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedBackend):
        async def start(self) -> None:
            self.set_health(Health(State.FAILED, "no model"))
            raise RuntimeError("no model")

    settings = Settings()
    gateway = Gateway([Broken()], settings, clock=SystemClock(), metrics=Metrics())
    app = create_app(gateway, settings)
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        await anyio.wait_all_tasks_blocked()
        response = await client.get("/readyz")
        assert (response.status_code, response.json()["detail"]) == (503, "no model")
        assert "could not start" in caplog.text
