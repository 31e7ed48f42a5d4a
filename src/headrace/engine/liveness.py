"""When silence means that the engine hangs."""

from __future__ import annotations

from collections import deque

__all__ = ["Liveness"]

_RECENT_STEPS = 64
_SLACK = 10.0
_CEILING = 6.0


class Liveness:
    """Adds up the engine's silence, fed with monotonic seconds by its owner.

    `tick` is to be called every `interval` seconds. Only time that the owner watched counts: if
    its own event loop stood still, the engine's messages are waiting unread and nobody is silent.
    While loading the limit is `load_timeout`; from `ready` on it is `hang_timeout`, stretched to
    ten times the longest recent step so that a legitimately long one passes, and never beyond six
    times `hang_timeout`.
    """

    def __init__(self, hang_timeout: float, load_timeout: float, now: float) -> None:
        self.interval = min(1.0, hang_timeout / 4)
        """Seconds between ticks, and between the words of an idle engine."""
        self._hang_timeout = hang_timeout
        self._load_timeout = load_timeout
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._ready = False
        self._silent = 0.0
        self._last_tick = now

    @property
    def limit(self) -> float:
        """Seconds of silence that are one too many."""
        if not self._ready:
            return self._load_timeout
        longest = max(self._steps, default=0.0)
        return min(max(self._hang_timeout, _SLACK * longest), _CEILING * self._hang_timeout)

    def ready(self) -> None:
        self._ready = True
        self._silent = 0.0

    def heard(self, step_seconds: float = 0.0) -> None:
        """A message came; `step_seconds` is how long the step it reports took."""
        self._silent = 0.0
        if step_seconds > 0:
            self._steps.append(step_seconds)

    def tick(self, now: float) -> bool:
        """Whether the engine has been silent for too long."""
        self._silent += min(now - self._last_tick, 2 * self.interval)
        self._last_tick = now
        return self._silent >= self.limit
