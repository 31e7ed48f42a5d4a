"""A gateway whose limits, queue and settings are what the test says, and that notes the terms."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.events import Event
from headrace.core.request import Request
from headrace.gateway import Gateway, Tenant
from headrace.gateway.claims import Terms
from headrace.gateway.view import QueueRow

_NO_TERMS = Terms()


@dataclass(frozen=True)
class Limits:
    """What quotas hand out."""

    limit_requests: float | None = None
    remaining_requests: float | None = None
    reset_requests_s: float | None = None
    limit_tokens: float | None = None
    remaining_tokens: float | None = None
    reset_tokens_s: float | None = None


class OverseenGateway(Gateway):
    """Ten requests a minute for each tenant, of which those answered or under way are taken."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.terms: list[Terms] = []
        self.asked: list[str] = []
        self.settings: dict[str, object] = {"window_s": 2.0, "auto_targets": True}
        self.people: dict[bytes, Tenant] = {}
        self.limited = True

    def authenticate(self, credential: bytes | None) -> Tenant:
        if credential is not None and credential in self.people:
            return self.people[credential]
        return super().authenticate(credential)

    async def generate(
        self, request: Request, tenant: Tenant, terms: Terms = _NO_TERMS
    ) -> AsyncGenerator[Event, None]:
        self.terms.append(terms)
        async for event in super().generate(request, tenant):
            yield event

    def ratelimit(self, tenant: Tenant) -> Any:
        self.asked.append(tenant.name)
        return Limits(10, 10 - len(self.terms), 6.0 * len(self.terms)) if self.limited else None

    def queue_view(self, tenant: Tenant) -> list[QueueRow]:
        rows = [
            QueueRow("m", "interactive", "a", 2, 1, 300, 0.5, 1.25),
            QueueRow("m", "batch", "b", 5, 0, 9000, 40.0, None),
        ]
        return [row for row in rows if getattr(tenant, "admin", False) or row.flow == tenant.name]

    def scheduling_config(self) -> dict[str, object]:
        return self.settings

    def configure_scheduling(self, changes: Mapping[str, object]) -> dict[str, object]:
        for key in changes:
            if key not in self.settings:
                raise InvalidRequest(f"There is no setting '{key[:40]}'.", param=key[:40])
        self.settings |= changes
        return self.settings

    def scheduling_trace(self) -> Sequence[Mapping[str, object]]:  # type: ignore[override]
        return [{"step": 1, "prefill_tokens": 64, "reason": "target"}]
