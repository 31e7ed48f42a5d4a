"""What the edge needs from the room behind it, and what each handler needs from the app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from starlette.requests import Request as HttpRequest

from headrace.backends.base import ModelCard
from headrace.caching import Entry
from headrace.config import Settings
from headrace.core.clock import Clock, Entropy
from headrace.core.events import Event
from headrace.core.health import Health
from headrace.core.request import Message, Request
from headrace.gateway import Tenant
from headrace.gateway.claims import Terms
from headrace.gateway.embedding import Embedded
from headrace.gateway.view import QueueRow
from headrace.telemetry import Metrics

__all__ = ["NO_TERMS", "Context", "Gateway", "RateLimits", "context_of", "tenant_of"]


NO_TERMS = Terms()


class RateLimits(Protocol):
    """A tenant's limits, what is left of them, and in how many seconds they are whole again. None
    where there is no such limit."""

    @property
    def limit_requests(self) -> float | None: ...

    @property
    def remaining_requests(self) -> float | None: ...

    @property
    def reset_requests_s(self) -> float | None: ...

    @property
    def limit_tokens(self) -> float | None: ...

    @property
    def remaining_tokens(self) -> float | None: ...

    @property
    def reset_tokens_s(self) -> float | None: ...


class Gateway(Protocol):
    """The life of a request. Every method is called on the event loop that serves."""

    @property
    def metrics(self) -> Metrics: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    @property
    def draining(self) -> bool: ...

    def authenticate(self, credential: bytes | None) -> Tenant:
        """Raises Unauthorized."""
        ...

    def models(self, tenant: Tenant) -> tuple[ModelCard, ...]: ...

    def model(self, tenant: Tenant, name: str) -> ModelCard:
        """Raises ModelNotFound."""
        ...

    def generate(
        self, request: Request, tenant: Tenant, terms: Terms = NO_TERMS
    ) -> AsyncIterator[Event]:
        """Closing the iterator cancels the work. Refusals are raised at the first step."""
        ...

    async def tokenize(
        self,
        tenant: Tenant,
        model: str,
        content: str | Sequence[Message],
        *,
        add_special_tokens: bool,
        add_generation_prompt: bool,
    ) -> list[int]: ...

    async def detokenize(self, tenant: Tenant, model: str, token_ids: Sequence[int]) -> str: ...

    async def token_texts(
        self, tenant: Tenant, model: str, token_ids: Sequence[int]
    ) -> list[str]: ...

    def health(self) -> Health: ...

    def require_possible(self, tenant: Tenant, requests: int, choices: int) -> None:
        """Raises InvalidRequest for a call that the tenant's limits would never let through."""
        ...

    def ratelimit(self, tenant: Tenant) -> RateLimits | None:
        """The tenant's limits as of now, None where it has none."""
        ...

    def queue_view(self, tenant: Tenant) -> Sequence[QueueRow]:
        """The tenant's own rows; every tenant's for an admin."""
        ...

    def scheduling_config(self) -> Mapping[str, object]:
        """The settings in force, as JSON knows them."""
        ...

    def configure_scheduling(self, changes: Mapping[str, object]) -> Mapping[str, object]:
        """Makes all the changes or none, and returns the settings then in force. Raises
        InvalidRequest that names the key."""
        ...

    def scheduling_trace(self) -> Sequence[Mapping[str, object]]:
        """The last steps' decisions, oldest first, as JSON knows them."""
        ...

    def cache_stats(self) -> Mapping[str, object]:
        """Of the response cache, as JSON knows it. Raises NotFound where there is none."""
        ...

    def invalidate_cache(
        self,
        tenant: str | None = None,
        model: str | None = None,
        namespace: str | None = None,
        tag: str | None = None,
    ) -> None:
        """Forgets the stored answers of all that is given. Raises InvalidRequest, NotFound."""
        ...

    async def embed(
        self,
        tenant: Tenant,
        model: str,
        inputs: Sequence[str | tuple[int, ...]],
        dimensions: int | None,
    ) -> Embedded:
        """Raises ModelNotFound, InvalidRequest, QuotaExceeded, BackendUnavailable."""
        ...

    async def cached(self, entry: bytes) -> Entry | None:
        """One stored answer. Raises NotFound where there is no cache, as do those below."""
        ...

    def all_cached(self) -> AsyncIterator[tuple[bytes, Entry]]:
        """Every stored answer by its name."""
        ...

    def take_cached(self, key: bytes, entry: Entry) -> bool:
        """Keeps what another server has exported; False if it cannot be used."""
        ...

    def forget_cached(self, entry: bytes) -> None:
        """Raises NotFound where there is no cache."""
        ...

    def judge_cached(self, pair: str, *, good: bool) -> bool:
        """A caller's word on two questions taken for the same; False if they are not known."""
        ...

    def exposition(self) -> bytes:
        """All metrics, as telemetry.EXPOSITION_TYPE."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """Everything a handler may use; one for each app, in `app.state.context`."""

    gateway: Gateway
    settings: Settings
    clock: Clock
    entropy: Entropy


def context_of(request: HttpRequest) -> Context:
    """Set by the app factory."""
    return cast("Context", request.app.state.context)


def tenant_of(request: HttpRequest) -> Tenant:
    """Set by the key check, which every route but the probes has passed."""
    return cast("Tenant", request.state.tenant)
