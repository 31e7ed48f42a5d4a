"""Whose turn it is, and whose turn is taken back."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.core.request import PriorityClass
from headrace.scheduling.base import Revoked
from headrace.scheduling.books import Books
from headrace.scheduling.entry import Entry

__all__ = ["Turns"]

_CLASSES = tuple(PriorityClass)
_ALTERNATIVES = 8
_PREEMPT_FROM = 0.5


class Turns:
    """Starvation bound: a request that waits longer than its class's `guard_s` is due in the guard
    lane, which has every `guard_every`-th turn and goes by age over all classes. Once due it has
    its turn after at most `guard_every * (older due ones + 1)` further turns. While a guard turn
    is owed to one that has no room yet, only more urgent classes are served, so room comes.
    """

    def __init__(
        self,
        books: Books,
        *,
        preempt: Callable[[Entry], None] | None,
        timer: Callable[[], float] | None,
    ) -> None:
        self._books = books
        self._preempt = preempt
        self._timer = timer
        self._since_guard = 0

    def give(self, now: float) -> None:
        """Gives the turns that are due."""
        books, timer = self._books, self._timer
        while any(queue.count for queue in books.queues):
            began = timer() if timer is not None else 0.0
            entry = self._pick(now)
            if entry is not None:
                books.counters.turn(entry, now, books.queues[entry.priority_class].oldest())
                self._since_guard = 0 if entry.by_guard else self._since_guard + 1
                books.dispatch(entry, now)
            if timer is not None:
                books.counters.decided(timer() - began)
            if entry is None:
                return
            entry.wake()

    def _pick(self, now: float) -> Entry | None:
        books = self._books
        capacity = books.capacity
        is_open = books.slots.open_classes(now, capacity)
        if not is_open[0]:
            return None
        heads = self._heads(now, is_open)
        served: int = len(_CLASSES)
        guarded = self._guarded(now)
        if guarded is not None:
            if self._may_go(guarded, now, capacity):
                guarded.by_guard = True
                return guarded
            served = guarded.priority_class
        for _, priority_class, best in heads:
            if priority_class >= served:
                continue
            entry = best
            if not books.slots.favoured(best, capacity):
                entry = self._favoured(priority_class, now, capacity) or best
            if self._may_go(entry, now, capacity):
                return entry
            if entry.choices > 1:
                served = priority_class  # nobody takes what a wide one waits for
        return None

    def _favoured(self, priority_class: PriorityClass, now: float, capacity: int) -> Entry | None:
        """Of flows that were served little, one that fills less than its share of the slots: it
        goes before those that fill more, however long they have waited."""
        books = self._books
        for other in books.queues[priority_class].little_served(_ALTERNATIVES):
            if books.slots.favoured(other, capacity) and self._may_go(other, now, capacity):
                return other
        return None

    def _heads(self, now: float, is_open: list[bool]) -> list[tuple[float, PriorityClass, Entry]]:
        """The best of each class that has room, best first."""
        books = self._books
        heads = []
        for priority_class in _CLASSES:
            queue = books.queues[priority_class]
            if not queue.count or not is_open[priority_class]:
                continue
            queue.relegate(now, books.target_s(priority_class))
            best = queue.best()
            if best is not None:
                heads.append((best[0], priority_class, best[1]))
        heads.sort(key=lambda head: head[:2])
        return heads

    def _guarded(self, now: float) -> Entry | None:
        """Whoever has waited too long longest, if a guard turn is due."""
        policy = self._books.policy
        if not policy.guard_every or self._since_guard < policy.guard_every - 1:
            return None
        due = None
        for queue in self._books.queues:
            oldest = queue.oldest() if queue.count else None
            if oldest is None:
                continue
            guard = policy.classes[oldest.priority_class].guard_s
            if now - oldest.arrival > guard and (due is None or oldest.arrival < due.arrival):
                due = oldest
        return due

    def _may_go(self, entry: Entry, now: float, capacity: int) -> bool:
        return self._books.slots.admits(entry, now, capacity) and self._prompt_may_go(entry)

    def _prompt_may_go(self, entry: Entry) -> bool:
        """Hands prompts over just ahead of their computation, as order is ours only until then:
        at least two steps' worth of those that the engine serves first. Backends that report no
        steps have limits of their own."""
        speed, policy = self._books.speed, self._books.policy
        if entry.priority_class is PriorityClass.SYSTEM or not speed.reports_steps:
            return True
        tokens = entry.tokens if policy.shortest_first else math.inf
        count, ahead = self._books.prefills.ahead_of(entry.priority_class, tokens)
        if count < policy.partials or speed.prefill_rate is None:
            return True
        return ahead < speed.prefill_rate * max(policy.prefill_ahead_s, 2.0 * speed.step_s)

    def revoke_for(self, entry: Entry, now: float) -> None:
        """Takes a turn back from a request that the backend has not begun with, if `entry` is
        clearly more urgent and waits for its slot."""
        books = self._books
        margin, capacity = books.policy.revoke_margin_s, books.capacity
        if margin < 0 or not books.unstarted or books.slots.total <= capacity:
            return
        if books.slots.admits(entry, now, capacity):
            return
        last = max(books.unstarted, key=lambda e: (e.priority_class, e.key, e.number))
        if last.priority_class < entry.priority_class or last.key <= entry.key + margin:
            return
        books.take_back(last)
        books.counters.revoked += 1
        last.interrupt(Revoked())
        self.give(now)

    def preempt_one(self, now: float) -> None:
        """For the most urgent request that waits for a slot and is about to miss its target."""
        books = self._books
        capacity = books.capacity
        if self._preempt is None or books.slots.occupied < capacity:
            return
        for priority_class in _CLASSES[:-1]:
            queue = books.queues[priority_class]
            if not queue.count:
                continue
            target = books.target_s(priority_class)
            queue.relegate(now, target)
            best = queue.best()
            if best is None or books.slots.admits(best[1], now, capacity):
                continue
            spare = best[1].arrival + target - now - books.prefill_s(best[1])
            if not 0.0 <= spare <= _PREEMPT_FROM * target:
                continue
            victim = self._victim(best[1])
            if victim is None:
                return
            victim.preemptions += 1
            books.counters.preempted += 1
            books.slots.preempted(victim)
            self._preempt(victim)
            self.give(now)
            return

    def _victim(self, waiter: Entry) -> Entry | None:
        """Of the least urgent class whoever loses least, unless it is nearly done. What it has to
        compute again may be no more than what the waiter needs: else all lose more than one wins.
        """
        books, policy = self._books, self._books.policy
        victims = [
            e
            for e in books.running
            if e.priority_class > waiter.priority_class
            and e.choices == 1
            and e.preemptions < policy.preempt_limit
            and e.forecast.mean - e.generated > policy.preempt_spares_tokens
            and (e.tokens + e.generated) * books.speed.prefill_token_s <= waiter.work
            and not books.slots.is_preempted(e)
        ]
        return min(victims, key=lambda e: (-e.priority_class, e.generated), default=None)
