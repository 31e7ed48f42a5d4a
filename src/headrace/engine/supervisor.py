"""Keeps one engine process alive: spawn, watch, kill, restart, and say truthfully how it stands."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import BackendUnavailable, HeadraceError, ShuttingDown
from headrace.core.health import Health, State
from headrace.engine.child import Child
from headrace.engine.liveness import Liveness
from headrace.engine.stages import StageLog
from headrace.engine.transport import FrontChannel
from headrace.engine.wire import (
    EngineConfig,
    EngineMessage,
    Failed,
    ModelInfo,
    Progress,
    Ready,
    Step,
)

__all__ = ["EngineUser", "Supervisor", "Timings"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of patience. The back-off doubles from `first_backoff` to `max_backoff`, and starts
    over once an engine has been ready for as long as `max_backoff`."""

    hang_timeout: float = 10.0
    load_timeout: float = 300.0
    first_backoff: float = 0.5
    max_backoff: float = 30.0
    stop_grace: float = 1.0


class EngineUser(Protocol):
    """Who uses the engine process. Called on the event loop."""

    def on_ready(self, info: ModelInfo) -> None: ...

    def on_step(self, step: Step) -> None: ...

    def on_down(self, reason: str) -> None:
        """The engine is lost with all it was doing; called before the process is killed."""
        ...


@dataclass(frozen=True, slots=True)
class _Ending:
    """Why an engine process is over; no reason where only its exit status can tell."""

    reason: str = ""
    fatal: bool = False
    hung: bool = False


class Supervisor:
    """Everything here runs on the event loop that called `start`."""

    def __init__(
        self,
        config: EngineConfig,
        user: EngineUser,
        *,
        builder: str,
        timings: Timings,
        clock: Clock,
    ) -> None:
        self._config = msgspec.structs.replace(
            config, alive_interval=min(config.alive_interval, timings.hang_timeout / 4)
        )
        self._user = user
        self._builder = builder
        self._timings = timings
        self._clock = clock
        self.state = State.STARTING
        self._detail = "starting"
        self._stages = StageLog(clock)
        self._liveness = self._new_liveness()
        self._child: Child | None = None
        self._ending: asyncio.Future[_Ending] | None = None
        self._task: asyncio.Task[None] | None = None
        self._first_ready: asyncio.Future[None] | None = None
        self._spawned_at = self._ready_at = clock.monotonic()
        self._expected_at = self._spawned_at
        """When the next engine should be ready."""
        self._load_s = 1.0

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return None if self._child is None else self._child.pid

    @property
    def channel(self) -> FrontChannel | None:
        return None if self._child is None else self._child.channel

    def health(self) -> Health:
        return Health(self.state, self._detail, self._stages.snapshot())

    def require_ready(self) -> FrontChannel:
        """The way to the engine. Raises what a caller is to be told where there is none."""
        if self.state is State.READY and self._child is not None:
            return self._child.channel
        if self.state is State.CLOSED:
            raise ShuttingDown("the server is shutting down")
        if self.state is State.FAILED:
            raise BackendUnavailable("the engine has failed and does not restart")
        wait = self._expected_at - self._clock.monotonic()
        raise BackendUnavailable(
            "the engine is starting; try again shortly", retry_after_s=max(1.0, wait)
        )

    async def start(self) -> None:
        """Returns once READY. Raises BackendUnavailable if the first engine does not get there:
        what fails before it ever worked is for a person to mend."""
        loop = asyncio.get_running_loop()
        self._first_ready = loop.create_future()
        self._task = loop.create_task(self._supervise(), name="engine-supervisor")
        self._task.add_done_callback(self._on_supervision_ended)
        try:
            await self._first_ready
        except asyncio.CancelledError:
            await self.stop()
            raise

    def retire(self) -> None:
        """No more requests and no more restarts; the running engine stays until `stop`."""
        self.state, self._detail = State.CLOSED, "shutting down"

    async def stop(self) -> None:
        """Ends the engine process. Idempotent."""
        self.retire()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._settle_first(ShuttingDown("the server is shutting down"))
        self._detail = "closed"

    async def _supervise(self) -> None:
        timings = self._timings
        backoff = timings.first_backoff
        while True:
            ending = await self._run_engine()
            if self.state is State.CLOSED:
                return
            _log.error("%s", ending.reason)
            never_ready = self._settle_first(BackendUnavailable(ending.reason))
            if never_ready or ending.fatal:
                self.state, self._detail = State.FAILED, ending.reason
                return
            if self._was_stable():
                backoff = timings.first_backoff
            self._detail = f"restarting: {ending.reason}"
            self._expected_at = self._clock.monotonic() + backoff + self._load_s
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, timings.max_backoff)

    def _on_supervision_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("the supervision itself failed", exc_info=error)
            self.state, self._detail = State.FAILED, "the supervision of the engine failed"
            self._settle_first(BackendUnavailable(self._detail))

    def _was_stable(self) -> bool:
        """Whether the engine that just ended had been ready for long."""
        was_ready = self._ready_at > self._spawned_at
        return was_ready and self._clock.monotonic() - self._ready_at > self._timings.max_backoff

    async def _run_engine(self) -> _Ending:
        """One engine process from spawn to reaping."""
        self._stages = StageLog(self._clock)
        self._liveness = self._new_liveness()
        self._spawned_at = self._clock.monotonic()
        self._expected_at = self._spawned_at + self._load_s
        self._ending = ending = asyncio.get_running_loop().create_future()
        try:
            child = await Child.spawn(
                self._config, self._builder, self._on_message, lambda: _settle(ending, _Ending())
            )
        except OSError as error:
            return _Ending(f"the engine process cannot be started: {error}")
        self._child = child
        try:
            result = await self._watch(ending)
            self._down(result)
            code = await child.destroy(dump_stack=result.hung)
        except asyncio.CancelledError:
            await child.stop(self._timings.stop_grace)
            raise
        finally:
            child.kill()
            self._child = None
        return result if result.reason else _Ending(_exit_reason(code))

    async def _watch(self, ending: asyncio.Future[_Ending]) -> _Ending:
        while not ending.done():
            await asyncio.wait({ending}, timeout=self._liveness.interval)
            if self._liveness.tick(self._clock.monotonic()):
                silent = f"the engine hangs: silent for {self._liveness.limit:.1f} s"
                _settle(ending, _Ending(silent, hung=True))
        return ending.result()

    def _down(self, ending: _Ending) -> None:
        if self.state is State.READY:
            self.state, self._detail = State.RESTARTING, "the engine is down"
        self._user.on_down(ending.reason or "the engine process ended")

    def _on_message(self, message: EngineMessage) -> None:
        match message:
            case Step():
                self._liveness.heard(message.stats.seconds)
                self._user.on_step(message)
            case Progress():
                self._liveness.heard()
                self._stages.report(message.stage, message.fraction, message.detail)
            case Ready():
                self._on_ready(message.info)
            case Failed():
                if self._ending is not None:
                    _settle(self._ending, _Ending(message.message, fatal=message.fatal))
            case _:
                self._liveness.heard()

    def _on_ready(self, info: ModelInfo) -> None:
        self._liveness.ready()
        self._stages.finish()
        self._ready_at = self._clock.monotonic()
        self._load_s = self._ready_at - self._spawned_at
        if self.state is not State.CLOSED:
            self.state, self._detail = State.READY, ""
        self._user.on_ready(info)
        self._settle_first(None)

    def _settle_first(self, error: HeadraceError | None) -> bool:
        """Whether `start` was still waiting for its outcome."""
        first = self._first_ready
        if first is None or first.done():
            return False
        if error is None:
            first.set_result(None)
        else:
            first.set_exception(error)
        return True

    def _new_liveness(self) -> Liveness:
        timings = self._timings
        return Liveness(timings.hang_timeout, timings.load_timeout, self._clock.monotonic())


def _settle(ending: asyncio.Future[_Ending], result: _Ending) -> None:
    if not ending.done():
        ending.set_result(result)


def _exit_reason(code: int) -> str:
    how = f"by signal {-code}" if code < 0 else f"with status {code}"
    return f"the engine process ended {how}"
