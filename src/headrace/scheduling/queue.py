"""Order within one priority class: which flow, and which of its requests.

Every waiting request ages at the same rate, so a key fixed at arrival,

    key = arrival + slack[class] + min(kappa * work, cap),

orders by priority, age and shortest predicted work at once, without ever being recomputed. Within a
flow, requests on time go by key; those that have missed their target wait in a late lane, which
is served when nothing is on time, and else by credit: `late_share` of what was served on time.

Between flows, virtual counters of served work per weight (VTC, Sheng et al., OSDI 2024) with a
window (DLPM, arXiv 2501.14312): a flow is eligible while its counter is at most `window` above the
least one of all waiting flows; among eligible flows the best key wins.

Bounds, which the property tests check:

* A waiting flow's counter is at least the least one, and at most `window + w/weight` above it
  where `w` is the largest work of one request, since it was eligible when it was last charged. So
  the served work per weight of two flows that both wait throughout an interval differs by at most
  `2 * (window + w/weight)`, plus what was mispredicted; by half that from a start with equal
  counters. Guard turns are beyond it: they are at most a share of 1/guard_every.
* Within a flow's on-time lane nothing passes a request that arrived more than `slack + cap` later:
  its key would be larger.
* With credit `late_share`, late work gets at least `late_share / (1 + late_share)` of what the flow
  is served, less one request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from headrace.scheduling.entry import Entry, Lane, LazyHeap
from headrace.scheduling.policy import SchedulingPolicy

__all__ = ["ClassQueue", "Flow"]

_FEWEST_FLOWS = 256


def _waits(entry: Entry, visit: float) -> bool:
    return entry.visit == visit


def _on_time(entry: Entry, visit: float) -> bool:
    return entry.visit == visit and entry.lane is Lane.ON_TIME


def _late(entry: Entry, visit: float) -> bool:
    return entry.visit == visit and entry.lane is Lane.LATE


class Flow:
    """One tenant's queue in one class. `virtual` is served work per weight; `count` of its requests
    wait here, `held` are admitted and not with the backend, with so many `choices`, prompt `tokens`
    and a `load` of predicted work."""

    __slots__ = (
        "by_key",
        "choices",
        "count",
        "credit",
        "held",
        "late",
        "load",
        "longest",
        "name",
        "offered",
        "parked",
        "stamp",
        "tokens",
        "virtual",
        "weight",
    )

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.virtual = 0.0
        self.count = 0
        self.held = 0
        self.choices = 0
        self.tokens = 0
        self.load = 0.0
        self.credit = 0.0
        self.stamp = 0
        self.offered: tuple[float, Entry] | None = None
        self.parked = False
        self.by_key: LazyHeap[Entry] = LazyHeap(_on_time)
        self.late: LazyHeap[Entry] = LazyHeap(_late)
        self.longest: LazyHeap[Entry] = LazyHeap(_waits, newest_first=True)

    def hold(self, entry: Entry) -> None:
        """One of its requests is admitted, and not with the backend."""
        self.held += 1
        self.choices += entry.choices
        self.tokens += entry.tokens
        self.load += entry.work

    def unhold(self, entry: Entry) -> None:
        self.held -= 1
        self.choices -= entry.choices
        self.tokens -= entry.tokens
        self.load = self.load - entry.work if self.held else 0.0

    def candidate(self, late_penalty: float) -> tuple[float, Entry] | None:
        """The request to serve next, with the key it competes at. A late one competes as if it
        had arrived a target later."""
        due = self.by_key.top()
        late = self.late.top()
        if late is not None and (due is None or self.credit >= late[1].work):
            return late[1].key + late_penalty, late[1]
        return due

    def credit_turn(self, entry: Entry, share: float) -> None:
        """After `entry` has been taken."""
        late = self.late.top()
        if entry.lane is Lane.LATE:
            self.credit = max(0.0, self.credit - entry.work)
        elif late is not None:
            self.credit = min(self.credit + share * entry.work, late[1].work)
        if late is None:
            self.credit = 0.0


def _flow_current(flow: Flow, stamp: float) -> bool:
    return flow.count > 0 and flow.stamp == stamp


def _flow_at(flow: Flow, virtual: float) -> bool:
    return flow.count > 0 and flow.virtual == virtual


class ClassQueue:
    """The waiting requests of one class. All operations are O(log n) amortised."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._late_after = 0.0
        self.flows: dict[str, Flow] = {}
        self.count = 0
        self._by_key: LazyHeap[Flow] = LazyHeap(_flow_current)
        self._beyond: LazyHeap[Flow] = LazyHeap(_flow_current)
        self._by_virtual: LazyHeap[Flow] = LazyHeap(_flow_at)
        self._oldest: LazyHeap[Entry] = LazyHeap(_waits)
        self._next_late: LazyHeap[Entry] = LazyHeap(_on_time)
        self._last_virtual = 0.0
        self._sweep_at = _FEWEST_FLOWS
        self._late_from = math.inf
        self._best: tuple[float, Entry] | None = None
        self._best_known = False

    def configure(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        for flow in self.flows.values():
            self._refresh(flow)

    def flow(self, name: str, weight: float) -> Flow:
        flow = self.flows.get(name)
        if flow is None:
            if len(self.flows) >= self._sweep_at:
                self._forget_idle()
            flow = self.flows[name] = Flow(name, weight)
            flow.virtual = self._last_virtual
        flow.weight = weight
        return flow

    def add(self, entry: Entry, flow: Flow, now: float, late_after: float) -> None:
        """`late_after` is the target of this class now; what misses it goes to the late lane."""
        self._late_after = late_after
        if not flow.count:
            least = self._by_virtual.top()
            # Idle time earns no credit.
            flow.virtual = max(flow.virtual, self._last_virtual if least is None else least[0])
        entry.visit += 1
        flow.count += 1
        self.count += 1
        entry.lane = Lane.ON_TIME
        if self._policy.late_lane and now > entry.latest + late_after:
            entry.lane = Lane.LATE
            flow.late.push(entry.arrival, entry, entry.visit)
        else:
            flow.by_key.push(entry.key, entry, entry.visit)
            self._next_late.push(entry.latest, entry, entry.visit)
            self._late_from = min(self._late_from, entry.latest)
        flow.longest.push(-entry.key, entry, entry.visit)
        self._oldest.push(entry.arrival, entry, entry.visit)
        if flow.count == 1:
            self._by_virtual.push(flow.virtual, flow, flow.virtual)
        self._refresh(flow)

    def remove(self, entry: Entry, flow: Flow) -> None:
        """Takes out a waiting request that will not be served."""
        self._take(entry, flow)
        self._refresh(flow)

    def serve(self, entry: Entry, flow: Flow) -> None:
        """Takes out a waiting request that has its turn."""
        self._take(entry, flow)
        flow.credit_turn(entry, self._policy.late_share)
        self._refresh(flow)

    def _take(self, entry: Entry, flow: Flow) -> None:
        entry.visit += 1
        flow.count -= 1
        self.count -= 1
        self._best_known = False

    def charge(self, flow: Flow, work: float) -> None:
        """Counts `work` seconds as served; negative gives back what was predicted too high."""
        flow.virtual += work / flow.weight
        self._best_known = False
        if work > 0:
            self._last_virtual = max(self._last_virtual, flow.virtual - work / flow.weight)
        if flow.count:
            self._by_virtual.push(flow.virtual, flow, flow.virtual)
            if flow.parked:
                self._refresh(flow)

    def relegate(self, now: float, late_after: float) -> None:
        """Moves those that have missed their target to the late lanes."""
        self._late_after = late_after
        if now <= self._late_from + late_after or not self._policy.late_lane:
            return
        while (first := self._next_late.top()) is not None and now > first[0] + late_after:
            self._next_late.pop()
            entry = first[1]
            entry.lane = Lane.LATE
            flow = self.flows[entry.flow]
            flow.late.push(entry.arrival, entry, entry.visit)
            if flow.credit > 0.0 or flow.offered is None or flow.offered[1] is entry:
                self._refresh(flow)
        self._late_from = math.inf if first is None else first[0]

    def best(self) -> tuple[float, Entry] | None:
        """The candidate with the best key among eligible flows."""
        if not self._best_known:
            self._best, self._best_known = self._find_best(), True
        return self._best

    def _find_best(self) -> tuple[float, Entry] | None:
        least = self._by_virtual.top()
        if least is None:
            return None
        horizon = least[0] + self._policy.window_s
        while (parked := self._beyond.top()) is not None and parked[1].virtual <= horizon:
            self._beyond.pop()
            self._offer(parked[1])
        while (first := self._by_key.top()) is not None:
            flow = first[1]
            if flow.virtual <= horizon:
                return flow.offered
            self._by_key.pop()
            flow.parked = True
            self._beyond.push(flow.virtual, flow, flow.stamp)
        return None

    def little_served(self, most: int) -> Iterator[Entry]:
        """Candidates of flows that were served little, for when the best may not go."""
        for flow in self._by_virtual.near_top(most):
            if flow.offered is not None:
                yield flow.offered[1]

    def oldest(self) -> Entry | None:
        first = self._oldest.top()
        return None if first is None else first[1]

    def waiting(self) -> Iterator[Entry]:
        """All that wait, in no order."""
        return self._oldest.living()

    def heaviest(self, newcomer: Flow | None = None, work: float = 0.0) -> Flow | None:
        """The flow with the most queued work per weight, of those with somebody waiting and that
        of a newcomer, which adds `work`."""
        best, most = None, -1.0
        for flow in self.flows.values():
            if flow is newcomer:
                load = (flow.load + work) / flow.weight
            elif flow.count:
                load = flow.load / flow.weight
            else:
                continue
            if load > most:
                best, most = flow, load
        return best

    def last_of(self, flow: Flow) -> Entry | None:
        """The waiting request of a flow that would be served last by key."""
        last = flow.longest.top()
        return None if last is None else last[1]

    def _forget_idle(self) -> None:
        """Drops flows that a new one would not differ from."""
        least = self._by_virtual.top()
        floor = self._last_virtual if least is None else least[0]
        self.flows = {
            name: flow for name, flow in self.flows.items() if flow.held or flow.virtual > floor
        }
        self._sweep_at = max(_FEWEST_FLOWS, 2 * len(self.flows))

    def _refresh(self, flow: Flow) -> None:
        """After anything that may change who of the flow is next."""
        self._best_known = False
        flow.stamp += 1
        flow.offered = flow.candidate(self._late_after)
        self._offer(flow)

    def _offer(self, flow: Flow) -> None:
        flow.parked = False
        if flow.offered is not None:
            self._by_key.push(flow.offered[0], flow, flow.stamp)
