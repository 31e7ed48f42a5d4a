"""How much a remote backend should hold at once, learnt from how it answers.

Two limits: requests, and uncached prompt tokens before their first token. What exceeds them waits
with us, where it can be reordered and cancelled. The signals are the time to first token (TTFT)
relative to what its prompt takes in little company, and the inter-token latency (ITL); never the
time of whole answers, which says how long they are. The rule is that of Netflix's gradient2 limit
(smoothing 0.2, tolerance 1.5) with Envoy's headroom of a square root. Where load never leaves it in
little company, the limit dips for a moment every half minute, as BBR does to see the round trip
that a queue hides: otherwise a long congestion would pass for normal.
"""

from __future__ import annotations

import math
from collections import deque

from headrace.core.clock import Clock
from headrace.scheduling.baseline import TtftBaseline, quantile
from headrace.scheduling.limiter_policy import Circuit, Failure, LimiterPolicy, LimiterStats

__all__ = ["AdaptiveLimiter", "Circuit", "Failure", "LimiterPolicy", "LimiterStats", "Permit"]

_WINDOW_S = 0.5
_WINDOW_SAMPLES = 16
_FEW_SAMPLES = 4
_PATIENCE_S = 5.0
_DOUBLING_S = 1.0
_COMPANY = 0.8
_PEAK_KEEP = 0.95
_DIP_EVERY_S = 30.0
_BASE_SAMPLES = 8
_LONGEST_DIP_S = 10.0
_TOLERANCE = 1.5
_SMOOTHING = 0.2
_BACK_OFF = 0.7
_LEAST_GRADIENT = 0.5
_ITL_DEAD_BAND = 0.05


class Permit:
    """One request with the backend. Tell it what happens; `finish`, `fail` or `cancel` end it."""

    __slots__ = ("_last", "_limiter", "first", "open", "probe", "quiet", "started", "uncached")

    def __init__(
        self, limiter: AdaptiveLimiter, uncached: int, started: float, *, quiet: bool, probe: bool
    ) -> None:
        self._limiter = limiter
        self._last = started
        self.uncached = uncached
        self.started = started
        self.quiet = quiet
        self.probe = probe
        self.first = False
        self.open = True

    def tokens(self, count: int, now: float) -> None:
        """So many more tokens have come; the first ones end the prefill."""
        if not self.open or count < 1:
            return
        if self.first:
            self._limiter._itl((now - self._last) / count)
        else:
            self.first = True
            self._limiter._first_token(self, now - self.started)
        self._last = now

    def finish(self) -> None:
        self._limiter._end(self, None, None)

    def cancel(self) -> None:
        """It ends for reasons of ours, and says nothing of the backend."""
        self._limiter._end(self, None, None, cancelled=True)

    def fail(self, failure: Failure, retry_after_s: float | None = None) -> None:
        self._limiter._end(self, failure, retry_after_s)


class AdaptiveLimiter:
    """Owned by the event loop; one for each backend."""

    def __init__(self, clock: Clock, policy: LimiterPolicy | None = None) -> None:
        self._clock = clock
        self._policy = policy or LimiterPolicy()
        self._limit = self._policy.initial
        self._baseline = TtftBaseline()
        self._inflight = 0
        self._prefill = 0
        self._window: list[float] = []
        self._gaps: deque[float] = deque(maxlen=256)
        self._window_from = clock.monotonic()
        self._doubled = clock.monotonic()
        self._alone = clock.monotonic()
        self._dip_from: float | None = None
        self._dip_samples = 0
        self._busiest = 0
        self._peak = 0.0
        self._gradient = 1.0
        self._doubling = True
        self._pressed = False
        self._rtt = 1.0
        self._backed_off = -math.inf
        self._closed_until = -math.inf
        self._failures = 0
        self._broken = False
        self._probe: Permit | None = None

    # Asking

    @property
    def limit(self) -> int:
        """Requests that it may hold now."""
        share = 1.0 if self._dip_from is None else _COMPANY
        return max(1, int(share * self._limit))

    @property
    def prefill_limit(self) -> float | None:
        speed = self._baseline.tokens_per_s
        return None if speed is None else self._policy.ttft_target * speed

    @property
    def circuit(self) -> Circuit:
        if not self._broken:
            return Circuit.CLOSED
        return Circuit.OPEN if self._probe is None else Circuit.PROBING

    def wait_s(self) -> float:
        """Until it may be asked again, as far as time decides that; 0 if it may now."""
        return max(0.0, self._closed_until - self._clock.monotonic())

    def has_room(self, uncached: int) -> bool:
        """Whether a request with so many uncached prompt tokens may go there now."""
        if self.wait_s() > 0.0 or (self._broken and self._probe is not None):
            return False
        if self._broken or not self._inflight:
            return True
        if self._inflight >= self.limit:
            return False
        most = self.prefill_limit
        return most is None or not self._prefill or self._prefill + uncached <= most

    def start(self, uncached: int) -> Permit:
        """Counts a request in. The caller has asked `has_room`."""
        probe = self._broken
        self._inflight += 1
        self._prefill += uncached
        self._busiest = max(self._busiest, self._inflight)
        few = _COMPANY * min(self._limit, self._peak)
        most = self._policy.initial if self._doubling else few
        quiet = self._inflight <= max(1.0, most)
        permit = Permit(self, uncached, self._clock.monotonic(), quiet=quiet, probe=probe)
        if probe:
            self._probe = permit
        return permit

    def report(self, *, waiting: int, kv_usage: float) -> None:
        """The backend's own word that it queues or is full. Only pass what is under a second
        old."""
        self._pressed = waiting > 2 or kv_usage > 0.9

    def stats(self) -> LimiterStats:
        return LimiterStats(
            self._limit,
            self.prefill_limit,
            self._inflight,
            self._prefill,
            self._gradient,
            self.circuit,
        )

    # Learning

    def _first_token(self, permit: Permit, ttft: float) -> None:
        now = self._clock.monotonic()
        self._prefill -= permit.uncached
        self._healthy(permit)
        self._rtt += 0.1 * (ttft - self._rtt)
        self._window.append(self._baseline.relative(permit.uncached, ttft))
        if permit.quiet:
            self._baseline.learn(permit.uncached, ttft)
            self._dip_samples += 1
        self._dip(now)
        self._maybe_update(now)

    def _itl(self, gap: float) -> None:
        self._gaps.append(gap)
        if len(self._gaps) >= _WINDOW_SAMPLES:
            self._maybe_update(self._clock.monotonic())

    def _dip(self, now: float) -> None:
        """Ends one that has shown enough, or begins one where nothing was seen for long."""
        if self._dip_samples >= _BASE_SAMPLES or (
            self._dip_from is not None and now - self._dip_from > _LONGEST_DIP_S
        ):
            self._dip_samples = 0
            self._alone = now
            self._dip_from = None
        elif self._dip_from is None and now - self._alone > _DIP_EVERY_S:
            self._dip_from = now
            self._dip_samples = 0

    def _healthy(self, permit: Permit) -> None:
        self._failures = 0
        if permit.probe and self._broken:
            self._broken = False
            self._probe = None

    def _end(
        self,
        permit: Permit,
        failure: Failure | None,
        retry_after_s: float | None,
        *,
        cancelled: bool = False,
    ) -> None:
        if not permit.open:
            return
        permit.open = False
        self._inflight -= 1
        if not permit.first:
            self._prefill -= permit.uncached
        now = self._clock.monotonic()
        if self._probe is permit:
            self._probe = None
        if failure is not None:
            self._failed(permit, failure, retry_after_s, now)
        elif not cancelled:
            self._healthy(permit)
        self._maybe_update(now)

    def _failed(
        self, permit: Permit, failure: Failure, retry_after_s: float | None, now: float
    ) -> None:
        if failure is not Failure.ERROR:
            self._back_off(permit, now)
        if retry_after_s is not None:
            self._closed_until = max(self._closed_until, now + retry_after_s)
        if failure is Failure.PUSHBACK:  # it lives
            self._healthy(permit)
            return
        self._failures += 1
        if permit.probe or (not self._broken and self._failures >= self._policy.failures_to_open):
            self._broken = True
            self._closed_until = max(self._closed_until, now + self._policy.open_s)

    def _back_off(self, permit: Permit, now: float) -> None:
        """At most once for the requests that were out together."""
        if permit.started < self._backed_off or now - self._backed_off < self._rtt:
            return
        self._backed_off = now
        self._doubling = False
        self._limit = max(1.0, _BACK_OFF * min(self._limit, float(self._busiest or 1)))
        self._open_window(now)

    def _maybe_update(self, now: float) -> None:
        since = now - self._window_from
        count = len(self._window)
        telling = count >= _FEW_SAMPLES or len(self._gaps) >= _WINDOW_SAMPLES
        if count >= _WINDOW_SAMPLES or (since >= _WINDOW_S and telling):
            self._update(now)
        elif since >= _PATIENCE_S:
            self._update(now) if count else self._open_window(now)

    def _update(self, now: float) -> None:
        known = self._window and self._baseline.seen >= _BASE_SAMPLES
        excess = quantile(self._window, 0.5) if known else 1.0
        self._gradient = min(1.0, max(_LEAST_GRADIENT, _TOLERANCE / excess))
        strain = self._strain()
        keep = _PEAK_KEEP if self._dip_from is None else 1.0
        self._peak = max(float(self._busiest), keep * self._peak)
        if self._doubling and (self._gradient < 1.0 or strain < 1.0):
            self._doubling = False
            self._limit = min(self._limit, max(1.0, self._peak))
        # What was not used has not been tried, and what was too much takes time to drain.
        tried = self._busiest >= self._limit / 2 and self._dip_from is None
        draining = self._inflight > self._limit + 1.0
        if strain < self._gradient:
            if strain < 1.0 - _ITL_DEAD_BAND and not draining:
                self._approach(self._limit * strain)
        elif self._gradient < 1.0:
            self._approach(self._limit * self._gradient + math.sqrt(self._limit))
        elif tried and self._window and strain > 1.0 + _ITL_DEAD_BAND:
            self._grow(now)
        self._open_window(now)

    def _grow(self, now: float) -> None:
        if not self._doubling:
            self._approach(self._limit + math.sqrt(self._limit))
        elif now - self._doubled >= _DOUBLING_S and self._baseline.seen >= _BASE_SAMPLES:
            self._doubled = now
            self._limit = min(max(self._limit, 2.0 * self._busiest), self._policy.most)

    def _approach(self, aim: float) -> None:
        moved = self._limit + _SMOOTHING * (aim - self._limit)
        self._limit = min(max(1.0, moved), self._policy.most)

    def _strain(self) -> float:
        """Below 1 where tokens come too slowly or the backend says that it is full; well above
        where there is no sign of it."""
        target = self._policy.itl_target
        strain = 2.0
        if target is not None and self._gaps:
            strain = max(_LEAST_GRADIENT, target / max(quantile(self._gaps, 0.9), 1e-9))
        return min(strain, 0.9) if self._pressed else strain

    def _open_window(self, now: float) -> None:
        self._window = []
        self._gaps.clear()
        self._window_from = now
        self._busiest = self._inflight
