"""One request in numbers, gathered while its events go by and reported once at its end."""

from __future__ import annotations

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError
from headrace.core.events import CacheNote, Delta, Event, Finish, FinishReason, Start, Usage
from headrace.core.request import PriorityClass, Request
from headrace.telemetry.logs import log_request
from headrace.telemetry.metrics import Metrics, ModelMetrics
from headrace.telemetry.outcome import Outcome

__all__ = ["RequestRecord"]


class RequestRecord:
    """Owned by the event loop. Times are the clock's monotonic seconds, None if never reached."""

    __slots__ = (
        "_clock",
        "_cut",
        "_last_token_of",
        "_metrics",
        "_model_metrics",
        "cache",
        "cached_tokens",
        "completion_tokens",
        "dispatched",
        "error_code",
        "first_token",
        "last_token",
        "model",
        "outcome",
        "priority_class",
        "prompt_tokens",
        "request",
        "started",
        "tenant",
    )

    def __init__(self, request: Request, tenant: str, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._model_metrics: ModelMetrics | None = None
        self._last_token_of: dict[int, float] = {}
        self._cut = False
        self.request = request
        self.tenant = tenant
        self.model: str | None = None
        self.outcome: Outcome | None = None
        self.error_code: str | None = None
        self.cache: CacheNote | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.priority_class: PriorityClass | None = None
        self.dispatched: float | None = None
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None

    def routed(self, model: str) -> None:
        """The request means this served model: from here on its figures have a label."""
        self.model = model
        self._model_metrics = self._metrics.model(model)

    def turn(self, priority_class: PriorityClass | None = None, at: float | None = None) -> None:
        """The request went to the backend, now or `at`, as one of this class; the last call
        counts. Whoever joined it later has not waited."""
        self.dispatched = self._clock.monotonic() if at is None else max(at, self.request.arrival)
        self.priority_class = priority_class

    def observe(self, event: Event) -> None:
        """Called with every event before the client has it."""
        if isinstance(event, Delta):
            if not event.prompt and (event.token_ids or event.text):
                self._progress(event.index, len(event.token_ids))
        elif isinstance(event, Finish):
            self._cut = self._cut or event.reason is FinishReason.LENGTH
        elif isinstance(event, Start):
            self.started = self._clock.monotonic()
            self.prompt_tokens = event.prompt_tokens
            self.cached_tokens = event.cached_tokens
            self.cache = event.cache
        elif isinstance(event, Usage):
            self.prompt_tokens = event.prompt_tokens
            self.cached_tokens = event.cached_tokens
            self.completion_tokens = event.completion_tokens
            self.outcome = Outcome.LENGTH if self._cut else Outcome.STOP

    def failed(self, error: HeadraceError) -> None:
        """The request ends with this error; without effect once it is complete."""
        if self.outcome is None:
            refused = self.started is None
            self.outcome = Outcome.of_refusal(error) if refused else Outcome.FAILED
            self.error_code = error.code

    def close(self) -> None:
        """No more events, so report. A request without an outcome until here was cancelled."""
        if self.outcome is None:
            self.outcome = Outcome.CANCELLED
        now = self._clock.monotonic()
        endpoint = self.request.endpoint
        if self._model_metrics is None:
            self._metrics.unrouted(endpoint, self.outcome)
        else:
            self._report(self._model_metrics, now)
            self._model_metrics.requests[endpoint, self.outcome].inc()
        log_request(self, now)

    def _report(self, metrics: ModelMetrics, now: float) -> None:
        if self.cache is not None and self.cache.status in ("hit", "coalesced"):
            return  # nothing was computed for it, and these figures are about computing
        arrival = self.request.arrival
        if self.dispatched is not None:
            metrics.queue_s.observe(self.dispatched - arrival)
            if self.model is not None and self.priority_class is not None:
                scheduling = self._metrics.scheduling(self.model)
                scheduling.waited(self.priority_class, self.dispatched - arrival)
        if self.started is not None:
            metrics.prompt_tokens.observe(self.prompt_tokens)
            metrics.prompt_tokens_total.inc(self.prompt_tokens)
            metrics.cached_tokens_total.inc(self.cached_tokens)
            metrics.generation_tokens.observe(self.completion_tokens)
            metrics.generation_tokens_total.inc(self.completion_tokens)
            metrics.request_s.observe(now - arrival)
        if self.first_token is not None and self.last_token is not None:
            metrics.first_token_s.observe(self.first_token - arrival)
            metrics.decode_s.observe(self.last_token - self.first_token)
            if self.dispatched is not None:
                metrics.prefill_s.observe(self.first_token - self.dispatched)

    def _progress(self, choice: int, tokens: int) -> None:
        """A delta of k tokens after a gap of t seconds is k latencies of t / k."""
        now = self._clock.monotonic()
        if self.first_token is None:
            self.first_token = now
        before = self._last_token_of.get(choice)
        if before is not None and self._model_metrics is not None:
            for _ in range(tokens):
                self._model_metrics.inter_token_s.observe((now - before) / tokens)
        self._last_token_of[choice] = self.last_token = now
        self.completion_tokens += tokens
