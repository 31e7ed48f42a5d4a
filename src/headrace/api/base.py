"""What the edge needs from the room behind it, and what each handler needs from the app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from starlette.requests import Request as HttpRequest

from headrace.backends.base import ModelCard
from headrace.config import Settings
from headrace.core.clock import Clock, Entropy
from headrace.core.events import Event
from headrace.core.health import Health
from headrace.core.request import Message, Request
from headrace.gateway import Tenant
from headrace.telemetry import Metrics

__all__ = ["Context", "Gateway", "context_of", "tenant_of"]


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

    def generate(self, request: Request, tenant: Tenant) -> AsyncIterator[Event]:
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
