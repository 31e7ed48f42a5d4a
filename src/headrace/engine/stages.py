"""The engine's start-up as people see it: stages with fractions and seconds."""

from __future__ import annotations

from dataclasses import replace

from headrace.core.clock import Clock
from headrace.core.health import Stage, StageProgress

__all__ = ["StageLog"]


class StageLog:
    """Collects Progress messages of one start. A stage ends when the next one begins."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done: list[StageProgress] = []
        self._current: StageProgress | None = None
        self._since = clock.monotonic()

    def report(self, stage: str, fraction: float, detail: str) -> None:
        now = self._clock.monotonic()
        if self._current is None or self._current.stage != stage:
            self.finish()
            self._since = now
        self._current = StageProgress(
            Stage(stage), min(max(fraction, 0.0), 1.0), now - self._since, detail
        )

    def finish(self) -> None:
        """The current stage is done."""
        if self._current is not None:
            seconds = self._clock.monotonic() - self._since
            self._done.append(replace(self._current, fraction=1.0, seconds=seconds))
            self._current = None

    def snapshot(self) -> tuple[StageProgress, ...]:
        if self._current is None:
            return tuple(self._done)
        seconds = self._clock.monotonic() - self._since
        return (*self._done, replace(self._current, seconds=seconds))
