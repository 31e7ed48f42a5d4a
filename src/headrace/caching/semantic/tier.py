"""Answers found by meaning: the last tier asked, and the only one that may be wrong."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import traceback
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from headrace.caching.base import Bulletin, Match, SemanticState
from headrace.caching.semantic.auditor import Auditor, Case, Read
from headrace.caching.semantic.base import Embedder, EmbeddingFailedError, Judgement, Verifier
from headrace.caching.semantic.estimate import FalseHits
from headrace.caching.semantic.forms import plain
from headrace.caching.semantic.judge import Judge
from headrace.caching.semantic.learner import Learned, Learner
from headrace.caching.semantic.questions import Asked, Questions, Stored
from headrace.core.clock import Clock

if TYPE_CHECKING:
    from headrace.caching.semantic.journal import Journal

__all__ = ["SemanticSettings", "SemanticTier"]

_LEARNED = "learned"
_WRONG = "wrong"
_MOST_PAIRS = 20_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticSettings:
    """`models` and `tenants` may use it; "*" is all. `delta` is the share of wrong answers among
    those found that is put up with. A look-up takes at most `deadline_s`, among `candidates` of at
    least `min_similarity`. The share `sampled` of what is found is judged, and what the verifier
    gives at least `unsure_above`."""

    models: frozenset[str] = frozenset({"*"})
    tenants: frozenset[str] = frozenset({"*"})
    delta: float = 0.01
    deadline_s: float = 0.05
    candidates: int = 5
    min_similarity: float = 0.5
    most_questions: int = 20_000
    sampled: float = 0.05
    unsure_above: float = 0.5


@dataclass(frozen=True, slots=True)
class _Candidate:
    """`approved`: the judge has said that this wording is the stored question's too."""

    case: Case
    approved: bool = False


@dataclass(slots=True)
class _Counts:
    lookups: int = 0
    found: int = 0
    late: int = 0
    failed: int = 0


class SemanticTier:
    """Implements `Semantic`. Event loop only. While the embedder cannot be started or fails,
    nothing is found and nothing learnt."""

    def __init__(
        self,
        embedder: Embedder,
        verifier: Verifier,
        settings: SemanticSettings,
        *,
        clock: Clock,
        rng: random.Random,
        judge: Judge | None = None,
        bulletin: Bulletin | None = None,
        journal: Journal | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.settings = settings
        self.estimate = FalseHits(settings.delta)
        self.refused: Counter[str] = Counter()
        self.counts = _Counts()
        self._embedder = embedder
        self._verifier = verifier
        self._clock = clock
        self._rng = rng
        self._judge = judge
        self._bulletin = bulletin
        self._journal = journal
        self._learner = Learner(
            embedder,
            self._understood,
            most=settings.most_questions,
            clock=clock,
            journal=journal,
            sleep=sleep,
        )
        self._auditor: Auditor | None = None
        self._pairs: OrderedDict[bytes, Case] = OrderedDict()
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._told = False
        if bulletin is not None:
            bulletin.subscribe(_LEARNED, self._learner.hear)
            bulletin.subscribe(_WRONG, self._block)

    # Its life.

    async def start(self, read: Read) -> None:
        """Returns soon; what is needed is loaded meanwhile. `read` gives stored answers."""
        if self._journal is not None:
            for name in await self._journal.wrongs():
                self._block(name)
        self._tasks.append(asyncio.create_task(self._learner.run()))
        if self._judge is not None:
            self._auditor = Auditor(
                self._judge, self._verifier, self.estimate, read=read, decided=self._decided
            )
            self._tasks.append(asyncio.create_task(self._auditor.run()))

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._journal is not None:
            await self._journal.close()
        await self._embedder.close()

    # What the cache asks and tells.

    def serves(self, owner: str, model: str) -> bool:
        tenant = owner.partition("/")[0]
        return _among(model, self.settings.models) and _among(tenant, self.settings.tenants)

    async def find(
        self, partition: bytes, text: str, *, min_similarity: float | None = None
    ) -> Match | None:
        questions = self._learner.questions
        if questions is None or not questions.any_in(partition):
            return None
        self.counts.lookups += 1
        floor = max(self.settings.min_similarity, min_similarity or 0.0)
        try:
            asked = self._understood(partition, text)
            if asked.prepared.unfit is not None:
                self.refused[asked.prepared.unfit] += 1
                return None
            async with asyncio.timeout(self.settings.deadline_s):
                candidates = await self._candidates(questions, asked)
            return self._choose([c for c in candidates if c.case.similarity >= floor])
        except TimeoutError:
            self.counts.late += 1
        except EmbeddingFailedError:
            self.counts.failed += 1
        except Exception as error:  # noqa: BLE001 - whatever broke, the request goes on without
            self._broke(error)
        return None

    def learn(self, partition: bytes, text: str, key: bytes, expires: float) -> None:
        learned = Learned(partition, text, key, expires)
        self._learner.add(learned)
        if self._journal is not None:
            self._journal.learned(partition, text, key, expires)
        if self._bulletin is not None:
            self._bulletin.publish(_LEARNED, msgspec.msgpack.encode(learned))

    def forget(self, key: bytes) -> None:
        if self._learner.questions is not None:
            self._learner.questions.remove(key)
        if self._journal is not None:
            self._journal.forgotten(key)

    def feedback(self, pair: str, *, good: bool) -> bool:
        """A caller's "wrong" keeps the pair apart from now on and counts against the entry; its
        "good" changes nothing, for callers must not be able to lower the bar."""
        name = bytes.fromhex(pair)
        case = self._pairs.get(name)
        if case is None:
            return False
        if not good and name not in self._wrong:
            self._reject(name)
            self._verifier.observe(
                case.asked.prepared, case.stored.question.prepared, case.similarity, right=False
            )
        return True

    def state(self) -> SemanticState:
        return SemanticState(dict(self.refused), self.estimate.judged, self.estimate.interval())

    def report(self) -> Mapping[str, object]:
        low, high = self.estimate.interval()
        auditor, questions = self._auditor, self._learner.questions
        return {
            "ready": questions is not None,
            "embedder": self._embedder.id,
            "questions": 0 if questions is None else len(questions),
            "partitions": 0 if questions is None else questions.partitions,
            "lookups": self.counts.lookups,
            "found": self.counts.found,
            "late": self.counts.late,
            "failed": self.counts.failed,
            "learned": self._learner.learned,
            "not_learned": self._learner.given_up,
            "refused": dict(self.refused),
            "delta": self.settings.delta,
            "stance": self.estimate.stance,
            "false_hits": {
                "judged": self.estimate.judged,
                "wrong": self.estimate.wrong,
                "interval": [low, high] if self.estimate.judged else None,
            },
            "judge": None
            if auditor is None
            else {
                "approved": auditor.approved,
                "rejected": auditor.rejected,
                "open": auditor.open,
            },
            "bounds": self._verifier.bounds(),
        }

    # Finding.

    def _understood(self, partition: bytes, text: str) -> Asked:
        return Asked(partition, text, plain(text), self._verifier.prepare(text))

    async def _candidates(self, questions: Questions, asked: Asked) -> list[_Candidate]:
        """The same wording needs no vector."""
        same = questions.same_wording(asked)
        if same is not None:
            stored, approved = same
            return [_Candidate(Case(asked, stored, 1.0, sampled=False), approved)]
        vector = (await self._embedder.embed([asked.text]))[0]
        found = await questions.nearest(asked.partition, vector, self.settings.candidates)
        return [_Candidate(Case(asked, stored, cosine, sampled=False)) for stored, cosine in found]

    def _choose(self, candidates: list[_Candidate]) -> Match | None:
        allowed = self.estimate.allowed()
        best: tuple[Judgement, Case] | None = None
        unsure: tuple[Judgement, Case] | None = None
        reasons: list[str] = [] if candidates else ["similarity"]
        for candidate in candidates:
            case = candidate.case
            if case.stored.expires <= self._clock.wall():
                self.forget(case.stored.key)
                continue
            judgement = self._judged(candidate, allowed)
            if judgement.served:
                if best is None or judgement.lower > best[0].lower:
                    best = (judgement, case)
                continue
            reasons.append(judgement.reason)
            if judgement.reason == "bound" and (
                unsure is None or judgement.probability > unsure[0].probability
            ):
                unsure = (judgement, case)
        if best is None:
            self.refused.update(reasons[:1])
            if unsure is not None and unsure[0].probability >= self.settings.unsure_above:
                self._submit(unsure[1])
            return None
        if self._rng.random() < self.settings.sampled:
            self._submit(replace(best[1], sampled=True))
        if allowed is None:
            self.refused["off"] += 1
            return None
        return self._match(*best)

    def _judged(self, candidate: _Candidate, allowed: float | None) -> Judgement:
        case = candidate.case
        if self._pair(case.asked, case.stored) in self._wrong:
            return Judgement(False, 0.0, 0.0, "blocked")
        if candidate.approved:
            return Judgement(True, 1.0, 1.0 - self.settings.delta, "")
        return self._verifier.judge(
            case.asked.prepared, case.stored.question.prepared, case.similarity, allowed
        )

    def _match(self, judgement: Judgement, case: Case) -> Match:
        self.counts.found += 1
        name = self._pair(case.asked, case.stored)
        self._pairs[name] = case
        if len(self._pairs) > _MOST_PAIRS:
            self._pairs.popitem(last=False)
        return Match(
            case.stored.key,
            case.similarity,
            judgement.probability,
            judgement.lower,
            name.hex(),
        )

    def _pair(self, asked: Asked, stored: Stored) -> bytes:
        digest = hashlib.blake2b(digest_size=32, key=asked.partition)
        digest.update(msgspec.msgpack.encode((asked.wording, stored.question.wording)))
        return digest.digest()

    # Judging.

    def _submit(self, case: Case) -> None:
        if self._auditor is not None:
            self._auditor.submit(case)

    def _decided(self, case: Case, right: bool) -> None:
        if not right:
            self._reject(self._pair(case.asked, case.stored))
        elif not case.sampled and self._learner.questions is not None:
            self._learner.questions.alias(case.asked, case.stored.key)

    def _reject(self, name: bytes) -> None:
        self._block(name)
        if self._journal is not None:
            self._journal.wrong(name)
        if self._bulletin is not None:
            self._bulletin.publish(_WRONG, name)

    def _block(self, name: bytes) -> None:
        self._wrong[name] = None
        if len(self._wrong) > _MOST_PAIRS:
            self._wrong.popitem(last=False)

    def _broke(self, error: Exception) -> None:
        """Told once with its place, without words that may be a user's."""
        self.counts.failed += 1
        if not self._told:
            self._told = True
            frames = "".join(traceback.format_tb(error.__traceback__))
            _log.error("a look-up by meaning broke: %s\n%s", type(error).__name__, frames)


def _among(name: str, names: frozenset[str]) -> bool:
    return "*" in names or name in names
