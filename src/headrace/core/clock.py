"""Time and randomness, injected everywhere so that simulations own them."""

from __future__ import annotations

import secrets
import time
from typing import Protocol

__all__ = ["Clock", "Entropy", "SystemClock", "SystemEntropy", "VirtualClock"]


class Clock(Protocol):
    """Seconds. `monotonic` is for durations, `wall` for Unix time stamps shown to people."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's own clock; safe from any thread."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves only when told, for tests and simulations."""

    def __init__(self, start: float = 0.0, epoch: float = 1_700_000_000.0) -> None:
        self._now = start
        self._epoch = epoch

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._epoch + self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._now += seconds


class Entropy(Protocol):
    """Source of identifiers and seeds."""

    def token(self, nbytes: int) -> str: ...

    def seed(self) -> int: ...


class SystemEntropy:
    """Entropy from the operating system; safe from any thread."""

    def token(self, nbytes: int) -> str:
        return secrets.token_hex(nbytes)

    def seed(self) -> int:
        """A uniform integer in [0, 2**63)."""
        return secrets.randbits(63)
