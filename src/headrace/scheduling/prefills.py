"""Prompts with the backend that have no first token yet."""

from __future__ import annotations

from headrace.core.request import PriorityClass
from headrace.scheduling.entry import Entry

__all__ = ["Prefills"]


class Prefills:
    """What of them is computed is known only in sum, from step reports: the rest of a single
    prompt may be less than its tokens, the sum is right."""

    def __init__(self) -> None:
        self._entries: dict[Entry, None] = {}
        self._tokens = 0
        self._computed = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, entry: Entry) -> bool:
        return entry in self._entries

    def add(self, entry: Entry) -> None:
        self._entries[entry] = None
        self._tokens += entry.tokens

    def remove(self, entry: Entry) -> None:
        """It has its first token, or is gone. Idempotent."""
        if entry not in self._entries:
            return
        del self._entries[entry]
        self._tokens -= entry.tokens
        self._computed = max(0.0, self._computed - entry.tokens)
        if not self._entries:
            self._computed = 0.0

    def advance(self, tokens: int) -> None:
        self._computed = min(self._computed + tokens, float(self._tokens))

    @property
    def remaining(self) -> float:
        """Tokens still to be computed, over all."""
        return self._tokens - self._computed

    def before(self, priority_class: PriorityClass) -> float:
        """Of these, what a newcomer of the class waits for: the backend computes the more urgent
        first, so what is computed already is taken to be theirs."""
        tokens = sum(e.tokens for e in self._entries if e.priority_class <= priority_class)
        return max(0.0, tokens - self._computed)

    def ahead_of(self, priority_class: PriorityClass, tokens: float) -> tuple[int, float]:
        """How many of this or a more urgent class there are, and the tokens of those among them
        that a backend serves before one of so many: it prefers the short."""
        count = ahead = 0
        for entry in self._entries:
            if entry.priority_class <= priority_class:
                count += 1
                if entry.tokens <= tokens or entry.priority_class < priority_class:
                    ahead += entry.tokens
        return count, max(0.0, ahead - self._computed)
