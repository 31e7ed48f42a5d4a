"""Ends what a request is waiting for, from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["Lifeline"]

T = TypeVar("T")


class Lifeline:
    """One request's waits, one at a time, each of which `interrupt` can end with an exception.

    Works as asyncio.timeout does, by cancelling the waiting task and turning exactly that
    cancellation into the exception; a cancellation by anybody else stays one. Event loop only.
    """

    __slots__ = ("_cancelled", "_error", "_task")

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelled = False

    def interrupt(self, error: Exception) -> None:
        """Raises `error` in the wait going on, or else in the next one. The first error wins."""
        if self._error is not None:
            return
        self._error = error
        if self._task is not None:
            self._cancelled = self._task.cancel()

    async def wait(self, start: Callable[[], Awaitable[T]]) -> T:
        """Awaits what `start` returns."""
        if self._error is not None:
            raise self._take()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a lifeline is held by a task")
        others = task.cancelling()
        self._task = task
        try:
            return await start()
        except asyncio.CancelledError as cancelled:
            if self._cancelled and task.cancelling() == others + 1:
                raise self._take() from cancelled
            raise
        finally:
            self._task = None
            if self._cancelled:
                self._cancelled = False
                task.uncancel()

    def _take(self) -> Exception:
        error, self._error = self._error, None
        if error is None:
            raise RuntimeError("nothing interrupted this wait")
        return error
