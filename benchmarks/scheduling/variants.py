"""Our scheduler as it is, and with one part left out at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from benchmarks.scheduling.drivers import FIXED, Driver
from benchmarks.scheduling.engine import Budget, Engine, fixed_budget, inverse_budget
from benchmarks.scheduling.ours import POLICY, Ours

from headrace.core.clock import VirtualClock
from headrace.core.request import PriorityClass
from headrace.scheduling.batching import BatchController, BatchLimits
from headrace.scheduling.cost_model import StepCostModel
from headrace.scheduling.forecast import FixedForecaster, Forecaster
from headrace.scheduling.policy import SchedulingPolicy

ITL_S = 0.1
MOST_STEP_TOKENS = 2048

Make = Callable[[Engine], Driver]


def with_slots_for_all(policy: SchedulingPolicy) -> SchedulingPolicy:
    for priority_class in PriorityClass:
        own = policy.classes[priority_class]
        policy = policy.with_class(priority_class, replace(own, slots=1.0))
    return replace(policy, express=0.0)


def ours(
    policy: SchedulingPolicy = POLICY,
    budget: Callable[[], Budget] = lambda: inverse_budget(ITL_S, 0.95),
    forecaster: Callable[[VirtualClock], Forecaster] | None = None,
) -> Make:
    return lambda engine: Ours(engine, policy, budget=budget(), forecaster=forecaster)


class Learnt(Ours):
    """With the production controller of the step budget, which learns the step times."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.controller = BatchController(
            self.clock,
            StepCostModel(),
            BatchLimits(MOST_STEP_TOKENS, engine.slots),
            itl_target=ITL_S,
        )
        self.budget = self.controller.step_budget
        self.listeners.append(self.controller.learn)


DEEP = replace(POLICY, shed=False)
"""Refuses nobody, so that a backlog builds up in which order alone decides."""

VARIANTS: dict[str, Make] = {
    "ours": ours(),
    "learnt step budget": Learnt,
    "fixed step budget": ours(budget=lambda: fixed_budget(FIXED)),
    "no late lane": ours(replace(POLICY, late_lane=False)),
    "no guard lane": ours(replace(POLICY, guard_every=0)),
    "no shortest-cost": ours(replace(POLICY, kappa=0.0)),
    "no service window": ours(replace(POLICY, window_s=math.inf)),
    "no push-out": ours(replace(POLICY, push_out=False)),
    "no slot reservation": ours(with_slots_for_all(POLICY)),
    "no preemption": ours(replace(POLICY, preemption=False)),
    "no revocation": ours(replace(POLICY, revoke_margin_s=-1.0)),
    "no size bias": ours(replace(POLICY, size_bias=0.0)),
    "no share bias": ours(replace(POLICY, share_bias=0.0)),
    "no length forecast": ours(forecaster=lambda _: FixedForecaster()),
    "hand over at once": ours(replace(POLICY, partials=1000)),
    "automatic targets": ours(replace(POLICY, auto_targets=True)),
    "no slots, no preemption": ours(replace(with_slots_for_all(POLICY), preemption=False)),
    "no admission": ours(DEEP),
    "no admission, no late lane": ours(replace(DEEP, late_lane=False)),
    "no admission, no guard lane": ours(replace(DEEP, guard_every=0)),
    "no admission, no shortest-cost": ours(replace(DEEP, kappa=0.0)),
    "no admission, no service window": ours(replace(DEEP, window_s=math.inf)),
}
