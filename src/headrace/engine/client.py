"""The front's side of the engine: hands over sequences and routes their outputs to readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import BackendFailed, HeadraceError, ShuttingDown
from headrace.core.health import Health, State
from headrace.core.request import SamplingParams
from headrace.engine.mailbox import Mailbox
from headrace.engine.supervisor import Supervisor, Timings
from headrace.engine.wire import (
    Abort,
    EngineConfig,
    Fault,
    ModelInfo,
    Output,
    Preempt,
    SetTargets,
    Step,
    StepStats,
    Submit,
)

__all__ = ["DEFAULT_BUILDER", "EngineClient", "EngineObserver", "StepListener"]

DEFAULT_BUILDER = "headrace.engine.assembly:build_engine"
_RECENT_STEPS = 64
_NO_STATS = StepStats(
    seconds=0.0,
    prefill_tokens=0,
    decode_tokens=0,
    running=0,
    waiting=0,
    blocks_used=0,
    blocks_total=0,
    preemptions_total=0,
    prefix_queries_total=0,
    prefix_hits_total=0,
)


class EngineObserver(Protocol):
    """Told of the engine's work, on the event loop; must be quick. Totals never fall, not even
    over a restart. A report of 0 `seconds` is a change of the gauges, not a step."""

    def on_step(self, stats: StepStats) -> None: ...

    def on_restart(self, reason: str) -> None: ...


class StepListener(Protocol):
    """Told of the engine's steps as it reports them, on the event loop; must be quick."""

    def on_step(self, step: Step) -> None: ...

    def on_ready(self) -> None:
        """A new engine knows nothing of what the one before was told."""
        ...


class EngineClient:
    """Everything here runs on the event loop that called `start`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        timings: Timings | None = None,
        clock: Clock | None = None,
        builder: str = DEFAULT_BUILDER,
        observer: EngineObserver | None = None,
        listener: StepListener | None = None,
    ) -> None:
        self._listener = listener
        self._clock = clock or SystemClock()
        self._observer = observer
        self._supervisor = Supervisor(
            config, self, builder=builder, timings=timings or Timings(), clock=self._clock
        )
        self.info: ModelInfo | None = None
        self.stats = _NO_STATS
        """The engine's last word on itself, with totals over all its lives."""
        self.stats_as_of = self._clock.monotonic()
        self.recent_step_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._totals_before = _NO_STATS
        self._boxes: dict[int, Mailbox] = {}
        self._next_seq = 0
        self._closer: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return self._supervisor.pid

    @property
    def open_sequences(self) -> int:
        """Sequences submitted and not ended."""
        return len(self._boxes)

    def health(self) -> Health:
        return self._supervisor.health()

    async def start(self) -> None:
        """Returns once READY. Raises BackendUnavailable if the engine cannot be loaded."""
        await self._supervisor.start()

    async def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        seeds: Sequence[int],
        *,
        salt: bytes = b"",
        echo: bool = False,
        priority: int = 0,
    ) -> Mailbox:
        """Hands over one sequence a seed; their outputs come in the mailbox.

        The caller passes the mailbox to `abort` when it stops reading, however it ended.
        """
        channel = self._supervisor.require_ready()
        box = Mailbox(range(self._next_seq, self._next_seq + len(seeds)))
        self._next_seq = box.seqs.stop
        self._boxes.update(dict.fromkeys(box.seqs, box))
        ids = list(prompt)
        try:
            channel.send(
                Submit(
                    seq=seq,
                    group=box.seqs.start,
                    prompt=ids,
                    sampling=sampling,
                    seed=seed,
                    salt=salt,
                    echo=echo,
                    priority=priority,
                )
                for seq, seed in zip(box.seqs, seeds, strict=True)
            )
            await channel.drain()
        except BaseException:
            self.abort(box)
            raise
        return box

    def abort(self, box: Mailbox) -> None:
        """Drops what has not ended of a request; it leaves the engine before its next step."""
        seqs = [seq for seq in box.seqs if seq in box.open_seqs]
        if not seqs:
            return
        for seq in seqs:
            self._forget(seq, box)
        channel = self._supervisor.channel
        if channel is not None:
            channel.send([Abort(seqs)])

    def set_targets(self, *, max_step_tokens: int, max_running: int) -> None:
        """From the engine's next step on."""
        self._supervisor.require_ready().send([SetTargets(max_step_tokens, max_running)])

    def preempt(self, box: Mailbox) -> None:
        """Puts what runs of a request back into the engine's queue, before its next step."""
        channel = self._supervisor.channel
        if channel is not None and box.open_seqs:
            channel.send([Preempt(sorted(box.open_seqs))])

    def inject_fault(self, kind: str) -> None:
        """Test hook; needs `EngineConfig.fault_hooks`."""
        self._supervisor.require_ready().send([Fault(kind)])

    async def close(self, grace: float) -> None:
        """Takes no more requests, waits `grace` seconds for the running ones, ends the engine.

        Idempotent; a later call may shorten the wait.
        """
        loop = asyncio.get_running_loop()
        self._supervisor.retire()
        if not self._boxes:
            self._drained.set()
        if self._closer is None:
            self._closer = loop.create_task(self._close(), name="engine-close")
        cut = loop.call_later(grace, self._drained.set)
        try:
            await asyncio.shield(self._closer)
        finally:
            cut.cancel()

    async def _close(self) -> None:
        await self._drained.wait()
        self._fail_all(ShuttingDown("the server is shutting down"))
        await self._supervisor.stop()

    # What the supervisor reports.

    def on_ready(self, info: ModelInfo) -> None:
        self.info = info
        self._publish(msgspec.structs.replace(_NO_STATS, blocks_total=info.num_blocks))
        if self._listener is not None:
            self._listener.on_ready()

    def on_step(self, step: Step) -> None:
        self._deliver(step.outputs)
        self._publish(step.stats)
        if self._listener is not None:
            self._listener.on_step(step)

    def on_down(self, reason: str) -> None:
        self._fail_all(
            BackendFailed("the engine failed while this request ran; it may be sent again")
        )
        self._totals_before = self.stats
        self.recent_step_s.clear()
        self._publish(msgspec.structs.replace(_NO_STATS, blocks_total=self.stats.blocks_total))
        if self._observer is not None and self.health().state is State.RESTARTING:
            self._observer.on_restart(reason)

    def _deliver(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            box = self._boxes.get(output.seq)
            if box is None:  # aborted while this was under way
                continue
            if output.finish is not None or output.error is not None:
                self._forget(output.seq, box)
            box.put(output)

    def _publish(self, stats: StepStats) -> None:
        before = self._totals_before
        self.stats = stats = msgspec.structs.replace(
            stats,
            preemptions_total=before.preemptions_total + stats.preemptions_total,
            prefix_queries_total=before.prefix_queries_total + stats.prefix_queries_total,
            prefix_hits_total=before.prefix_hits_total + stats.prefix_hits_total,
        )
        self.stats_as_of = self._clock.monotonic()
        if stats.seconds > 0:
            self.recent_step_s.append(stats.seconds)
        if self._observer is not None:
            self._observer.on_step(stats)

    def _forget(self, seq: int, box: Mailbox) -> None:
        self._boxes.pop(seq, None)
        box.open_seqs.discard(seq)
        if not self._boxes and self._closer is not None:
            self._drained.set()

    def _fail_all(self, error: HeadraceError) -> None:
        boxes = {id(box): box for box in self._boxes.values()}
        for seq, box in list(self._boxes.items()):
            self._forget(seq, box)
        for box in boxes.values():
            # An exception of its own for each reader, or tracebacks would pile up in one.
            box.fail(type(error)(error.message))
