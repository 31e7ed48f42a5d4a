"""The life of one request, from top to bottom."""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial

from headrace.backends.base import Backend, ModelCard
from headrace.caching import Entry, ResponseCache, Scope
from headrace.caching.semantic.base import LocalEmbedder
from headrace.config import Settings
from headrace.core.clock import Clock
from headrace.core.codec import TextCodec
from headrace.core.errors import (
    BackendFailed,
    HeadraceError,
    InvalidRequest,
    NotCached,
    NotFound,
    ShuttingDown,
)
from headrace.core.events import Event
from headrace.core.health import Health, State
from headrace.core.request import Message, Request
from headrace.gateway.answering import Answers, replayed
from headrace.gateway.cachebook import observe, report
from headrace.gateway.claims import SubTenants, Terms, claim
from headrace.gateway.computing import Job
from headrace.gateway.embedding import Embedded, Embeddings
from headrace.gateway.lanes import Lanes
from headrace.gateway.lifeline import Lifeline
from headrace.gateway.tenants import KeyRing, KeySource, Tenant
from headrace.gateway.timing import timed
from headrace.gateway.tokenising import Tokeniser, text_length
from headrace.gateway.tuning import Tuning
from headrace.gateway.validation import (
    check_capabilities,
    check_token_ids,
    check_vocabulary,
    vocabulary,
)
from headrace.gateway.view import QueueRow
from headrace.scheduling.quotas import Quotas, RateLimits
from headrace.telemetry import Metrics, RequestRecord

__all__ = ["Gateway"]

_NO_TERMS = Terms()
_RETRY_ELSEWHERE_S = 5.0
_FAREWELL_S = 1.0
"""After the grace period, how long clients are given to take the error."""

_log = logging.getLogger(__name__)


class Gateway:
    """Composes tenants, cache, schedulers and backends. Everything runs on one event loop."""

    def __init__(
        self,
        backends: Sequence[Backend],
        settings: Settings,
        *,
        clock: Clock,
        metrics: Metrics,
        cache: ResponseCache | None = None,
        rng: random.Random | None = None,
        keys: KeySource | None = None,
        embedders: Mapping[str, LocalEmbedder] | None = None,
    ) -> None:
        max_queue = settings.limits.max_queue
        self.metrics = metrics
        self._clock = clock
        self._cache = cache
        self._keys = KeyRing.of(settings, keys)
        self._quotas = Quotas(clock)
        self._sub_tenants = SubTenants(clock)
        self._tuning = Tuning.of(settings)
        self._lanes = Lanes(backends, self._tuning, clock=clock, rng=rng or random.SystemRandom())
        self._tokeniser = Tokeniser(max_queue)
        self._answers = Answers(
            cache, self._quotas, self._tokeniser, clock, enter=self._enter, leave=self._leave
        )
        self._embeddings = Embeddings(embedders or {}, metrics.embedding)
        self._draining = False
        self._active: set[Lifeline] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # One request.

    async def generate(
        self, request: Request, tenant: Tenant, terms: Terms = _NO_TERMS
    ) -> AsyncGenerator[Event, None]:
        """The answer. Refusals are raised at the first step, failures at any. Closing it, or
        cancelling the task that waits for it, ends the request in whatever state it is."""
        record = RequestRecord(request, tenant.name, self._clock, self.metrics)
        life = Lifeline()
        self._enter(life)
        try:
            async with AsyncExitStack() as stack:
                events = await self._open(
                    request, tenant, terms, life=life, record=record, stack=stack
                )
                async for event in events:
                    record.observe(event)
                    yield timed(event, record, self._clock)
        except HeadraceError as error:
            record.failed(error)
            raise
        except Exception as error:  # noqa: BLE001 - whatever broke, the caller gets a clean error
            failure = _failure(request, error)
            record.failed(failure)
            raise failure from None
        finally:
            self._leave(life)
            record.close()

    async def _open(
        self,
        request: Request,
        tenant: Tenant,
        terms: Terms,
        *,
        life: Lifeline,
        record: RequestRecord,
        stack: AsyncExitStack,
    ) -> AsyncIterator[Event]:
        """The stream of the answer: stored, shared with a twin, or computed. What it holds is given
        back when `stack` unwinds."""
        self._refuse_while_draining()
        lane, card = self._lanes.route(request.model, tenant.may_use)
        record.routed(card.id)
        asked = claim(tenant, terms, request.arrival)
        request = replace(request, tenant=tenant.name, priority=int(asked.priority_class))
        check_capabilities(request, lane.backend)
        check_vocabulary(request, vocabulary(card, lane.backend))

        question = None
        if self._cache is not None:
            # Sub-tenants are kept apart here as in the queue.
            identity = f"{lane.backend.name} {card.revision}"
            question = self._cache.question(request, asked.flow, card.id, identity, terms.cache)
            found = self._cache.peek(question)
            if found is None and question.readable:
                found = await life.wait(partial(self._cache.find, question))
            if found is not None:
                self._quotas.count(tenant.name, tenant.limits)
                return replayed(found)
        if terms.cache.only_if_cached:
            raise NotCached(
                "No stored answer to this request, and 'only-if-cached' wants no other."
            )

        job = Job(request, tenant, self._sub_tenants.shared(tenant, asked), lane, card)
        if question is not None and question.shareable:
            answer = self._answers.shared(job, question, life, record)
        else:
            answer = self._answers.computed(job, question, life, record.turn)
        return await stack.enter_async_context(aclosing(answer))

    def _enter(self, life: Lifeline) -> None:
        self._active.add(life)
        self._idle.clear()

    def _leave(self, life: Lifeline) -> None:
        self._active.discard(life)
        if not self._active:
            self._idle.set()

    def _refuse_while_draining(self) -> None:
        if self._draining:
            raise ShuttingDown(
                "The server is shutting down. Please send the request again.",
                retry_after_s=_RETRY_ELSEWHERE_S,
            )

    # Everything else callers ask.

    def authenticate(self, credential: bytes | None) -> Tenant:
        """The tenant of an API key. Raises Unauthorized."""
        return self._keys.tenant(credential)

    def models(self, tenant: Tenant) -> tuple[ModelCard, ...]:
        """Those that the tenant may use, those that generate first."""
        cards = (*self._lanes.cards(), *self._embeddings.cards())
        return tuple(card for card in cards if tenant.may_use(card.id))

    def model(self, tenant: Tenant, name: str) -> ModelCard:
        """Raises ModelNotFound, also for a model that the tenant may not use."""
        card = next((card for card in self.models(tenant) if card.id == name), None)
        return self._lanes.route(name, tenant.may_use)[1] if card is None else card

    def require_possible(self, tenant: Tenant, requests: int, choices: int) -> None:
        """Raises InvalidRequest for a call of so many requests that the tenant's limits would
        never let through whole."""
        self._quotas.require_possible(tenant.limits, requests, choices)

    def ratelimit(self, tenant: Tenant) -> RateLimits | None:
        """The tenant's rates as of now; None if it has none."""
        return self._quotas.state(tenant.name, tenant.limits)

    async def embed(
        self,
        tenant: Tenant,
        model: str,
        inputs: Sequence[str | tuple[int, ...]],
        dimensions: int | None,
    ) -> Embedded:
        """Vectors by an embedding model. Counts as one request of the tenant's. Raises
        ModelNotFound, InvalidRequest, QuotaExceeded, BackendUnavailable."""
        self._refuse_while_draining()
        if model not in self._embeddings or not tenant.may_use(model):
            card = self.model(tenant, model)
            raise InvalidRequest(f"{card.id} is no embedding model.", param="model")
        self._quotas.count(tenant.name, tenant.limits)
        return await self._embeddings.embed(model, inputs, dimensions)

    async def tokenize(
        self,
        tenant: Tenant,
        model: str,
        content: str | Sequence[Message],
        *,
        add_special_tokens: bool,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Token ids of a text, or of a conversation by the model's chat template."""
        codec, _ = self._codec(tenant, model)
        if isinstance(content, str):
            work = partial(codec.encode, content, add_special_tokens=add_special_tokens)
        elif codec.has_chat_template:
            work = partial(codec.encode_chat, content, add_generation_prompt=add_generation_prompt)
        else:
            raise InvalidRequest("This model has no chat template.", param="messages")
        return await self._tokeniser.run(work, text_length(content))

    async def detokenize(self, tenant: Tenant, model: str, token_ids: Sequence[int]) -> str:
        codec, size = self._codec(tenant, model)
        check_token_ids(token_ids, size, "tokens")
        return await self._tokeniser.run(partial(codec.decode, token_ids), len(token_ids))

    async def token_texts(self, tenant: Tenant, model: str, token_ids: Sequence[int]) -> list[str]:
        """Each token as its vocabulary entry reads."""
        codec, size = self._codec(tenant, model)
        check_token_ids(token_ids, size, "tokens")
        return [codec.token_text(token_id) for token_id in token_ids]

    # The queue, and who may see and shape it.

    def queue_view(self, tenant: Tenant) -> list[QueueRow]:
        """The tenant's own rows; every tenant's for an admin."""
        rows = [row for lane in self._lanes for row in lane.control.rows()]
        return [row for row in rows if tenant.admin or tenant.owns(row.flow)]

    def scheduling_config(self) -> dict[str, object]:
        return self._tuning.shown()

    def configure_scheduling(self, changes: Mapping[str, object]) -> dict[str, object]:
        """Makes all the changes or none, and returns what is then in force. Raises
        InvalidRequest."""
        self._tuning = self._tuning.changed(changes)
        for lane in self._lanes:
            lane.control.tune(self._tuning)
        return self._tuning.shown()

    def scheduling_trace(self) -> list[dict[str, object]]:
        """The latest steps' sizes and why, oldest first."""
        return [decision for lane in self._lanes for decision in lane.control.trace()]

    # The response cache, and what is undone of it.

    def cache_stats(self) -> dict[str, object]:
        """As JSON knows it. Raises NotFound where there is no cache."""
        asked, found = self.metrics.prefix_tokens()
        prefix = {"prompt_tokens": asked, "found_tokens": found}
        return {**report(self._require_cache()), "prefix": prefix}

    def invalidate_cache(
        self,
        tenant: str | None = None,
        model: str | None = None,
        namespace: str | None = None,
        tag: str | None = None,
    ) -> None:
        """Forgets the stored answers of all that is given, or all. Raises InvalidRequest for a
        namespace or tag without its tenant, or with what it does not go with."""
        cache = self._require_cache()
        try:
            scope = Scope(tenant=tenant, model=model, namespace=namespace, tag=tag)
        except ValueError as error:
            param = "namespace" if tag is None else "tag"
            raise InvalidRequest(f"{error}".capitalize() + ".", param=param) from None
        cache.invalidate(scope)

    async def cached(self, entry: bytes) -> Entry | None:
        """One stored answer."""
        return await self._require_cache().read(entry)

    def all_cached(self) -> AsyncGenerator[tuple[bytes, Entry], None]:
        """Every stored answer by its name, for an export."""
        return self._require_cache().entries()

    def take_cached(self, key: bytes, entry: Entry) -> bool:
        """Keeps what another server has exported; False if it cannot be used."""
        return self._require_cache().take(key, entry)

    def forget_cached(self, entry: bytes) -> None:
        self._require_cache().forget(entry)

    def judge_cached(self, pair: str, *, good: bool) -> bool:
        """A caller's word on two questions taken for the same; False if they are not known."""
        return self._require_cache().feedback(pair, good=good)

    def _require_cache(self) -> ResponseCache:
        if self._cache is None:
            raise NotFound("This server keeps no answers; see [caching] in its configuration.")
        return self._cache

    def _codec(self, tenant: Tenant, model: str) -> tuple[TextCodec, int | None]:
        self._refuse_while_draining()
        lane, card = self._lanes.route(model, tenant.may_use)
        if lane.backend.codec is None:
            lane.require_ready()
            raise InvalidRequest(
                "The tokenizer of this model is not known here.",
                param="model",
                code="unsupported_endpoint",
            )
        return lane.backend.codec, vocabulary(card, lane.backend)

    # The server's own life.

    async def start(self) -> None:
        """Returns once every backend is ready. Raises the HeadraceError of one that cannot be."""
        if self._cache is not None:
            await self._cache.start()
        await self._embeddings.start()
        await asyncio.gather(*(lane.backend.start() for lane in self._lanes))

    @property
    def draining(self) -> bool:
        return self._draining

    async def drain(self, grace: float) -> None:
        """Refuses new requests, lets those under way finish for `grace` seconds and ends the rest
        with an error. A second call with less grace cuts the first one short."""
        self._draining = True
        if not await self._left_within(grace):
            for life in tuple(self._active):
                life.interrupt(ShuttingDown("The server is shutting down; the answer ends here."))
            await self._left_within(_FAREWELL_S)

    async def close(self) -> None:
        """Ends what still runs, and the backends. Idempotent."""
        await self.drain(0.0)
        await asyncio.gather(*(lane.backend.close(0.0) for lane in self._lanes))
        if self._cache is not None:
            await self._cache.close()
        await self._embeddings.close()
        self._tokeniser.close()

    async def _left_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self._idle.is_set()

    def health(self) -> Health:
        """READY while requests are taken."""
        if self._draining:
            return Health(State.CLOSED, "shutting down")
        return self._lanes.health()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format, with gauges as of now."""
        for lane in self._lanes:
            lane.observe(self.metrics, self._clock.wall())
        if self._cache is not None:
            observe(self._cache, self.metrics.caching)
        return self.metrics.exposition()


def _failure(request: Request, error: Exception) -> HeadraceError:
    """What the caller is told. The log gets the place but not the words, which may be its own."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("request %s broke: %s\n%s", request.id, type(error).__name__, frames)
    return BackendFailed("The server failed while it answered. Please send the request again.")
