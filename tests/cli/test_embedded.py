"""The engine as `serve` runs it: fetched first, then a real process whose model is a hash."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import support
from headrace.backends.base import Backend
from headrace.cli.embedded import EmbeddedEngine, ModelNotFetched, engine_config
from headrace.config import EngineSettings
from headrace.core.clock import SystemClock
from headrace.core.errors import BackendUnavailable
from headrace.core.events import Usage
from headrace.core.health import Stage, State
from headrace.engine.models import store
from headrace.engine.models.store import ModelError, ModelSource, SourceKind
from headrace.telemetry import Metrics
from support.backend import request

pytestmark = pytest.mark.anyio

HERE = ModelSource("hash", SourceKind.GGUF, "hash", Path("hash"))
ELSEWHERE = ModelSource("org/hash", SourceKind.HUB, "org/hash", None)


@pytest.fixture
def embed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EmbeddedEngine]:
    monkeypatch.setenv("PYTHONPATH", str(Path(support.__file__).parent.parent))

    def embedding(source: ModelSource, settings: EngineSettings | None = None) -> EmbeddedEngine:
        return EmbeddedEngine(
            source,
            settings or EngineSettings(),
            clock=SystemClock(),
            metrics=Metrics(),
            builder="support.hash_engine:build",
        )

    return embedding


def test_it_is_a_backend(embed: Callable[..., EmbeddedEngine]) -> None:
    backend: Backend = embed(HERE)
    assert backend.models == ()
    assert backend.codec is None
    assert backend.health().state is State.STARTING
    with pytest.raises(BackendUnavailable):
        backend.generate(request())


async def test_a_model_on_this_machine_is_served(embed: Callable[..., EmbeddedEngine]) -> None:
    engine = embed(HERE, EngineSettings(served_name="short", max_running=3))
    try:
        await engine.start()
        assert [card.id for card in engine.models] == ["short"]
        assert engine.info is not None
        assert engine.load().max_running == 3
        stages = [entry.stage for entry in engine.health().progress]
        assert stages == [
            Stage.RESOLVE,
            Stage.LOAD_WEIGHTS,
            Stage.RESERVE_KV,
            Stage.WARM_UP,
            Stage.LISTENING,
        ]
        events = [event async for event in engine.generate(request(prompt=(65, 66)))]
        assert isinstance(events[-1], Usage)
    finally:
        await engine.close(0.0)
    assert engine.health().state is State.CLOSED


async def test_a_model_elsewhere_is_fetched_with_progress(
    embed: Callable[..., EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    half_way, go_on = threading.Event(), threading.Event()

    def pull(name: str, progress: store.Progress) -> Path:
        assert name == "org/hash"
        progress(0.5, "93 MB")
        half_way.set()
        assert go_on.wait(20)
        return Path("hash")

    monkeypatch.setattr(store, "pull", pull)
    engine = embed(ELSEWHERE)
    starting = asyncio.create_task(engine.start())
    try:
        assert await asyncio.to_thread(half_way.wait, 20)
        health = engine.health()
        assert health.state is State.STARTING
        assert (health.progress[-1].stage, health.progress[-1].fraction) == (Stage.DOWNLOAD, 0.5)
        assert health.progress[-1].detail == "93 MB"
        go_on.set()
        await starting
        downloaded = engine.health().progress[1]
        assert (downloaded.stage, downloaded.fraction) == (Stage.DOWNLOAD, 1.0)
        assert [card.id for card in engine.models] == ["org/hash"]
    finally:
        go_on.set()
        await engine.close(0.0)


async def test_a_model_that_cannot_be_fetched_is_told(
    embed: Callable[..., EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pull(_name: str, _progress: store.Progress) -> Path:
        raise ModelError("the hub cannot be reached")

    monkeypatch.setattr(store, "pull", pull)
    engine = embed(ELSEWHERE)
    with pytest.raises(ModelNotFetched, match="the hub cannot be reached"):
        await engine.start()
    health = engine.health()
    assert (health.state, health.detail) == (State.FAILED, "the hub cannot be reached")


async def test_closing_stops_the_fetching(
    embed: Callable[..., EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, stopped = threading.Event(), threading.Event()

    def pull(_name: str, progress: store.Progress) -> Path:
        started.set()
        try:
            while True:
                progress(0.1, "")
        finally:
            stopped.set()

    monkeypatch.setattr(store, "pull", pull)
    engine = embed(ELSEWHERE)
    starting = asyncio.create_task(engine.start())
    assert await asyncio.to_thread(started.wait, 20)
    starting.cancel()
    await asyncio.wait({starting})
    await engine.close(0.0)
    assert await asyncio.to_thread(stopped.wait, 20)
    assert engine.health().state is State.CLOSED


def test_every_engine_setting_reaches_the_engine(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }} é", encoding="utf-8")
    settings = EngineSettings(
        dtype="fp32",
        device="cpu",
        threads=3,
        kv_memory=4096,
        block_size=8,
        max_running=5,
        max_step_tokens=6,
        max_context=7,
        prefix_cache=False,
        chat_template=template,
    )
    config = engine_config(settings, Path("/m.gguf"), "name")
    assert (config.model_path, config.model_name, config.dtype) == ("/m.gguf", "name", "fp32")
    assert (config.device, config.threads, config.kv_bytes) == ("cpu", 3, 4096)
    assert (config.block_size, config.max_running, config.max_step_tokens) == (8, 5, 6)
    assert (config.max_context, config.prefix_cache) == (7, False)
    assert config.chat_template == "{{ messages }} é"
    assert config.fault_hooks is False
