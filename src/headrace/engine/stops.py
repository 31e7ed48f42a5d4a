"""Stop strings, found in streamed text wherever its pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Watches the text of one completion for stop strings. Owned by one thread.

    The text ends at the first character that completes any of `stops`, whatever the split into
    pieces; of several that end there, the longest is the match. So of `STOP` and `STOPPING` the
    first one always wins, and no complete stop is ever waited past. Text is held back only while
    its end is the beginning of some stop. With `include` the stop itself is emitted too.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._include = include
        self._automaton = _Automaton(dict.fromkeys(stop for stop in stops if stop))
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to emit, and the stop that ended it. Nothing follows a match."""
        automaton = self._automaton
        if automaton.is_empty:
            return text, None
        if self._matched is not None:
            return "", self._matched
        pending = self._held + text
        state = self._state
        for end, character in enumerate(text, len(self._held) + 1):
            state = automaton.step(state, character)
            if (stop := automaton.match[state]) is not None:
                self._matched, self._held = stop, ""
                return pending[: end if self._include else end - len(stop)], stop
        self._state = state
        safe = len(pending) - automaton.depth[state]
        self._held = pending[safe:]
        return pending[:safe], None

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """Aho-Corasick over the stops: a state is the longest beginning of a stop that ends here."""

    def __init__(self, stops: dict[str, None]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()

    @property
    def is_empty(self) -> bool:
        return len(self.depth) == 1

    def step(self, state: int, character: str) -> int:
        while (following := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return following

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self.depth)
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        self.match[state] = stop

    def _link(self) -> None:
        """Sets fallbacks breadth-first, so that each shorter state is done before a longer one."""
        queue = list(self._next[0].values())
        for state in queue:
            for character, following in self._next[state].items():
                fallback = self.step(self._fallback[state], character)
                self._fallback[following] = fallback
                if self.match[following] is None:
                    self.match[following] = self.match[fallback]
                queue.append(following)
