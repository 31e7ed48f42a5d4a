"""A second opinion on two questions, asked of a language model off the request path."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Protocol

from headrace.core.clock import Clock

__all__ = ["Ask", "Judge", "ModelJudge"]

Ask = Callable[[str], Awaitable[str]]
"""A prompt to a model's greedy answer. May raise anything."""

_PROMPT = """\
You compare two questions that users asked an assistant. Everything around them (instructions, \
earlier messages, settings) is the same. The assistant has answered question A. Decide whether \
that very answer is also a complete and correct answer to question B.

Say NO if any number, unit, date, name, place, negation, direction, order, quantity, tense, \
language or requested format differs, or if B asks for more, less or something else.

Question A: {stored}

Answer to A: {answer}

Question B: {asked}

Reply with one word, YES or NO."""
_VERDICT = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)
_LONGEST_ANSWER = 4_000


class Judge(Protocol):
    """Whether the answer to one question answers another one too; None if that stays open."""

    async def same(self, asked: str, stored: str, answer: str) -> bool | None: ...


class ModelJudge:
    """Asks within a budget of calls per minute; above it, and when the model fails or answers
    neither yes nor no, the question stays open. Event loop only."""

    def __init__(self, ask: Ask, clock: Clock, *, calls_per_minute: float) -> None:
        self._ask = ask
        self._clock = clock
        self._per_second = calls_per_minute / 60.0
        self._most = max(1.0, calls_per_minute / 4.0)
        self._budget = self._most
        self._filled_at = clock.monotonic()
        self.calls = 0
        self.failures = 0

    async def same(self, asked: str, stored: str, answer: str) -> bool | None:
        if not self._spend():
            return None
        self.calls += 1
        prompt = _PROMPT.format(
            stored=_quoted(stored), answer=_quoted(answer[:_LONGEST_ANSWER]), asked=_quoted(asked)
        )
        try:
            said = await self._ask(prompt)
        except Exception:  # noqa: BLE001 - a judge that fails has no opinion
            self.failures += 1
            return None
        verdict = _VERDICT.match(said)
        if verdict is None:
            self.failures += 1
            return None
        return verdict.group(1).lower() == "yes"

    def _spend(self) -> bool:
        now = self._clock.monotonic()
        self._budget = min(self._most, self._budget + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True


def _quoted(text: str) -> str:
    """Fenced, so that what users wrote is not taken for the judge's instructions."""
    return "<<<" + text.replace("<<<", "< < <").replace(">>>", "> > >") + ">>>"
