"""Who is refused, and when to come back.

A request waits at least until the prompts of its own and more urgent classes that are before it
have been computed, and until a slot is free. If that and its own prompt are beyond the target,
somebody must go, and fairly: the one with the largest key of the flow that has the most queued work
per weight, which may be the newcomer. (vLLM's --max-num-queued-tokens is half of this rule.) Less
urgent classes never count against a more urgent one; at the hard limits they go first.

How much of the target may be used up by waiting depends on the request: less for one larger than
usual, as refusing one large request keeps several small ones in time; less for a flow that
fills more than its weighted share of the slots, since it is who causes the overload, and somewhat
more for a flow below its share. A flow alone has no others to be spared.
"""

from __future__ import annotations

import math
import random

from headrace.core.errors import Overloaded
from headrace.core.request import PriorityClass
from headrace.scheduling.books import Books
from headrace.scheduling.entry import Entry
from headrace.scheduling.policy import SchedulingPolicy

__all__ = ["Admission", "retry_after_s"]

_LEAST_BY_SIZE = 0.3
_LEAST_BY_SHARE, _MOST_BY_SHARE = 0.5, 1.1
_OWN_PROMPT = 0.5
"""Of the target; who alone takes longer is not refused for its size."""


class Admission:
    """`make_room` for a newcomer, or refuse it. Nothing is counted for it before it is in."""

    def __init__(self, books: Books, rng: random.Random) -> None:
        self._books = books
        self._rng = rng

    def make_room(self, entry: Entry) -> None:
        """Pushes others out for a newcomer, or raises Overloaded."""
        books = self._books
        policy, own = books.policy, entry.priority_class
        while self._beyond_limits(entry):
            lower = self._least_urgent(own) if policy.push_out else None
            if lower is None:
                self._push_out(entry, "queue_full", own_flow=False)
            else:
                self._refuse(lower, "queue_full")
        if not policy.shed:
            return
        target = books.target_s(own)
        limit = policy.tolerance * target
        fair = limit * self.fairness(entry)
        # Several flows have their margin from `fairness`.
        margin = books.waits.factor if books.slots.flows_seen < 2 else 1.0
        own_prompt = min(books.prefill_s(entry), _OWN_PROMPT * target)
        while (wait := books.wait_s(own)) and (expected := margin * wait + own_prompt) > fair:
            # Others need not make room for what is too much only for this one.
            self._push_out(entry, "predicted_wait", own_flow=expected <= limit)

    def fairness(self, entry: Entry) -> float:
        """How much of the target a request may be predicted to take."""
        policy, slots = self._books.policy, self._books.slots
        if slots.flows_seen < 2:
            return 1.0
        size = slots.usual_work / entry.work if slots.usual_work else 1.0
        share = 1.0 / slots.share_used(entry, self._books.capacity)
        return float(
            min(max(size**policy.size_bias, _LEAST_BY_SIZE), 1.0)
            * min(max(share**policy.share_bias, _LEAST_BY_SHARE), _MOST_BY_SHARE)
        )

    def _beyond_limits(self, entry: Entry) -> bool:
        """An idle scheduler takes any request."""
        books = self._books
        waiting = sum(books.backlog.choices)
        held = books.slots.total + waiting
        if not held:
            return False
        if held + entry.choices > books.capacity + books.policy.max_queue:
            return True
        tokens = sum(books.backlog.tokens)
        return waiting > 0 and tokens + entry.tokens > books.policy.max_queued_tokens

    def _least_urgent(self, above: PriorityClass) -> Entry | None:
        """Whom to refuse of the classes less urgent than `above`."""
        for priority_class in reversed(PriorityClass):
            if priority_class <= above:
                return None
            queue = self._books.queues[priority_class]
            heaviest = queue.heaviest()
            if heaviest is not None:
                return queue.last_of(heaviest)
        return None

    def _push_out(self, entry: Entry, reason: str, *, own_flow: bool) -> None:
        """One of the newcomer's class, or even of its flow, or raises for the newcomer."""
        victim = None
        if self._books.policy.push_out:
            queue, flow = self._books.queues[entry.priority_class], self._books.flow_of(entry)
            heaviest = flow if own_flow else queue.heaviest(flow, entry.work)
            if heaviest is not None:
                victim = queue.last_of(heaviest)
            if heaviest is flow and victim is not None and entry.key >= victim.key:
                victim = None
        if victim is None:
            self._books.counters.shed(entry.claim, reason)
            raise self._overloaded(entry, reason)
        self._refuse(victim, reason)

    def _refuse(self, entry: Entry, reason: str) -> None:
        books = self._books
        error = self._overloaded(entry, reason)
        books.counters.shed(entry.claim, reason)
        books.drop(entry)
        entry.interrupt(error)

    def _overloaded(self, entry: Entry, reason: str) -> Overloaded:
        books, own = self._books, entry.priority_class
        wait = books.wait_s(own) or 0.0
        why = "its queue is full" if reason == "queue_full" else "the wait would be too long"
        return Overloaded(
            f"The server is overloaded: {why}. Please retry later.",
            retry_after_s=retry_after_s(books.policy, wait, books.target_s(own), self._rng),
            reason=reason,
            queue_position=books.backlog.before(own)[0],
        )


def retry_after_s(
    policy: SchedulingPolicy, wait_s: float, target_s: float, rng: random.Random
) -> float:
    """When the queue will have drained to the target, as predicted; with jitter, so that those
    refused together do not come back together."""
    excess = wait_s - target_s if math.isfinite(target_s) else wait_s
    least, most = policy.retry_least_s, policy.retry_most_s
    return min(max(min(max(excess, least), most) * rng.uniform(0.8, 1.2), least), most)
