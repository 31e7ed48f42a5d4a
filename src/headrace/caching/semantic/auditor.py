"""Judging what the tier did and what it did not dare, behind the requests' backs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.caching.entry import CorruptEntryError, Entry
from headrace.caching.semantic.base import Verifier
from headrace.caching.semantic.estimate import FalseHits
from headrace.caching.semantic.judge import Judge
from headrace.caching.semantic.questions import Asked, Stored
from headrace.core.events import Delta

__all__ = ["Auditor", "Case", "Read"]

Read = Callable[[bytes], Awaitable[Entry | None]]
_MOST_WAITING = 256


@dataclass(frozen=True, slots=True)
class Case:
    """A question and a stored one. `sampled`: it was served, or would have been, and was drawn at
    random; otherwise the verifier was unsure."""

    asked: Asked
    stored: Stored
    similarity: float
    sampled: bool


class Auditor:
    """One case at a time, in a task of its own. What it finds out goes to the verifier and, for
    sampled ones, to the estimate; `decided` hears of every verdict. More cases than it can keep
    push out the oldest."""

    def __init__(
        self,
        judge: Judge,
        verifier: Verifier,
        estimate: FalseHits,
        *,
        read: Read,
        decided: Callable[[Case, bool], None],
    ) -> None:
        self._judge = judge
        self._verifier = verifier
        self._estimate = estimate
        self._read = read
        self._decided = decided
        self._cases: deque[Case] = deque(maxlen=_MOST_WAITING)
        self._something = asyncio.Event()
        self._known: deque[tuple[bytes, str]] = deque(maxlen=4 * _MOST_WAITING)
        self.approved = 0
        self.rejected = 0
        self.open = 0

    def submit(self, case: Case) -> None:
        name = (case.stored.key, case.asked.wording)
        if not case.sampled:
            if name in self._known:
                return
            self._known.append(name)
        self._cases.append(case)
        self._something.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._something.wait()
            while self._cases:
                await self._take(self._cases.popleft())
            self._something.clear()

    async def _take(self, case: Case) -> None:
        entry = await self._read(case.stored.key)
        answer = None if entry is None else _text(entry)
        right = None
        if answer is not None:
            right = await self._judge.same(case.asked.text, case.stored.question.text, answer)
        if right is None:
            self.open += 1
            return
        if right:
            self.approved += 1
        else:
            self.rejected += 1
        self._verifier.observe(
            case.asked.prepared, case.stored.question.prepared, case.similarity, right=right
        )
        if case.sampled:
            self._estimate.add(wrong=not right)
        self._decided(case, right)


def _text(entry: Entry) -> str | None:
    try:
        events = entry.events()
    except CorruptEntryError:
        return None
    return "".join(e.text for e in events if isinstance(e, Delta) and e.index == 0) or None
