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
from typing import cast

from headrace.backends.base import Backend, ModelCard
from headrace.caching import Recorder, ResponseCache
from headrace.config import Settings
from headrace.core.clock import Clock
from headrace.core.codec import TextCodec
from headrace.core.errors import BackendFailed, HeadraceError, InvalidRequest, ShuttingDown
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, Usage
from headrace.core.health import Health, State
from headrace.core.request import Message, PriorityClass, Request
from headrace.gateway.claims import SubTenants, Terms, claim
from headrace.gateway.lanes import Lane, Lanes
from headrace.gateway.lifeline import Lifeline
from headrace.gateway.tenants import KeyRing, KeySource, Tenant
from headrace.gateway.timing import timed
from headrace.gateway.tokenising import Tokeniser, cost_of, text_length, tokenised
from headrace.gateway.tuning import Tuning
from headrace.gateway.validation import (
    check_capabilities,
    check_token_ids,
    check_vocabulary,
    context_limit,
    fit,
    vocabulary,
)
from headrace.gateway.view import QueueRow
from headrace.scheduling import Revoked, Ticket
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
        self._active.add(life)
        self._idle.clear()
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
            self._active.discard(life)
            if not self._active:
                self._idle.set()
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
        """The stream of the answer. What it holds is given back when `stack` unwinds."""
        self._refuse_while_draining()
        lane, card = self._lanes.route(request.model, tenant.may_use)
        record.routed(card.id)
        claimed = self._sub_tenants.shared(tenant, claim(tenant, terms, request.arrival))
        request = replace(request, tenant=tenant.name, priority=int(claimed.priority_class))
        check_capabilities(request, lane.backend)
        check_vocabulary(request, vocabulary(card, lane.backend))

        recorder = None
        if self._cache is not None:
            stored = await life.wait(partial(self._cache.lookup, request))
            if stored is not None:
                return await stack.enter_async_context(aclosing(_replay(stored, life)))
            recorder = self._cache.record(request)

        lane.require_ready()
        hold = self._quotas.admit(
            tenant.name, tenant.limits, request.n, lane.control.expected_tokens(request, claimed)
        )
        stack.callback(lambda: hold.settle(record.prompt_tokens + record.completion_tokens))
        try:
            ticket = lane.scheduler.admit(request, cost_of(request), claimed, life.interrupt)
        except HeadraceError:
            hold.give_back()
            raise
        stack.callback(ticket.release)
        if lane.backend.codec is not None:
            work = partial(tokenised, request, lane.backend.codec)
            size = text_length(request.messages or request.prompt)
            request = await life.wait(partial(self._tokeniser.run, work, size, admitted=True))
            request = fit(request, context_limit(card, lane.backend))
            hold.adjust(lane.control.expected_tokens(request, claimed))
        running = self._run(request, lane, ticket, life, record)
        answer = running if recorder is None else _tee(running, recorder)
        return await stack.enter_async_context(aclosing(answer))

    async def _run(
        self, request: Request, lane: Lane, ticket: Ticket, life: Lifeline, record: RequestRecord
    ) -> AsyncGenerator[Event, None]:
        """From its turn to its end; after a revoked turn, from the next one."""
        while True:
            cost = cost_of(request, lane.control.cached_tokens(request))
            await life.wait(partial(ticket.turn, cost))
            lane.require_ready()
            record.turn(PriorityClass(request.priority))
            async with _closing(lane.control.generate(request)) as stream:
                try:
                    event = await life.wait(stream.__anext__)
                    ticket.started(event.cached_tokens if isinstance(event, Start) else 0)
                    while not isinstance(event, Usage):
                        yield event
                        event = await life.wait(stream.__anext__)
                        if isinstance(event, Delta):
                            ticket.generated(0 if event.prompt else len(event.token_ids))
                        elif isinstance(event, Finish):
                            ticket.choice_finished(natural=event.reason is not FinishReason.LENGTH)
                    yield event
                except StopAsyncIteration:
                    raise BackendFailed("The answer broke off. Please send it again.") from None
                except Revoked:
                    continue
                return

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
        """Those that the tenant may use."""
        return tuple(card for card in self._lanes.cards() if tenant.may_use(card.id))

    def model(self, tenant: Tenant, name: str) -> ModelCard:
        """Raises ModelNotFound, also for a model that the tenant may not use."""
        return self._lanes.route(name, tenant.may_use)[1]

    def require_possible(self, tenant: Tenant, requests: int, choices: int) -> None:
        """Raises InvalidRequest for a call of so many requests that the tenant's limits would
        never let through whole."""
        self._quotas.require_possible(tenant.limits, requests, choices)

    def ratelimit(self, tenant: Tenant) -> RateLimits | None:
        """The tenant's rates as of now; None if it has none."""
        return self._quotas.state(tenant.name, tenant.limits)

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
        return self.metrics.exposition()


async def _replay(stored: AsyncIterator[Event], life: Lifeline) -> AsyncGenerator[Event, None]:
    async with _closing(stored) as stream:
        while True:
            try:
                event = await life.wait(stream.__anext__)
            except StopAsyncIteration:
                return
            yield event


async def _tee(
    events: AsyncGenerator[Event, None], recorder: Recorder
) -> AsyncGenerator[Event, None]:
    """Passes an answer on and keeps it, if it comes to its end."""
    async with aclosing(events):
        async for event in events:
            recorder.add(event)
            if isinstance(event, Usage):
                recorder.commit()
            yield event


def _closing(stream: AsyncIterator[Event]) -> aclosing[AsyncGenerator[Event, None]]:
    """Streams are closed to end their work, though AsyncIterator does not say that they can be."""
    return aclosing(cast("AsyncGenerator[Event, None]", stream))


def _failure(request: Request, error: Exception) -> HeadraceError:
    """What the caller is told. The log gets the place but not the words, which may be its own."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("request %s broke: %s\n%s", request.id, type(error).__name__, frames)
    return BackendFailed("The server failed while it answered. Please send the request again.")
