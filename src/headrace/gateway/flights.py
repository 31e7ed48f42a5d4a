"""One generation for all who ask for the same at once."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from headrace.core.errors import BackendFailed, BackendUnavailable, HeadraceError
from headrace.core.events import Event
from headrace.core.request import PriorityClass

__all__ = ["Flight", "FlightLostError", "Flights"]

_LOST = (BackendFailed, BackendUnavailable)


class FlightLostError(Exception):
    """The generation broke before its first event, for no fault of those who wait for it."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Flight:
    """Runs `events` in a task of its own, which goes on as long as anybody follows.

    Followers read one shared list, each at its own pace: a late one replays it from the start, and
    a slow one delays nobody. A failure after the first event is everyone's, and so is a refusal;
    a breakdown before it is FlightLostError, upon which one of them may try again.
    """

    def __init__(
        self,
        priority_class: PriorityClass,
        start: Callable[[Flight], AsyncGenerator[Event, None]],
        ended: Callable[[Flight], None],
    ) -> None:
        self.priority_class = priority_class
        self.turned_at: float | None = None
        self.followers = 0
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._over = False
        self._changed = asyncio.Event()
        self._ended = ended
        self._task = asyncio.create_task(self._run(start(self)))

    @property
    def started(self) -> bool:
        return bool(self._events)

    def serves(self, priority_class: PriorityClass) -> bool:
        """Whether one of this class is no worse off here than alone."""
        return self.started or self.priority_class <= priority_class

    async def follow(self) -> AsyncGenerator[Event, None]:
        """The answer from its start. Closing it leaves the flight, and ends one nobody follows."""
        self.followers += 1
        try:
            told = 0
            while True:
                while told < len(self._events):
                    yield self._events[told]
                    told += 1
                if self._over:
                    if self._error is not None:
                        raise self._failure(self._error)
                    return
                await self._changed.wait()
        finally:
            self.followers -= 1
            if not self.followers:
                self._task.cancel()
                self._ended(self)

    async def _run(self, events: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    self._events.append(event)
                    self._tell()
        except Exception as error:  # noqa: BLE001 - raised again where the followers are
            self._error = error
        finally:
            self._over = True
            self._ended(self)
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed.clear()

    def _failure(self, error: Exception) -> Exception:
        """Each follower's own copy, for what is raised is written to."""
        if self._events or (isinstance(error, HeadraceError) and not isinstance(error, _LOST)):
            return copy.copy(error)
        return FlightLostError(error)


class Flights:
    """Those under way, by key. Event loop only."""

    def __init__(self) -> None:
        self._flights: dict[bytes, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def joinable(self, key: bytes, priority_class: PriorityClass) -> Flight | None:
        flight = self._flights.get(key)
        return flight if flight is not None and flight.serves(priority_class) else None

    def begin(
        self,
        key: bytes,
        priority_class: PriorityClass,
        start: Callable[[Flight], AsyncGenerator[Event, None]],
    ) -> Flight:
        """To be followed at once, before anything else is awaited. Later ones join this one."""
        flight = Flight(priority_class, start, lambda ended: self._forget(key, ended))
        self._flights[key] = flight
        return flight

    def _forget(self, key: bytes, flight: Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
