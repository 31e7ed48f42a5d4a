"""What each call of a generation endpoint gets besides its answer: the rate limit headers, and one
place in the count of requests. The gateway counts what reaches it; the rest is counted here."""

from __future__ import annotations

import math

from starlette.types import Scope

from headrace.api.base import Gateway
from headrace.api.durations import duration
from headrace.core.errors import HeadraceError
from headrace.core.request import Endpoint
from headrace.telemetry import Outcome

__all__ = ["LIMIT_HEADERS", "GenerationCalls", "hand_over", "note_refusal"]

LIMIT_HEADERS = tuple(
    f"x-ratelimit-{figure}-{kind}"
    for figure in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
)

_ENDPOINTS = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETION,
}
_REFUSAL = "refusal"
_HANDED_OVER = "handed_over"


def note_refusal(scope: Scope, error: HeadraceError) -> None:
    """The call is being answered with this error."""
    scope.setdefault("state", {})[_REFUSAL] = error


def hand_over(scope: Scope) -> None:
    """From here on the gateway counts how the call ends."""
    scope.setdefault("state", {})[_HANDED_OVER] = True


class GenerationCalls:
    """One for each app. Calls of other endpoints are none of its business."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """OpenAI's six x-ratelimit headers, for an answer of any status that is about to start.
        They tell of the tenant's limits with this call counted; those it does not have are absent,
        and all of them as long as nobody knows whose call it is."""
        tenant = scope.get("state", {}).get("tenant")
        if tenant is None or _endpoint(scope) is None:
            return []
        limits = self._gateway.ratelimit(tenant)
        if limits is None:
            return []
        values = (
            _count(limits.limit_requests),
            _count(limits.limit_tokens),
            _count(limits.remaining_requests),
            _count(limits.remaining_tokens),
            _reset(limits.reset_requests_s),
            _reset(limits.reset_tokens_s),
        )
        return [
            (name.encode(), value.encode())
            for name, value in zip(LIMIT_HEADERS, values, strict=True)
            if value is not None
        ]

    def ended(self, scope: Scope, *, answered: bool) -> None:
        """The call is over; counts it if it never got as far as the gateway."""
        endpoint = _endpoint(scope)
        state = scope.get("state", {})
        if endpoint is None or state.get(_HANDED_OVER):
            return
        refusal = state.get(_REFUSAL)
        if refusal is not None:
            self._gateway.metrics.unrouted(endpoint, Outcome.of_refusal(refusal))
        elif not answered:
            self._gateway.metrics.unrouted(endpoint, Outcome.CANCELLED)


def _endpoint(scope: Scope) -> Endpoint | None:
    return _ENDPOINTS.get(scope["path"]) if scope["method"] == "POST" else None


def _count(value: float | None) -> str | None:
    return None if value is None else str(max(math.floor(value), 0))


def _reset(seconds: float | None) -> str | None:
    return None if seconds is None else duration(seconds)
