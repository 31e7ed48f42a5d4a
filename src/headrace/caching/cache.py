"""All tiers as one: what the gateway asks before it computes, and tells after."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.caching.base import Bulletin, Leases, Listed, Match, Semantic, Tier, TierStats
from headrace.caching.entry import CorruptEntryError, Entry, entry_of
from headrace.caching.epochs import Epochs, Scope
from headrace.caching.key import KEY_BYTES, KeyMaker
from headrace.caching.memory import MemoryTier
from headrace.caching.policy import CachePolicy, Controls, Determinism, determinism
from headrace.core.clock import Clock
from headrace.core.events import CacheNote, Event, Start, Usage
from headrace.core.request import Request

__all__ = ["CacheCounters", "Found", "Question", "Recorder", "ResponseCache"]

_REMOVED = "removed"
_LEASE_S = 60.0
"""A replica that dies while it computes holds others up for no longer."""
_LOOK_S = 0.05
SEMANTIC = "semantic"


@dataclass(frozen=True, slots=True)
class Question:
    """One request as the cache sees it. `owner` is who shares its answers; `key` names them."""

    request: Request
    controls: Controls
    owner: str
    model: str
    scope: tuple[str | int, ...]
    key: bytes
    readable: bool
    storable: bool
    shareable: bool

    @property
    def bypassed(self) -> str | None:
        """Why the cache has nothing to do with it, in a word."""
        if self.readable or self.storable or self.shareable:
            return None
        if self.controls.no_store:
            return "no-store"
        return "off" if self.controls.mode == "off" else "sampled"


@dataclass(frozen=True, slots=True)
class Found:
    """A stored answer: its stream as of now, and the entry it comes from."""

    events: tuple[Event, ...]
    entry: Entry
    note: CacheNote


@dataclass(slots=True)
class CacheCounters:
    """Since the start. `hits` by tier and owner; savings are of all hits and coalesced answers."""

    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    misses: int = 0
    stores: int = 0
    bypasses: int = 0
    coalesced: int = 0
    saved_s: float = 0.0
    saved_prompt_tokens: int = 0
    saved_completion_tokens: int = 0


class ResponseCache:
    """Owned by the event loop. A tier that is broken or slow makes a miss, never an error.

    `lower` are the tiers behind memory, nearest first. `bulletin` tells other replicas what was
    removed, `leases` who of them computes.
    """

    def __init__(
        self,
        memory: MemoryTier,
        keys: KeyMaker,
        policy: CachePolicy,
        *,
        clock: Clock,
        rng: random.Random,
        lower: Sequence[Tier] = (),
        epochs: Epochs | None = None,
        semantic: Semantic | None = None,
        bulletin: Bulletin | None = None,
        leases: Leases | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.memory = memory
        self.policy = policy
        self.lower = tuple(lower)
        self.epochs = epochs or Epochs()
        self.semantic = semantic
        self.leases = leases
        self.counters = CacheCounters()
        self._keys = keys
        self._clock = clock
        self._rng = rng
        self._bulletin = bulletin
        self._sleep = sleep
        if bulletin is not None:
            bulletin.subscribe(_REMOVED, self._removed)
            bulletin.on_gap(self.memory.clear)

    def question(
        self, request: Request, owner: str, model: str, revision: str, controls: Controls
    ) -> Question:
        """What there is to ask about a validated request, its prompt not tokenised yet. `revision`
        changes whenever the model's answers may."""
        policy = self.policy
        wanted = not controls.no_store and controls.mode != "off"
        storable = wanted and policy.storable(request)
        shareable = wanted and not controls.no_cache and policy.shareable(request)
        scope: tuple[str | int, ...] = ()
        key = b""
        if storable or shareable:
            epochs = self.epochs.of(owner, model, controls.namespace)
            scope = (owner, model, revision, controls.namespace, *epochs)
            key = self._keys.key(request, scope)
            if determinism(request) is Determinism.SAMPLED and policy.samples:
                key = self._keys.sample(key, self._rng.randrange(policy.samples))
        return Question(
            request,
            controls,
            owner,
            model,
            scope,
            key,
            readable=storable and not controls.no_cache,
            storable=storable,
            shareable=shareable,
        )

    def peek(self, question: Question) -> Found | None:
        """The stored answer if it is in memory; a miss here is not counted as one."""
        if not question.readable:
            return None
        entry = self.memory.look(question.key)
        return None if entry is None else self._found(question, entry, self.memory.name)

    async def find(self, question: Question) -> Found | None:
        """The stored answer from a tier behind memory, or that of a question that means the same.
        Bounded by the tiers' own limits."""
        if not question.readable:
            return None
        for tier in self.lower:
            entry = await tier.get(question.key)
            found = None if entry is None else self._found(question, entry, tier.name)
            if found is not None:
                self.memory.put(question.key, found.entry)
                return found
        if self._asks_meaning(question):
            return await self._find_meaning(question)
        return None

    def record(self, question: Question) -> Recorder | None:
        """For the answer about to be computed; None if it is not to be kept."""
        return Recorder(self, question, self._clock) if question.storable else None

    @asynccontextmanager
    async def lead(self, question: Question) -> AsyncGenerator[Found | None, None]:
        """While it is held, other replicas wait for this one's answer. Gives what another one has
        computed in the meantime, if one was at it; waits for that no longer than
        `policy.twin_wait_s`."""
        if self.leases is None or not question.readable:
            yield None
            return
        until = self._clock.monotonic() + self.policy.twin_wait_s
        while True:
            give_back = await self.leases.take(question.key, _LEASE_S)
            if give_back is not None:
                try:
                    yield None
                finally:
                    await give_back()
                return
            while self._clock.monotonic() < until:
                await self._sleep(_LOOK_S)
                if (found := await self.find(question)) is not None:
                    yield found
                    return
                if not await self.leases.held(question.key):
                    break
            else:
                yield None
                return

    def store(self, question: Question, entry: Entry) -> None:
        self.counters.stores += 1
        self.memory.put(question.key, entry)
        for tier in self.lower:
            tier.put(question.key, entry)
        if self._asks_meaning(question) and (parted := self._parted(question)) is not None:
            partition, text = parted
            self.semantic.learn(partition, text, question.key, entry.expires)  # type: ignore[union-attr]  # _asks_meaning has checked

    def missed(self, question: Question) -> None:
        """Nothing was found, and nobody computes it already."""
        if question.readable:
            self.counters.misses += 1
        else:
            self.counters.bypasses += 1

    def shared(self, usage: Usage, seconds: float) -> None:
        """One more has got an answer that took so long to compute for another."""
        self.counters.coalesced += 1
        self.counters.saved_s += seconds
        self.counters.saved_prompt_tokens += usage.prompt_tokens
        self.counters.saved_completion_tokens += usage.completion_tokens

    # What operators and callers see, move and undo.

    async def entries(self) -> AsyncGenerator[tuple[bytes, Entry], None]:
        """All that is stored in this server's own tiers, each once unless it moves meanwhile."""
        async for key, entry in self.memory.entries():
            yield key, entry
        for tier in self.lower:
            if isinstance(tier, Listed):
                async for key, entry in tier.entries():
                    if key not in self.memory:
                        yield key, entry

    def take(self, key: bytes, entry: Entry) -> bool:
        """Keeps an entry that another server has exported; False if it has expired, or is none."""
        if entry.expires <= self._clock.wall() or len(key) != KEY_BYTES:
            return False
        try:
            entry.events()
        except CorruptEntryError:
            return False
        for tier in (self.memory, *self.lower):
            tier.put(key, entry)
        return True

    def invalidate(self, scope: Scope) -> int:
        """Nothing of the scope is found from now on. The bytes are freed as others need them."""
        if scope == Scope():
            self.memory.clear()
        return self.epochs.bump(scope)

    def forget(self, key: bytes) -> None:
        """Removes one entry here and, as soon as they hear of it, from other replicas."""
        self._removed(key)
        if self._bulletin is not None:
            self._bulletin.publish(_REMOVED, key)

    def feedback(self, pair: str, *, good: bool) -> bool:
        """Somebody's word on two questions taken for the same; False if they are not known."""
        return self.semantic is not None and self.semantic.feedback(pair, good=good)

    def stats(self) -> dict[str, TierStats]:
        return {tier.name: tier.stats() for tier in (self.memory, *self.lower)}

    async def start(self) -> None:
        for tier in self.lower:
            await tier.start()
        if self.semantic is not None:
            await self.semantic.start(self.read)

    async def close(self) -> None:
        if self.semantic is not None:
            await self.semantic.close()
        for tier in self.lower:
            await tier.close()

    async def read(self, key: bytes) -> Entry | None:
        """The entry wherever it is, without counting it as an answer."""
        entry = self.memory.look(key)
        for tier in () if entry is not None else self.lower:
            entry = await tier.get(key)
            if entry is not None:
                break
        return entry

    def _removed(self, key: bytes) -> None:
        """By this server or another one, whose disk is not ours."""
        self._drop(key)
        for tier in self.lower:
            tier.remove(key)

    def _drop(self, key: bytes) -> None:
        self.memory.remove(key)
        if self.semantic is not None:
            self.semantic.forget(key)

    def _asks_meaning(self, question: Question) -> bool:
        return (
            self.semantic is not None
            and question.controls.mode != "exact"
            and self.semantic.serves(question.owner, question.model)
        )

    def _parted(self, question: Question) -> tuple[bytes, str] | None:
        return self._keys.partition(question.request, question.scope)

    async def _find_meaning(self, question: Question) -> Found | None:
        parted = self._parted(question)
        if parted is None or self.semantic is None:
            return None
        match = await self.semantic.find(*parted, min_similarity=question.controls.min_similarity)
        if match is None:
            return None
        entry = await self.read(match.key)
        if entry is None:
            self.semantic.forget(match.key)
            return None
        return self._found(question, entry, SEMANTIC, match)

    def _found(
        self,
        question: Question,
        entry: Entry,
        tier: str,
        match: Match | None = None,
    ) -> Found | None:
        now = self._clock.wall()
        age = max(0.0, now - entry.created)
        oldest = question.controls.max_age_s
        if entry.expires <= now or (oldest is not None and age > oldest):
            return None
        key = question.key if match is None else match.key
        if any(self.epochs.of_tag(question.owner, tag) != epoch for tag, epoch in entry.tags):
            self._drop(key)
            return None
        try:
            events = entry.events()
        except CorruptEntryError:
            self.forget(key)
            return None
        note = CacheNote(
            "hit",
            tier,
            entry=key.hex(),
            age_s=age,
            ttl_s=entry.expires - now,
            similarity=None if match is None else match.similarity,
            pair=None if match is None else match.pair,
        )
        self.counters.hits[tier, question.owner] += 1
        self._saved(entry)
        return Found(events, entry, note)

    def _saved(self, entry: Entry) -> None:
        self.counters.saved_s += entry.saved_s
        self.counters.saved_prompt_tokens += entry.prompt_tokens
        self.counters.saved_completion_tokens += entry.completion_tokens


class Recorder:
    """Keeps one answer while it streams by. Dropped without `commit`, it keeps nothing."""

    __slots__ = ("_cache", "_clock", "_events", "_question", "_started")

    def __init__(self, cache: ResponseCache, question: Question, clock: Clock) -> None:
        self._cache = cache
        self._question = question
        self._clock = clock
        self._events: list[Event] | None = []
        self._started = clock.monotonic()

    def add(self, event: Event) -> None:
        """Called with every event, in order, before the client has it."""
        if self._events is None:
            return
        if not self._cache.policy.keeps(event):
            self._events = None
            return
        if isinstance(event, Start):
            self._started = self._clock.monotonic()
        self._events.append(event)

    def commit(self) -> Entry | None:
        """The answer is complete: stores it, and returns what was stored."""
        events, self._events = self._events, None
        if events is None:
            return None
        policy, asked = self._cache.policy, self._question.controls.ttl_s
        owner, tags = self._question.owner, self._question.controls.tags
        entry = entry_of(
            events,
            created=self._clock.wall(),
            ttl_s=policy.ttl_s if asked is None else min(asked, policy.ttl_s),
            saved_s=self._clock.monotonic() - self._started,
            tags=tuple((tag, self._cache.epochs.of_tag(owner, tag)) for tag in tags),
        )
        if entry is not None:
            self._cache.store(self._question, entry)
        return entry
