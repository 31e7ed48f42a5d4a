"""The own engine as `serve` runs it: find the model, fetch it if need be, then start the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.backends.base import Capabilities, Load, ModelCard, StepReport
from headrace.backends.engine import EngineBackend, Timings
from headrace.core.errors import BackendUnavailable
from headrace.core.health import Health, Stage, StageProgress, State
from headrace.engine.client import DEFAULT_BUILDER
from headrace.engine.models import store
from headrace.engine.stages import StageLog
from headrace.engine.wire import EngineConfig, ModelInfo

if TYPE_CHECKING:
    from headrace.config import EngineSettings
    from headrace.core.clock import Clock
    from headrace.core.codec import TextCodec
    from headrace.core.events import Event
    from headrace.core.request import Request
    from headrace.engine.models.store import ModelSource
    from headrace.telemetry import Metrics

__all__ = ["EmbeddedEngine", "ModelNotFetched", "engine_config"]


class ModelNotFetched(BackendUnavailable):
    """The model could not be brought to this machine; the message says why."""


class _Stopped(Exception):
    """The server ends while the model is being fetched."""


def engine_config(settings: EngineSettings, path: Path, name: str) -> EngineConfig:
    """What the engine process is told. Reads the chat template, so it may raise OSError."""
    template = settings.chat_template
    return EngineConfig(
        model_path=str(path),
        model_name=name,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        kernels=settings.kernels,
        kv_bytes=settings.kv_memory,
        block_size=settings.block_size,
        max_running=settings.max_running,
        max_step_tokens=settings.max_step_tokens,
        max_context=settings.max_context,
        prefix_cache=settings.prefix_cache,
        chat_template=None if template is None else template.read_text(encoding="utf-8"),
    )


class EmbeddedEngine:
    """A Backend that is STARTING while its model is fetched, and the engine from then on."""

    capabilities: Capabilities = EngineBackend.capabilities
    name = "engine"

    def __init__(
        self,
        source: ModelSource,
        settings: EngineSettings,
        *,
        clock: Clock,
        metrics: Metrics,
        builder: str = DEFAULT_BUILDER,
    ) -> None:
        self._source = source
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._builder = builder
        self._served_name = settings.served_name or source.served_name
        self._stages = StageLog(clock)
        self._state, self._detail = State.STARTING, "starting"
        self._engine: EngineBackend | None = None
        self._stop = threading.Event()
        self._listeners: list[Callable[[StepReport], None]] = []
        self._targets: tuple[int, int] | None = None

    @property
    def models(self) -> tuple[ModelCard, ...]:
        return () if self._engine is None else self._engine.models

    @property
    def codec(self) -> TextCodec | None:
        return None if self._engine is None else self._engine.codec

    @property
    def info(self) -> ModelInfo | None:
        return None if self._engine is None else self._engine.info

    async def start(self) -> None:
        self._stages.report(Stage.RESOLVE, 1.0, f"{self._source.name} ({self._source.kind})")
        try:
            path = self._source.path or await self._fetch()
        except store.ModelError as error:
            self._state, self._detail = State.FAILED, str(error)
            raise ModelNotFetched(str(error)) from None
        self._stages.finish()
        self._engine = EngineBackend(
            engine_config(self._settings, path, self._served_name),
            timings=Timings(hang_timeout=self._settings.hang_timeout),
            clock=self._clock,
            observer=self._metrics.engine(self._served_name),
            builder=self._builder,
        )
        for listener in self._listeners:
            self._engine.listen(listener)
        if self._targets is not None:
            self._engine.set_targets(max_step_tokens=self._targets[0], max_running=self._targets[1])
        await self._engine.start()

    @property
    def step_limits(self) -> tuple[int, int]:
        return self._settings.max_step_tokens, self._settings.max_running

    @property
    def on_cpu(self) -> bool:
        return self._settings.device != "cuda" if self._engine is None else self._engine.on_cpu

    def listen(self, on_step: Callable[[StepReport], None]) -> None:
        self._listeners.append(on_step)
        if self._engine is not None:
            self._engine.listen(on_step)

    def set_targets(self, *, max_step_tokens: int, max_running: int) -> None:
        self._targets = (max_step_tokens, max_running)
        if self._engine is not None:
            self._engine.set_targets(max_step_tokens=max_step_tokens, max_running=max_running)

    def preempt(self, request_id: str) -> None:
        if self._engine is not None:
            self._engine.preempt(request_id)

    def cached_tokens(self, request: Request) -> int:
        return 0 if self._engine is None else self._engine.cached_tokens(request)

    def generate(self, request: Request) -> AsyncIterator[Event]:
        if self._engine is None:
            raise BackendUnavailable("the model is being fetched; try again shortly")
        return self._engine.generate(request)

    def load(self) -> Load:
        if self._engine is None:
            return Load(0, 0, self._settings.max_running, self._clock.monotonic())
        return self._engine.load()

    def health(self) -> Health:
        """The engine's own stages come after those of fetching the model."""
        fetched = self._stages.snapshot()
        if self._engine is None:
            return Health(self._state, self._detail, fetched)
        health = self._engine.health()
        listening = (StageProgress(Stage.LISTENING, 1.0, 0.0),)
        return replace(
            health,
            progress=(
                *fetched,
                *health.progress,
                *(listening if health.state is State.READY else ()),
            ),
        )

    async def close(self, grace: float) -> None:
        self._stop.set()
        if self._engine is not None:
            await self._engine.close(grace)
        else:
            self._state, self._detail = State.CLOSED, "closed"

    async def _fetch(self) -> Path:
        """In a thread of its own, which must not keep the process from ending."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Path] = loop.create_future()

        def report(fraction: float, words: str) -> None:
            if self._stop.is_set():
                raise _Stopped
            loop.call_soon_threadsafe(self._stages.report, Stage.DOWNLOAD, fraction, words)

        def settle(path: Path | None, error: Exception | None) -> None:
            if found.done():
                return
            if path is not None:
                found.set_result(path)
            else:
                found.set_exception(error or _Stopped())

        def fetch() -> None:
            path: Path | None = None
            failure: Exception | None = None
            try:
                path = store.pull(self._source.name, report)
            except Exception as error:  # noqa: BLE001 - raised again where it is awaited
                failure = error
            if not self._stop.is_set():
                loop.call_soon_threadsafe(settle, path, failure)

        self._stages.report(Stage.DOWNLOAD, 0.0, self._source.name)
        threading.Thread(target=fetch, name="model-fetch", daemon=True).start()
        return await found
