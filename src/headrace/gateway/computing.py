"""One generation: from admission over the queue to the end of the backend's stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import cast

from headrace.backends.base import ModelCard
from headrace.core.errors import BackendFailed, HeadraceError
from headrace.core.events import Delta, Event, Finish, FinishReason, Start, Usage
from headrace.core.request import PriorityClass, Request
from headrace.gateway.lanes import Lane
from headrace.gateway.lifeline import Lifeline
from headrace.gateway.tenants import Tenant
from headrace.gateway.tokenising import Tokeniser, cost_of, text_length, tokenised
from headrace.gateway.validation import context_limit, fit
from headrace.scheduling import Claim, Revoked, Ticket
from headrace.scheduling.quotas import Quotas

__all__ = ["Job", "Turned", "computed"]

Turned = Callable[[PriorityClass], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A validated request and where it goes. `claim` is what the scheduler is told of it."""

    request: Request
    tenant: Tenant
    claim: Claim
    lane: Lane
    card: ModelCard


class _Meter:
    """Tokens of prompt and answers so far."""

    __slots__ = ("_answers", "_prompt")

    def __init__(self) -> None:
        self._prompt = self._answers = 0

    @property
    def tokens(self) -> int:
        return self._prompt + self._answers

    def observe(self, event: Event) -> None:
        if isinstance(event, Delta):
            if not event.prompt:
                self._answers += len(event.token_ids)
        elif isinstance(event, Start):
            self._prompt = event.prompt_tokens
        elif isinstance(event, Usage):
            self._prompt, self._answers = event.prompt_tokens, event.completion_tokens


async def computed(
    job: Job, life: Lifeline, turned: Turned, *, quotas: Quotas, tokeniser: Tokeniser
) -> AsyncGenerator[Event, None]:
    """The answer, computed. Refusals are raised at the first step; `turned` is called at each turn.
    All that it holds is given back when it is closed."""
    request, lane = job.request, job.lane
    lane.require_ready()
    meter = _Meter()
    async with AsyncExitStack() as stack:
        hold = quotas.admit(
            job.tenant.name,
            job.tenant.limits,
            request.n,
            lane.control.expected_tokens(request, job.claim),
        )
        stack.callback(lambda: hold.settle(meter.tokens))
        try:
            ticket = lane.scheduler.admit(request, cost_of(request), job.claim, life.interrupt)
        except HeadraceError:
            hold.give_back()
            raise
        stack.callback(ticket.release)
        if lane.backend.codec is not None:
            work = partial(tokenised, request, lane.backend.codec)
            size = text_length(request.messages or request.prompt)
            request = await life.wait(partial(tokeniser.run, work, size, admitted=True))
            request = fit(request, context_limit(job.card, lane.backend))
            hold.adjust(lane.control.expected_tokens(request, job.claim))
        async with aclosing(_run(request, lane, ticket, life, turned)) as events:
            async for event in events:
                meter.observe(event)
                yield event


async def _run(
    request: Request, lane: Lane, ticket: Ticket, life: Lifeline, turned: Turned
) -> AsyncGenerator[Event, None]:
    """From its turn to its end; after a revoked turn, from the next one."""
    while True:
        cost = cost_of(request, lane.control.cached_tokens(request))
        await life.wait(partial(ticket.turn, cost))
        lane.require_ready()
        turned(PriorityClass(request.priority))
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


def _closing(stream: AsyncIterator[Event]) -> aclosing[AsyncGenerator[Event, None]]:
    """Streams are closed to end their work, though AsyncIterator does not say that they can be."""
    return aclosing(cast("AsyncGenerator[Event, None]", stream))
