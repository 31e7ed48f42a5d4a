"""How much one step of the engine should do: prompt tokens beside the decodes, and how many run.

Running streams always advance; what the inter-token latency (ITL) target leaves of a step goes to
prompts. The cost model says how many tokens that is; a safety factor, adapted to the measured p99
by additive increase and multiplicative decrease, covers what the model does not know. An absolute
target also bounds how many sequences run. The automatic one never does: it is what this machine
needs to run as many as the operator allows, with a chunk of a prompt beside them and the safety
factor over both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from headrace.core.clock import Clock
from headrace.scheduling.base import StepSample
from headrace.scheduling.cost_model import StepCostModel

__all__ = ["BatchController", "BatchDecision", "BatchLimits", "Binding", "Targets"]

_AUTO_FLOOR_S = 0.080
_AUTO_OVER_DECODE = 1.25
_AUTO_DRIFT = 0.10
_IDLE_STEP_S = 0.200
"""Nobody waits for a token, but whoever arrives waits for the step."""

_CHUNK = 64
_AUTO_CHUNK = 128
"""Of a prompt, beside a full batch, where the target is automatic: with 64, two cores lost 6 % of
throughput at 64 clients and doubled their time to the first token, for gaps a third shorter."""
_LEAST_CHUNK = 16
"""What prompts get beside decodes where an absolute target leaves less: they must advance."""

_FIRST_STEPS = 8
_DECODE_SHARE = 0.8
"""Of the target that decodes alone may take; the rest is for prompts."""

_WINDOW = 200
_REVIEW_STEPS = 20
_ETA_START, _ETA_LEAST, _ETA_MOST = 0.9, 0.5, 1.0
_DECREASE, _INCREASE, _CALM = 0.9, 0.01, 0.9
_GROW_BY, _SHRINK_BY = 0.2, 0.1


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The operator's upper bounds. `max_step_tokens` counts prompt tokens and decodes."""

    max_step_tokens: int
    max_running: int

    def __post_init__(self) -> None:
        if self.max_step_tokens < 1 or self.max_running < 1:
            raise ValueError("a step needs at least one token and one sequence")


@dataclass(frozen=True, slots=True)
class Targets:
    """What the engine is told, for its `set_targets`."""

    max_step_tokens: int
    max_running: int


class Binding(StrEnum):
    """Which constraint decided a step's size."""

    LEARNING = "learning"
    OPERATOR = "operator_limit"
    ITL = "itl_target"
    FLOOR = "prefill_floor"
    IDLE = "no_decodes"


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """One step's size and why. Seconds. `headroom` is the safety factor on the target, `predicted`
    the time of the step if it is filled, `itl_p99` the measured one (None before any).
    `running_wanted` is what the target allows to run, before the operator's limit."""

    at: float
    step: int
    decodes: int
    decode_context: float
    prefill_context: float
    itl_target: float
    automatic: bool
    headroom: float
    itl_p99: float | None
    prefill_tokens: int
    predicted: float
    targets: Targets
    running_wanted: int
    binding: Binding
    sent: bool

    @property
    def reason(self) -> str:
        target = f"{1e3 * self.itl_target:.0f} ms{' (auto)' if self.automatic else ''}"
        beside = f"{self.prefill_tokens} prompt tokens beside {self.decodes} decodes"
        step = f"{1e3 * self.predicted:.0f} ms"
        match self.binding:
            case Binding.LEARNING:
                return f"{beside}: the machine's speed is not known yet"
            case Binding.OPERATOR:
                return f"{beside}: the configured limit; {step} are within the target of {target}"
            case Binding.IDLE:
                return f"{self.prefill_tokens} prompt tokens, nothing decodes: {step} a step"
            case Binding.FLOOR:
                return f"{beside}: the least that lets prompts advance; {step}, target {target}"
            case Binding.ITL:
                return f"{beside}: {step} fill {self.headroom:.2f} of the ITL target {target}"


class BatchController:
    """Owned by one thread. `observe` every step's sample and send the targets that it returns.

    The simulation asks `step_budget` before every step instead. An `itl_target` of None is
    automatic.
    """

    def __init__(
        self,
        clock: Clock,
        model: StepCostModel,
        limits: BatchLimits,
        *,
        itl_target: float | None = None,
        trace: int = 256,
    ) -> None:
        self._clock = clock
        self._model = model
        self._limits = limits
        self._absolute = _checked(itl_target)
        self._auto: float | None = None
        self._eta = _ETA_START
        self._gaps: deque[float] = deque(maxlen=_WINDOW)
        self._filled = 0
        self._budget = limits.max_step_tokens
        self._steps = 0
        self._peak = 0.0
        self._context = 256.0
        self._p99: float | None = None
        self._sent = Targets(limits.max_step_tokens, limits.max_running)
        self._last = StepSample(0.0, 0, 0)
        self._trace: deque[BatchDecision] = deque(maxlen=trace)

    @property
    def model(self) -> StepCostModel:
        return self._model

    @property
    def targets(self) -> Targets:
        """What the engine was last told. It starts with the operator's limits."""
        return self._sent

    @property
    def limits(self) -> BatchLimits:
        return self._limits

    @property
    def itl_target(self) -> float:
        """Seconds; the automatic one where the operator set none."""
        return self._absolute if self._absolute is not None else self._automatic_target()

    @property
    def headroom(self) -> float:
        return self._eta

    @property
    def itl_p99(self) -> float | None:
        return self._p99

    def trace(self) -> tuple[BatchDecision, ...]:
        """The latest decisions, oldest first."""
        return tuple(self._trace)

    def set_itl_target(self, seconds: float | None) -> Targets:
        """From now on; None is automatic. Returns what to send."""
        self._absolute = _checked(seconds)
        self._auto = None
        self._eta = _ETA_START
        self._forget_gaps()
        return self._resend()

    def set_limits(self, limits: BatchLimits) -> Targets:
        """Replaces the operator's bounds. Returns what to send."""
        self._limits = limits
        self._auto = None
        return self._resend()

    def observe(self, sample: StepSample) -> Targets | None:
        """Learns from a step; returns the targets if they changed enough to be sent."""
        self.learn(sample)
        decision = self._decide(
            sample.decode_tokens, sample.decode_context, sample.prefill_context, None
        )
        return decision.targets if decision.sent else None

    def learn(self, sample: StepSample) -> None:
        """Takes in a step without deciding anything."""
        self._model.observe(sample)
        self._steps += 1
        self._last = sample
        decodes = sample.decode_tokens
        self._peak = max(float(decodes), 0.99 * self._peak)
        if not decodes:
            return
        self._context += 0.05 * (sample.decode_context / decodes - self._context)
        self._gaps.append(sample.seconds)
        self._filled += sample.prefill_tokens >= 0.8 * self._budget
        if len(self._gaps) >= _WINDOW // 2 and self._steps % _REVIEW_STEPS == 0:
            self._review()

    def step_budget(
        self,
        decodes: int,
        decode_context: float = 0,
        prefill_context: float = 0,
        *,
        gap: float | None = None,
    ) -> int:
        """Prompt tokens for the step that comes next. `gap` is how long it may take where that
        is known better than from the ITL target."""
        return self._decide(decodes, decode_context, prefill_context, gap).prefill_tokens

    # The safety factor

    def _review(self) -> None:
        ordered = sorted(self._gaps)
        p99 = self._p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
        target = self.itl_target
        if p99 > target:
            self._eta = max(_ETA_LEAST, self._eta * _DECREASE)
            self._forget_gaps()
        elif p99 < _CALM * target and self._filled:
            # Only where steps were filled does a short one say that there is room.
            self._eta = min(_ETA_MOST, self._eta + _INCREASE)
        self._filled = 0

    def _forget_gaps(self) -> None:
        self._gaps.clear()
        self._filled = 0

    # The decision

    def _decide(
        self, decodes: int, decode_context: float, prefill_context: float, gap: float | None
    ) -> BatchDecision:
        target = self.itl_target
        prefill, binding = self._prefill(
            decodes, decode_context, prefill_context, target if gap is None else gap
        )
        wanted = self._running(target)
        self._budget = prefill
        new = Targets(
            min(prefill + decodes, self._limits.max_step_tokens),
            max(1, min(wanted, self._limits.max_running)),
        )
        sent = self._differs(new)
        if sent:
            self._sent = new
        decision = BatchDecision(
            self._clock.monotonic(),
            self._steps,
            decodes,
            decode_context,
            prefill_context,
            target,
            self._absolute is None,
            self._eta,
            self._p99,
            prefill,
            self._model.predict(prefill, decodes, decode_context, prefill_context),
            self._sent,
            wanted,
            binding,
            sent,
        )
        self._trace.append(decision)
        return decision

    def _prefill(
        self, decodes: int, decode_context: float, prefill_context: float, gap: float
    ) -> tuple[int, Binding]:
        most = max(1, self._limits.max_step_tokens - decodes)
        automatic = self._absolute is None
        if self._steps < _FIRST_STEPS:
            return (most if automatic else min(most, _CHUNK)), Binding.LEARNING
        if decodes:
            binding, least = Binding.ITL, _CHUNK if automatic else _LEAST_CHUNK
            seconds = self._eta * gap
        else:
            binding, least = Binding.IDLE, _CHUNK
            seconds = max(gap, _IDLE_STEP_S) if automatic else gap
        fits = self._model.prefill_budget(seconds, decodes, decode_context, prefill_context)
        if fits >= most:
            return most, Binding.OPERATOR
        if fits < least:
            return min(least, most), Binding.FLOOR
        return fits, binding

    def _running(self, target: float) -> int:
        """How many may run. Beyond half as many again as lately ran the model is not trusted."""
        if self._absolute is None:
            return self._limits.max_running
        seconds = min(_DECODE_SHARE, self._eta) * target
        trusted = int(1.5 * self._peak) + 2
        if self._steps < _FIRST_STEPS:
            return trusted
        return max(1, min(self._model.max_running(seconds, self._context), trusted))

    def _automatic_target(self) -> float:
        if self._steps < _FIRST_STEPS:
            return _AUTO_FLOOR_S
        running = self._limits.max_running
        context = running * self._context
        alone = self._model.predict(0, running, context)
        chunk = min(_AUTO_CHUNK, self._limits.max_step_tokens)
        beside = self._model.predict(chunk, running, context) / self._eta
        target = max(_AUTO_FLOOR_S, _AUTO_OVER_DECODE * alone, beside)
        if self._auto is None or abs(target / self._auto - 1.0) > _AUTO_DRIFT:
            self._auto = target
        return self._auto

    def _differs(self, new: Targets) -> bool:
        """Whether it is worth a message: small changes are not, reaching a bound is."""
        old, limits = self._sent, self._limits
        if new == old:
            return False
        grown = new.max_step_tokens - old.max_step_tokens
        if grown > old.max_step_tokens * _GROW_BY or -grown > old.max_step_tokens * _SHRINK_BY:
            return True
        if grown and new.max_step_tokens == limits.max_step_tokens:
            return True
        running = new.max_running - old.max_running
        at_bound = new.max_running in (1, limits.max_running)
        return abs(running) >= max(2, old.max_running // 8) or (running != 0 and at_bound)

    def _resend(self) -> Targets:
        last = self._last
        decision = self._decide(last.decode_tokens, last.decode_context, last.prefill_context, None)
        return decision.targets


def _checked(seconds: float | None) -> float | None:
    if seconds is not None and not 0.0 < seconds < 3600.0:
        raise ValueError("an ITL target is a positive number of seconds")
    return seconds
