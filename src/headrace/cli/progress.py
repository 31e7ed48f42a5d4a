"""Stages on standard error: one line a stage with its seconds, live only on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from headrace.core.health import Stage, StageProgress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["StageReporter"]

_WORDS = {
    Stage.RESOLVE: "resolve model",
    Stage.DOWNLOAD: "download",
    Stage.LOAD_WEIGHTS: "load weights",
    Stage.RESERVE_KV: "reserve KV memory",
    Stage.WARM_UP: "warm up",
    Stage.LISTENING: "listening",
}


class StageReporter:
    """Prints a line when a stage ends; on a terminal also a bar while it runs. One thread."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._live: Progress | None = _live_progress(stream) if stream.isatty() else None
        self._bar: TaskID | None = None
        self._current: Stage | None = None
        self._since = 0.0
        self._printed: set[Stage] = set()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        if self._live is not None:
            self._clear_bar()
            self._live.stop()
            self._live = None

    def update(self, stage: Stage, fraction: float, detail: str = "") -> None:
        """`stage` is under way; a stage before it has ended."""
        if stage is not self._current:
            self.finish()
            self._current, self._since = stage, self._clock()
        if self._live is not None:
            self._show_bar(stage, fraction, detail)

    def finish(self) -> None:
        """The stage under way has ended."""
        if self._current is not None:
            self._line(self._current, self._clock() - self._since, "")
            self._current = None

    def follow(self, stages: Sequence[StageProgress]) -> None:
        """Brings what is shown up to a backend's own account, whose last entry may be open."""
        for number, entry in enumerate(stages):
            is_last = number == len(stages) - 1
            if entry.fraction >= 1.0 or not is_last:
                self._line(entry.stage, entry.seconds, entry.detail)
            elif self._live is not None:
                self._show_bar(entry.stage, entry.fraction, entry.detail)

    def _line(self, stage: Stage, seconds: float, detail: str) -> None:
        if stage in self._printed:
            return
        self._printed.add(stage)
        self._clear_bar()
        text = f"  {_WORDS[stage]:18} {seconds:6.1f} s  {detail}".rstrip()
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)

    def _show_bar(self, stage: Stage, fraction: float, detail: str) -> None:
        assert self._live is not None  # noqa: S101 - callers look first
        if self._bar is None:
            self._bar = self._live.add_task("", total=1.0)
        self._live.update(
            self._bar, completed=fraction, description=f"  {_WORDS[stage]:18} {detail}"
        )

    def _clear_bar(self) -> None:
        if self._live is not None and self._bar is not None:
            self._live.remove_task(self._bar)
            self._bar = None


def _live_progress(stream: TextIO) -> Any:
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn  # noqa: PLC0415

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        console=Console(file=stream),
        transient=True,
    )
