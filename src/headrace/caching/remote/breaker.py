"""When to leave somebody alone who does not answer."""

from __future__ import annotations

import random
from typing import Literal

from headrace.core.clock import Clock

__all__ = ["Breaker", "BreakerState"]

BreakerState = Literal["closed", "open", "probing"]


class Breaker:
    """Opens after `failures` in a row. After a pause one call may try; until it is back nobody
    else may. Each failed try doubles the pause, from `first_s` up to `most_s`, give or take a
    fifth, so that servers do not come back in step. Pure; not for several threads at once.
    """

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        *,
        failures: int = 5,
        first_s: float = 0.5,
        most_s: float = 15.0,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._limit = failures
        self._first_s = first_s
        self._most_s = most_s
        self._failures = 0
        self._pause_s = 0.0
        self._until = 0.0
        self._state: BreakerState = "closed"

    @property
    def state(self) -> BreakerState:
        return self._state

    def allows(self) -> bool:
        """Whether to call now. Who is allowed tells how it went: by `succeeded` or `failed`."""
        if self._state == "closed":
            return True
        if self._state == "open" and self._clock.monotonic() >= self._until:
            self._state = "probing"
            return True
        return False

    def wait_s(self) -> float:
        """How long until a call may be allowed."""
        if self._state == "closed":
            return 0.0
        return max(0.0, self._until - self._clock.monotonic())

    def succeeded(self) -> None:
        self._failures = 0
        self._pause_s = 0.0
        self._state = "closed"

    def failed(self) -> None:
        self._failures += 1
        if self._state == "closed" and self._failures < self._limit:
            return
        if self._state == "open":
            return  # of a call that was under way when it opened
        self._pause_s = min(self._most_s, max(self._first_s, 2.0 * self._pause_s))
        self._until = self._clock.monotonic() + self._pause_s * self._rng.uniform(0.8, 1.2)
        self._state = "open"
