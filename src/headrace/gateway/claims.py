"""What a caller asks for beside its request: how urgent it is, on whose behalf, until when."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from dataclasses import dataclass, replace

from headrace.caching import NO_CONTROLS, Controls
from headrace.core.clock import Clock
from headrace.core.errors import InvalidRequest
from headrace.core.request import PriorityClass
from headrace.gateway.tenants import Tenant
from headrace.scheduling import Claim

__all__ = ["SubTenants", "Terms", "claim"]

_SUB_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}")
_STEPS = re.compile(r"[+-]?\d{1,9}", re.ASCII)
_CLASSES = {priority_class.name.lower(): priority_class for priority_class in PriorityClass}


_MEMORY_S = 60.0
_MOST_SUB_TENANTS = 256


@dataclass(frozen=True, slots=True)
class Terms:
    """As sent, and not yet clamped to what the tenant may ask for.

    `priority` is the body's field, in vLLM's direction. `x_priority`, `objective` and
    `fairness_id` are the headers X-Priority, x-gateway-inference-objective and
    x-gateway-inference-fairness-id. `timeout_s` counts from arrival. `cache` is what is asked of
    the response cache.
    """

    priority: int = 0
    x_priority: str | None = None
    objective: str | None = None
    fairness_id: str | None = None
    timeout_s: float | None = None
    cache: Controls = NO_CONTROLS


def claim(tenant: Tenant, terms: Terms, arrival: float) -> Claim:
    """What the scheduler is told. Raises InvalidRequest naming the header or field.

    The body's own word comes first, then X-Priority, then the objective; the first that says
    anything counts. Nobody is refused for asking too much: it is clamped to the tenant's highest
    class. Sub-tenants are heard from trusted tenants alone; others are what they are. Each is a
    flow with a part of its tenant's weight.
    """
    timeout = terms.timeout_s
    if timeout is not None and not 0 < timeout < math.inf:
        raise InvalidRequest(
            "'timeout' (or X-Request-Timeout) should be a finite number of seconds above 0.",
            param="timeout",
        )
    wanted = _asked(tenant, terms)
    return Claim(
        flow=_flow(tenant, terms.fairness_id),
        weight=tenant.weight,
        priority_class=max(wanted, tenant.highest_class),
        deadline=None if timeout is None else arrival + timeout,
    )


def _asked(tenant: Tenant, terms: Terms) -> PriorityClass:
    if terms.priority:
        return _steps(tenant, terms.priority)
    if terms.x_priority is not None:
        word = terms.x_priority.lower()
        if word in _CLASSES:
            return _CLASSES[word]
        if _STEPS.fullmatch(word):
            return _steps(tenant, int(word))
        raise InvalidRequest(
            f"'X-Priority' should be an integer or one of {', '.join(_CLASSES)}.",
            param="X-Priority",
        )
    # An objective is the name of something that only its gateway knows, unless it is one of ours.
    return _CLASSES.get((terms.objective or "").lower(), tenant.default_class)


def _steps(tenant: Tenant, steps: int) -> PriorityClass:
    """So many classes less urgent than the tenant's default one; negative: more urgent."""
    wanted = tenant.default_class + steps
    return PriorityClass(min(max(wanted, PriorityClass.SYSTEM), PriorityClass.BATCH))


def _flow(tenant: Tenant, fairness_id: str | None) -> str:
    if fairness_id is None or not tenant.trusted:
        return tenant.name
    if not _SUB_TENANT.fullmatch(fairness_id):
        raise InvalidRequest(
            "'x-gateway-inference-fairness-id' should be up to 64 letters, digits and . _ : @ -",
            param="x-gateway-inference-fairness-id",
        )
    return f"{tenant.name}/{fairness_id}"


class SubTenants:
    """Divides a trusted tenant's weight between the sub-tenants that it named within the last
    minute, or naming more would give it more of the server. Beyond 256 they count as the tenant
    itself. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, OrderedDict[str, float]] = {}

    def shared(self, tenant: Tenant, asked: Claim) -> Claim:
        """The claim with its part of the tenant's weight."""
        if not tenant.trusted:
            return asked
        now = self._clock.monotonic()
        seen = self._seen.setdefault(tenant.name, OrderedDict())
        seen.pop(asked.flow, None)
        while seen and next(iter(seen.values())) < now - _MEMORY_S:
            seen.popitem(last=False)
        flow = asked.flow if len(seen) < _MOST_SUB_TENANTS else tenant.name
        seen.pop(flow, None)
        seen[flow] = now
        return replace(asked, flow=flow, weight=tenant.weight / len(seen))
