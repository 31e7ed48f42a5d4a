"""How urgent, on whose behalf, until when: what callers say of it in headers and in the body.

Gateways and proxies speak through headers, clients through either. What the values mean is judged
behind the edge; here they only have to be well-formed.
"""

from __future__ import annotations

import re

from starlette.requests import Request as HttpRequest

from headrace.api.cache_control import CACHE_REQUEST_HEADERS, controls_of
from headrace.api.schemas import MAX_TIMEOUT_S, GenerationBody
from headrace.caching import NO_CONTROLS
from headrace.core.errors import InvalidRequest
from headrace.gateway.claims import Terms

__all__ = ["TERM_HEADERS", "terms_of"]

PRIORITY = "X-Priority"
OBJECTIVE = "x-gateway-inference-objective"
FAIRNESS_ID = "x-gateway-inference-fairness-id"
TIMEOUT = "X-Request-Timeout"
TERM_HEADERS = {
    PRIORITY: "The priority class: a name, or a number in the direction of `priority`",
    OBJECTIVE: "The priority class, as the Gateway API's inference extension names it",
    FAIRNESS_ID: "On whose behalf a trusted key asks; shares are kept apart by it",
    TIMEOUT: "Seconds from arrival after which nobody wants the answer; of this and the field "
    "`timeout` the shorter one counts",
    **CACHE_REQUEST_HEADERS,
}
"""What each header says."""

_MAX_WORD = 128
_NUMBER = re.compile(r"\d{1,15}(\.\d{0,15})?|\.\d{1,15}", re.ASCII)


def terms_of(http: HttpRequest, body: GenerationBody) -> Terms:
    """Raises InvalidRequest that names the header."""
    return Terms(
        priority=body.priority,
        x_priority=_word(http, PRIORITY),
        objective=_word(http, OBJECTIVE),
        fairness_id=_word(http, FAIRNESS_ID),
        timeout_s=_sooner(_seconds(http), body.timeout),
        cache=controls_of(http) or NO_CONTROLS,
    )


def _sooner(header: float | None, field: float | None) -> float | None:
    """Of two limits both hold, so the shorter one counts: a proxy's general limit does not take a
    client's own away, and no client outlasts its proxy."""
    given = [limit for limit in (header, field) if limit is not None]
    return min(given, default=None)


def _seconds(http: HttpRequest) -> float | None:
    text = _only(http, TIMEOUT)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text) or not 0 < float(text) <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"'{TIMEOUT}' should be a number of seconds above 0 and up to {MAX_TIMEOUT_S}.",
            param=TIMEOUT,
        )
    return float(text)


def _word(http: HttpRequest, name: str) -> str | None:
    text = _only(http, name)
    if text is not None and not (0 < len(text) <= _MAX_WORD and _plain(text)):
        raise InvalidRequest(
            f"'{name}' should be 1 to {_MAX_WORD} visible ASCII characters without spaces.",
            param=name,
        )
    return text


def _only(http: HttpRequest, name: str) -> str | None:
    """Which of two would count depends on who reads, so a header that comes twice is refused."""
    values = http.headers.getlist(name)
    if len(values) > 1:
        raise InvalidRequest(f"'{name}' is given more than once.", param=name)
    return values[0].strip(" \t") if values else None


def _plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
