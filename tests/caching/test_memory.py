"""The memory tier: bytes within their budget, and the most valuable ones kept."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.caching.entry import Entry
from headrace.caching.memory import MemoryTier
from headrace.core.clock import VirtualClock
from support.keys import key


def entry(clock: VirtualClock, size: int = 600, saved_s: float = 1.0, ttl: float = 100.0) -> Entry:
    now = clock.wall()
    return Entry(b"x" * size, False, now, now + ttl, saved_s, 1, 1)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def tier(clock: VirtualClock) -> MemoryTier:
    """Room for a hundred entries of 600 bytes."""
    return MemoryTier(100_000, clock)


def ask_and_keep(tier: MemoryTier, clock: VirtualClock, number: int, **kind: float) -> bool:
    """As a server does it; whether it was a hit."""
    if tier.look(key(number)) is not None:
        return True
    tier.put(key(number), entry(clock, **kind))  # type: ignore[arg-type]  # sizes are given as int
    return False


def test_expired_ones_are_not_found(tier: MemoryTier, clock: VirtualClock) -> None:
    tier.put(key(1), entry(clock, ttl=10.0))
    clock.advance(9.0)
    assert tier.look(key(1)) is not None
    clock.advance(1.0)
    assert tier.look(key(1)) is None
    assert len(tier) == 0
    tier.put(key(1), entry(clock, ttl=0.0))
    assert len(tier) == 0


def test_a_newer_answer_replaces_the_old_one(tier: MemoryTier, clock: VirtualClock) -> None:
    tier.put(key(1), entry(clock, size=100))
    tier.put(key(1), entry(clock, size=200))
    found = tier.look(key(1))
    assert found is not None
    assert found.size == 200
    assert len(tier) == 1
    tier.remove(key(1))
    tier.remove(key(1))
    assert tier.stats().bytes == 0


def test_one_larger_than_the_budget_is_not_kept(tier: MemoryTier, clock: VirtualClock) -> None:
    tier.put(key(1), entry(clock, size=100_000))
    assert len(tier) == 0
    assert tier.stats().dropped == 1


def test_a_scan_does_not_displace_what_is_asked_for_again(
    tier: MemoryTier, clock: VirtualClock
) -> None:
    for _ in range(3):
        for number in range(75):
            ask_and_keep(tier, clock, number)
    for number in range(100, 4000):
        ask_and_keep(tier, clock, number)
    assert all(tier.look(key(number)) is not None for number in range(75))


def test_what_was_popular_gives_way_in_the_end(tier: MemoryTier, clock: VirtualClock) -> None:
    for _ in range(6):
        for number in range(80):
            ask_and_keep(tier, clock, number)
    hits = 0
    for turn in range(40):
        for number in range(100, 180):
            hits += ask_and_keep(tier, clock, number) if turn >= 30 else 0
            ask_and_keep(tier, clock, number)
    assert hits > 0.9 * 10 * 80


@pytest.mark.parametrize(
    ("better", "worse"), [({"saved_s": 10.0}, {"saved_s": 0.1}), ({"size": 300}, {"size": 3000})]
)
def test_seconds_saved_per_byte_decide(
    tier: MemoryTier, clock: VirtualClock, better: dict[str, float], worse: dict[str, float]
) -> None:
    for _ in range(30):
        for number in range(110):
            ask_and_keep(tier, clock, number, **(better if number % 2 else worse))
    kept = [number for number in range(110) if tier.look(key(number)) is not None]
    assert sum(number % 2 for number in kept) >= 50
    assert len(kept) > 55


class Machine(RuleBasedStateMachine):
    """Against a plain dictionary: never more than the budget, never anything wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.tier = MemoryTier(6_000, self.clock)
        self.last: dict[int, Entry] = {}

    @rule(number=st.integers(0, 12), size=st.integers(0, 4000), saved=st.floats(0, 5))
    def put(self, number: int, size: int, saved: float) -> None:
        self.last[number] = entry(self.clock, size, saved)
        self.tier.put(key(number), self.last[number])

    @rule(number=st.integers(0, 12))
    def look(self, number: int) -> None:
        found = self.tier.look(key(number))
        if found is not None:
            assert found is self.last[number]
            assert found.expires > self.clock.wall()

    @rule(number=st.integers(0, 12))
    def remove(self, number: int) -> None:
        self.tier.remove(key(number))
        self.last.pop(number, None)

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def within_budget(self) -> None:
        stats = self.tier.stats()
        slots = self.tier._slots
        new = {k: s.size for k, s in slots.items() if not s.proven}
        assert stats.bytes is not None
        ghosts = stats.bytes - sum(slot.size for slot in slots.values())
        assert 0 <= ghosts <= 100 * len(self.tier._ghosts)
        assert stats.bytes <= self.tier.max_bytes
        assert stats.entries == len(slots)
        assert set(self.tier._new) == set(new)
        assert self.tier._new_bytes == sum(new.values())
        assert not set(self.tier._ghosts) & set(slots)
        ranked = {k: (s.priority, s.number) for k, s in slots.items() if s.proven}
        heap = {(k, p, n) for p, n, k in self.tier._heap}
        assert all((k, *rank) in heap for k, rank in ranked.items()), "each can be evicted"
        assert len(self.tier._heap) <= 65 + 4 * len(slots)


TestMemory = Machine.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
