"""What stands between the gateway and one backend: its queue, its learning, its steering."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

from headrace.backends.base import Backend, SteerableBackend, StepReport
from headrace.core.clock import Clock
from headrace.core.errors import (
    BackendFailed,
    BackendUnavailable,
    DeadlineExceeded,
    HeadraceError,
    Overloaded,
    QuotaExceeded,
    RequestTimeout,
)
from headrace.core.events import Delta, Event
from headrace.core.request import Request
from headrace.gateway.tokenising import cost_of
from headrace.gateway.tuning import Tuning
from headrace.gateway.view import QueueRow
from headrace.scheduling import AdaptiveScheduler, Claim, StepSample
from headrace.scheduling.batching import BatchController, BatchDecision, BatchLimits, Targets
from headrace.scheduling.cost_model import A100_8B, SMALL_CPU, StepCostModel
from headrace.scheduling.lengths import LengthEstimator
from headrace.scheduling.limiter import AdaptiveLimiter, Failure
from headrace.telemetry import SchedulingMetrics

__all__ = ["Control"]

_FAILURES: tuple[tuple[type[HeadraceError], Failure], ...] = (
    (QuotaExceeded, Failure.PUSHBACK),
    (Overloaded, Failure.PUSHBACK),
    (BackendUnavailable, Failure.UNAVAILABLE),
    (DeadlineExceeded, Failure.TIMEOUT),
    (RequestTimeout, Failure.TIMEOUT),
    (BackendFailed, Failure.ERROR),
)


class Control:
    """Everything learnt and decided about one backend. Event loop only.

    A backend that computes in steps has its step size and running cap set; one that says how many
    choices it runs gets that many; of any other the number is learnt.
    """

    def __init__(
        self,
        backend: Backend,
        tuning: Tuning,
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._itl_target = tuning.itl_target_s
        self.lengths = LengthEstimator(clock)
        self.limiter = AdaptiveLimiter(clock)
        self._steered = backend if isinstance(backend, SteerableBackend) else None
        self.batching: BatchController | None = None
        if self._steered is not None:
            self.batching = BatchController(
                clock,
                StepCostModel(SMALL_CPU if self._steered.on_cpu else A100_8B),
                BatchLimits(*self._steered.step_limits),
                itl_target=tuning.itl_target_s,
            )
            self._steered.listen(self._on_step)
        self.scheduler = AdaptiveScheduler(
            tuning.policy,
            self.capacity,
            clock=clock,
            rng=rng,
            forecaster=self.lengths,
            preempt=None if self._steered is None else self._steered.preempt,
            timer=time.perf_counter,
        )

    def capacity(self) -> int:
        """Choices that the backend should hold now."""
        told = self._backend.load().max_running
        if told < 1:
            return self.limiter.limit
        return told if self.batching is None else min(told, self.batching.targets.max_running)

    @property
    def learns_capacity(self) -> bool:
        return self._backend.load().max_running < 1

    def generate(self, request: Request) -> AsyncIterator[Event]:
        """The backend's answer; how it comes is learnt from where that decides the capacity."""
        events = self._backend.generate(request)
        return self._watched(events, request) if self.learns_capacity else events

    def expected_tokens(self, request: Request, claim: Claim) -> int:
        """What a request will take of its tenant's quota: its prompt, and answers as long as
        eight of ten such are."""
        cost = cost_of(request)
        forecast = self.lengths.forecast(request, claim, cost.prompt_tokens, cost.max_tokens)
        return cost.prompt_tokens + cost.choices * forecast.q80

    def cached_tokens(self, request: Request) -> int:
        """Of a tokenised prompt, as far as is known."""
        return 0 if self._steered is None else self._steered.cached_tokens(request)

    def require_capacity(self) -> None:
        """Raises BackendUnavailable while the backend has failed too often to be asked."""
        if self.learns_capacity and (wait := self.limiter.wait_s()) > 0:
            raise BackendUnavailable(
                "The model is not available now. Please retry later.", retry_after_s=wait
            )

    def tune(self, tuning: Tuning) -> None:
        """From now on."""
        self.scheduler.configure(tuning.policy)
        if self.batching is not None and tuning.itl_target_s != self._itl_target:
            self._itl_target = tuning.itl_target_s
            self._send(self.batching.set_itl_target(tuning.itl_target_s))

    def rows(self) -> list[QueueRow]:
        """What waits and runs, by class and flow."""
        models = self._backend.models
        name = models[0].id if models else self._backend.name
        return [
            QueueRow(
                model=name,
                priority_class=of_class.priority_class.name.lower(),
                flow=flow.flow,
                depth=flow.depth,
                running=flow.running,
                tokens=flow.tokens,
                oldest_wait_s=flow.oldest_wait_s,
                predicted_wait_s=of_class.predicted_wait_s,
            )
            for of_class in self.scheduler.snapshot()
            for flow in of_class.flows
        ]

    def trace(self) -> list[dict[str, object]]:
        """The latest steps' sizes and why, oldest first."""
        if self.batching is None:
            return []
        models = self._backend.models
        return [
            {"model": models[0].id if models else None, **_plain(decision)}
            for decision in self.batching.trace()
        ]

    def observe(self, metrics: SchedulingMetrics) -> None:
        """Sets all figures, as of now."""
        counters, lengths = self.scheduler.counters, self.lengths.stats()
        metrics.set_classes(counters.admitted, counters.turns, counters.longest_wait_s)
        metrics.set_sheds(counters.sheds)
        metrics.set_order(
            overtakes=counters.overtakes,
            longest_overtake_s=counters.longest_overtake_s,
            guard_turns=counters.guard_turns,
            late_turns=counters.late_turns,
        )
        metrics.set_taken_back(revoked=counters.revoked, preempted=counters.preempted)
        metrics.set_ttft_targets(self.scheduler.ttft_targets_s())
        metrics.set_fairness(self.scheduler.jain())
        metrics.set_forecast(
            rank_accuracy=lengths.rank_accuracy,
            coverage_q80=lengths.q80_coverage,
            coverage_q90=lengths.q90_coverage,
        )
        metrics.set_decisions(counters.decisions, counters.decision_seconds)
        if self.batching is not None:
            metrics.set_cost_model_error(self.batching.model.stats().error)
            metrics.set_batching(
                itl_target_s=self.batching.itl_target,
                eta=self.batching.headroom,
                step_tokens=self.batching.targets.max_step_tokens,
                running_cap=self.batching.targets.max_running,
            )

    def _on_step(self, report: StepReport) -> None:
        sample = StepSample(
            report.seconds,
            report.prefill_tokens,
            report.decode_tokens,
            report.decode_context,
            report.prefill_context,
        )
        if self.batching is not None:
            targets = self.batching.observe(sample)
            if targets is not None:
                self._send(targets)
        self.scheduler.observe_step(sample)

    def _send(self, targets: Targets) -> None:
        if self._steered is not None:
            self._steered.set_targets(
                max_step_tokens=targets.max_step_tokens, max_running=targets.max_running
            )
            self.scheduler.capacity_changed()

    async def _watched(
        self, events: AsyncIterator[Event], request: Request
    ) -> AsyncGenerator[Event, None]:
        prompt = request.prompt_token_ids or ()
        permit = self.limiter.start(max(1, len(prompt)))
        try:
            async with aclosing(cast("AsyncGenerator[Event, None]", events)) as stream:
                async for event in stream:
                    if isinstance(event, Delta) and not event.prompt:
                        permit.tokens(len(event.token_ids), self._clock.monotonic())
                    yield event
            permit.finish()
        except HeadraceError as error:
            failure = next((f for kind, f in _FAILURES if isinstance(error, kind)), None)
            if failure is None:
                permit.cancel()
            else:
                permit.fail(failure, error.retry_after_s)
            raise
        finally:
            permit.cancel()


def _plain(decision: BatchDecision) -> dict[str, object]:
    return {
        "step": decision.step,
        "at_s": round(decision.at, 6),
        "decodes": decision.decodes,
        "prefill_tokens": decision.prefill_tokens,
        "predicted_s": round(decision.predicted, 6),
        "itl_target_s": round(decision.itl_target, 6),
        "itl_p99_s": None if decision.itl_p99 is None else round(decision.itl_p99, 6),
        "max_step_tokens": decision.targets.max_step_tokens,
        "max_running": decision.targets.max_running,
        "binding": decision.binding.value,
        "sent": decision.sent,
        "reason": decision.reason,
    }
