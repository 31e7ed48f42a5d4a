"""The semantic tier, with a scripted embedder and verifier."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.caching.base import Match
from headrace.caching.entry import Entry, entry_of
from headrace.caching.semantic.base import EmbeddingFailedError
from headrace.caching.semantic.journal import Journal
from headrace.caching.semantic.tier import SemanticSettings, SemanticTier
from headrace.core.clock import VirtualClock
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, Usage
from support.meaning import ByWords, Letters

pytestmark = pytest.mark.anyio

PART, OTHER = b"p" * 32, b"o" * 32


class Verdicts:
    def __init__(self, *verdicts: bool | None) -> None:
        self.verdicts = list(verdicts)
        self.cases: list[tuple[str, str, str]] = []

    async def same(self, asked: str, stored: str, answer: str) -> bool | None:
        self.cases.append((asked, stored, answer))
        return self.verdicts.pop(0)


class Site:
    def __init__(self, **settings: object) -> None:
        self.clock = VirtualClock()
        self.embedder = Letters()
        self.verifier = ByWords()
        self.settings = SemanticSettings(**{"sampled": 0.0, **settings})  # type: ignore[arg-type]
        self.entries: dict[bytes, Entry] = {}
        self.judge: Verdicts | None = None
        self.journal: Journal | None = None
        self.bulletin: Board | None = None
        self.slept: list[float] = []
        self.wake = asyncio.Event()

    async def read(self, key: bytes) -> Entry | None:
        return self.entries.get(key)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.wake.wait()

    @asynccontextmanager
    async def tier(self) -> AsyncIterator[SemanticTier]:
        tier = SemanticTier(
            self.embedder,
            self.verifier,
            self.settings,
            clock=self.clock,
            rng=random.Random(1),
            judge=self.judge,
            bulletin=self.bulletin,
            journal=self.journal,
            sleep=self.sleep,
        )
        await tier.start(self.read)
        await settle()
        try:
            yield tier
        finally:
            await tier.close()

    async def knows(self, tier: SemanticTier, text: str, partition: bytes = PART) -> bytes:
        key = (text.encode() + partition).ljust(64, b".")[:64]
        log: list[Event] = [
            Start("m", "b", 1, 0),
            Delta(0, f"answer to {text}"),
            Finish(0, FinishReason.STOP),
        ]
        entry = entry_of([*log, Usage(1, 1)], created=0.0, ttl_s=1e9, saved_s=1.0)
        assert entry is not None
        self.entries[key] = entry
        tier.learn(partition, text, key, self.clock.wall() + 100.0)
        await settle()
        return key


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    """For what a thread does meanwhile."""
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


class Board:
    """A bulletin that two tiers share."""

    def __init__(self) -> None:
        self.handlers: dict[str, list[Callable[[bytes], None]]] = {}

    def publish(self, kind: str, message: bytes) -> None:
        for handler in self.handlers.get(kind, []):
            handler(message)

    def subscribe(self, kind: str, handler: Callable[[bytes], None]) -> None:
        self.handlers.setdefault(kind, []).append(handler)

    def on_gap(self, handler: Callable[[], None]) -> None: ...


def refused(tier: SemanticTier) -> dict[str, int]:
    return dict(tier.refused)


async def test_a_question_that_means_the_same_is_found() -> None:
    site = Site()
    async with site.tier() as tier:
        key = await site.knows(tier, "how do birds fly?")
        match = await tier.find(PART, "birds how do fly?")
        assert isinstance(match, Match)
        assert match.key == key
        assert match.similarity == pytest.approx(1.0, abs=1e-4)
        assert tier.report()["found"] == 1


async def test_the_same_wording_needs_no_vector() -> None:
    site = Site()
    async with site.tier() as tier:
        key = await site.knows(tier, "How do birds fly?")
        site.embedder.asked.clear()
        match = await tier.find(PART, "  how do birds fly ")
        assert match is not None
        assert match.key == key
        assert site.embedder.asked == []


async def test_nothing_is_found_in_another_partition() -> None:
    site = Site()
    async with site.tier() as tier:
        await site.knows(tier, "how do i install it?")
        assert await tier.find(OTHER, "how do i install it?") is None
        assert await tier.find(OTHER, "how i do install it?") is None


async def test_what_the_verifier_refuses_is_not_served() -> None:
    site = Site()
    async with site.tier() as tier:
        await site.knows(tier, "how do birds fly?")
        assert await tier.find(PART, "how do birds swim?") is None
        assert refused(tier) == {"bound": 1}
        assert await tier.find(PART, "how do birds fly now?") is None
        assert refused(tier) == {"bound": 1, "time": 1}


async def test_unfit_texts_are_not_learnt() -> None:
    site = Site()
    async with site.tier() as tier:
        await site.knows(tier, "what is it now?")
        assert tier.report()["questions"] == 0


async def test_callers_may_raise_the_bar_and_not_lower_it() -> None:
    site = Site(min_similarity=0.9)
    async with site.tier() as tier:
        await site.knows(tier, "aaaa bb?")
        assert await tier.find(PART, "bb aaaa?", min_similarity=0.1) is not None
        assert await tier.find(PART, "bb aaaa?", min_similarity=1.01) is None
        assert refused(tier) == {"similarity": 1} or refused(tier) == {}


async def test_expired_answers_are_not_found_and_dropped() -> None:
    site = Site()
    async with site.tier() as tier:
        await site.knows(tier, "how do birds fly?")
        site.clock.advance(200.0)
        assert await tier.find(PART, "birds how do fly?") is None
        assert tier.report()["questions"] == 0


async def test_a_forgotten_entry_is_not_found() -> None:
    site = Site()
    async with site.tier() as tier:
        key = await site.knows(tier, "how do birds fly?")
        tier.forget(key)
        assert await tier.find(PART, "how do birds fly?") is None
        assert tier.report()["partitions"] == 0


async def test_the_longest_kept_questions_go_first() -> None:
    site = Site(most_questions=2)
    async with site.tier() as tier:
        for text in ("one apple?", "two pears?", "three figs?"):
            await site.knows(tier, text)
        assert await tier.find(PART, "one apple?") is None
        assert await tier.find(PART, "three figs?") is not None


async def test_a_failing_embedder_makes_misses() -> None:
    site = Site()
    async with site.tier() as tier:
        await site.knows(tier, "how do birds fly?")
        site.embedder.broken = EmbeddingFailedError("down")
        assert await tier.find(PART, "birds fly how do?") is None
        assert tier.report()["failed"] == 1
        await site.knows(tier, "how do fish swim?")
        assert tier.report()["not_learned"] == 1
        site.embedder.broken = None
        assert await tier.find(PART, "birds fly how do?") is not None


async def test_any_fault_of_the_parts_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    async with site.tier() as tier:
        await site.knows(tier, "how do birds fly?")

        def breaks(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(site.verifier, "judge", breaks)
            assert await tier.find(PART, "birds fly how do?") is None
            patch.setattr(site.verifier, "prepare", breaks)
            assert await tier.find(PART, "birds fly how do?") is None
            await site.knows(tier, "how do fish swim?")
        assert tier.report()["failed"] == 2
        await site.knows(tier, "how do cats purr?")
        assert await tier.find(PART, "purr how do cats?") is not None


async def test_a_slow_embedder_is_a_miss_within_the_deadline() -> None:
    site = Site(deadline_s=0.01)
    async with site.tier() as tier:
        await site.knows(tier, "how do birds fly?")
        site.embedder.hangs = True
        assert await tier.find(PART, "birds fly how do?") is None
        assert tier.report()["late"] == 1


async def test_an_embedder_that_cannot_start_is_tried_again() -> None:
    site = Site()
    site.embedder.broken = EmbeddingFailedError("no")
    async with site.tier() as tier:
        assert await tier.find(PART, "x?") is None
        assert tier.report()["ready"] is False
        site.embedder.broken = None
        site.wake.set()
        await settle()
        assert tier.report()["ready"] is True
        assert site.slept == [10.0]


async def test_only_who_may_is_served() -> None:
    site = Site(models=frozenset({"m"}), tenants=frozenset({"acme"}))
    async with site.tier() as tier:
        assert tier.serves("acme", "m")
        assert tier.serves("acme/sub", "m")
        assert not tier.serves("acme", "other")
        assert not tier.serves("evil", "m")


async def test_a_callers_wrong_keeps_the_pair_apart() -> None:
    site = Site()
    async with site.tier() as tier:
        await site.knows(tier, "how do birds fly?")
        match = await tier.find(PART, "birds how do fly?")
        assert match is not None
        assert tier.feedback(match.pair, good=False)
        assert tier.feedback(match.pair, good=False)
        assert await tier.find(PART, "Birds how do fly") is None
        assert refused(tier) == {"blocked": 1}
        assert await tier.find(PART, "fly how do birds?") is not None
        assert site.verifier.observed == [False]
        assert not tier.feedback("ab" * 32, good=False)


async def test_a_callers_good_lowers_no_bar() -> None:
    site = Site()
    async with site.tier() as tier:
        await site.knows(tier, "how do birds fly?")
        match = await tier.find(PART, "birds how do fly?")
        assert match is not None
        assert tier.feedback(match.pair, good=True)
        assert site.verifier.observed == []


async def test_an_unsure_pair_is_judged_and_an_approved_wording_is_found() -> None:
    site = Site()
    site.judge = Verdicts(True)
    async with site.tier() as tier:
        key = await site.knows(tier, "how do birds fly?")
        assert await tier.find(PART, "how do birds fly high?") is None
        assert await tier.find(PART, "how do birds fly high?") is None
        await settle()
        assert site.judge.cases == [
            ("how do birds fly high?", "how do birds fly?", "answer to how do birds fly?")
        ]
        assert site.verifier.observed == [True]
        match = await tier.find(PART, "how do birds fly high?")
        assert match is not None
        assert match.key == key


async def test_a_rejected_pair_is_never_tried_again() -> None:
    site = Site()
    site.judge = Verdicts(False)
    async with site.tier() as tier:
        await site.knows(tier, "how do birds fly?")
        for _ in range(3):
            assert await tier.find(PART, "how do birds fly high?") is None
            await settle()
        assert len(site.judge.cases) == 1
        assert refused(tier) == {"bound": 1, "blocked": 2}


async def test_samples_that_prove_wrong_close_the_tier_and_right_ones_open_it() -> None:
    site = Site(sampled=1.0, delta=0.05)
    site.judge = Verdicts(*[False] * 20, *[True] * 2000)
    async with site.tier() as tier:
        for n in range(26):
            await site.knows(tier, f"how do {chr(97 + n) * 9} birds fly?")
        served = []
        for n in range(26):
            served.append(await tier.find(PART, f"how birds do {chr(97 + n) * 9} fly?"))
            await settle()
        assert served[0] is not None
        assert served[-1] is None
        assert tier.estimate.stance == "off"
        assert refused(tier)["off"] >= 1
        assert tier.report()["stance"] == "off"
        # What it would have served is sampled all the same.
        assert tier.estimate.judged == 26


async def test_other_replicas_learn_and_unlearn() -> None:
    board = Board()
    one, two = Site(), Site()
    one.bulletin = two.bulletin = board
    async with one.tier() as a, two.tier() as b:
        key = await one.knows(a, "how do birds fly?")
        match = await b.find(PART, "birds how do fly?")
        assert match is not None
        assert match.key == key
        assert b.feedback(match.pair, good=False)
        assert await a.find(PART, "birds how do fly?") is None
        board.publish("learned", b"\xffgarbage")


async def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    clock = VirtualClock()
    for time in range(2):
        site = Site()
        site.clock = clock
        site.journal = Journal(tmp_path / "q.sqlite", clock, most=100)
        async with site.tier() as tier:
            if time == 0:
                key = await site.knows(tier, "how do birds fly?")
                await until(lambda: tier.report()["questions"] == 1)
                bad = await tier.find(PART, "fly how birds do?")
                assert bad is not None
                tier.feedback(bad.pair, good=False)
                continue
            await until(lambda: tier.report()["questions"] == 1)
            match = await tier.find(PART, "birds how do fly?")
            assert match is not None
            assert match.key == key
            assert await tier.find(PART, "fly how birds do?") is None
