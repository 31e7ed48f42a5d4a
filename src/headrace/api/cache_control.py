"""What callers ask of the response cache, and what they are told of it.

Cache-Control is read by RFC 9111, the answer's Cache-Status written by RFC 9211; x-cache-... are
ours.
"""

from __future__ import annotations

import math
import re
from typing import get_args

from starlette.requests import Request as HttpRequest

from headrace.caching.policy import Controls, Mode
from headrace.core.errors import InvalidRequest
from headrace.core.events import CacheNote

__all__ = ["CACHE_HEADERS", "CACHE_REQUEST_HEADERS", "cache_headers", "controls_of"]

NAMESPACE = "x-cache-namespace"
TTL = "x-cache-ttl"
MODE = "x-cache-mode"
SIMILARITY = "x-cache-min-similarity"
TAGS = "x-cache-tags"

CACHE_REQUEST_HEADERS = {
    "Cache-Control": "no-store, no-cache, max-age=SECONDS and only-if-cached, as in RFC 9111",
    NAMESPACE: "Answers are shared only with requests that name the same one",
    TTL: "Seconds to keep the answer, at most as long as the server would",
    MODE: "off, exact or semantic: which stored answers will do",
    SIMILARITY: "Least cosine of two questions; can only raise the server's own bar",
    TAGS: "Names, with commas between, by which the answer can be forgotten later",
}
CACHE_HEADERS = (
    "x-cache",
    "x-cache-reason",
    "x-cache-tier",
    "x-cache-entry",
    "x-cache-similarity",
    "x-cache-pair",
    "cache-status",
)
"""What answers have, for browsers to be let see. `age` is not listed: it always is."""

_NAMESPACE = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_SECONDS = re.compile(r"\d{1,10}", re.ASCII)
_FRACTION = re.compile(r"0(\.\d{1,9})?|1(\.0{1,9})?", re.ASCII)
_HUGE = 2**31
_MOST_TAGS = 8
_OURS = (NAMESPACE, TTL, MODE, SIMILARITY, TAGS)
_SHOWN = {"hit": "HIT", "miss": "MISS", "coalesced": "COALESCED", "bypass": "BYPASS"}
_STATUS = {
    "hit": "Headrace; hit",
    "miss": "Headrace; fwd=miss",
    "coalesced": "Headrace; fwd=miss; collapsed",
    "bypass": "Headrace; fwd=bypass",
}


def controls_of(http: HttpRequest) -> Controls | None:
    """None if nothing is asked. Raises InvalidRequest that names the header. Directives that mean
    nothing here are ignored, as RFC 9111 wants it; ours must be well-formed."""
    headers = http.headers
    directives = headers.getlist("cache-control")
    if not directives and not any(name in headers for name in _OURS):
        return None
    asked = _directives(",".join(directives))
    return Controls(
        no_store="no-store" in asked,
        no_cache="no-cache" in asked,
        max_age_s=_max_age(asked),
        only_if_cached="only-if-cached" in asked,
        ttl_s=_ttl(http),
        namespace=_namespace(http),
        mode=_mode(http),
        min_similarity=_similarity(http),
        tags=_tags(http),
    )


def cache_headers(note: CacheNote | None) -> list[tuple[bytes, bytes]]:
    """Nothing where there is no cache."""
    if note is None:
        return []
    status = _STATUS[note.status]
    headers = [(b"x-cache", _SHOWN[note.status].encode())]
    if note.reason is not None:
        headers.append((b"x-cache-reason", note.reason.encode()))
        status += f"; detail={note.reason}"
    if note.tier is not None:
        headers.append((b"x-cache-tier", note.tier.encode()))
    if note.age_s is not None:
        headers.append((b"age", str(math.floor(note.age_s)).encode()))
    if note.ttl_s is not None:
        status += f"; ttl={math.floor(note.ttl_s)}"
    if note.entry is not None:
        headers.append((b"x-cache-entry", note.entry.encode()))
    if note.similarity is not None:
        headers.append((b"x-cache-similarity", f"{note.similarity:.4f}".encode()))
    if note.pair is not None:
        headers.append((b"x-cache-pair", note.pair.encode()))
    headers.append((b"cache-status", status.encode()))
    return headers


def _directives(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name:
            found.setdefault(name.strip().lower(), value.strip().strip('"'))
    return found


def _max_age(asked: dict[str, str]) -> float | None:
    text = asked.get("max-age")
    if text is None:
        return None
    if not _SECONDS.fullmatch(text):
        raise InvalidRequest(
            "'Cache-Control: max-age' should be a whole number of seconds.", param="Cache-Control"
        )
    return float(min(int(text), _HUGE))


def _ttl(http: HttpRequest) -> float | None:
    text = _only(http, TTL)
    if text is None:
        return None
    if not _SECONDS.fullmatch(text) or int(text) == 0:
        raise InvalidRequest(f"'{TTL}' should be a whole number of seconds above 0.", param=TTL)
    return float(min(int(text), _HUGE))


def _namespace(http: HttpRequest) -> str:
    text = _only(http, NAMESPACE)
    if text is None:
        return ""
    if not _NAMESPACE.fullmatch(text):
        raise InvalidRequest(
            f"'{NAMESPACE}' should be 1 to 128 letters, digits and . _ : @ / -", param=NAMESPACE
        )
    return text


def _mode(http: HttpRequest) -> Mode | None:
    text = _only(http, MODE)
    modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
    if text is None:
        return None
    if text.lower() not in modes:
        raise InvalidRequest(f"'{MODE}' should be one of {', '.join(modes)}.", param=MODE)
    return modes[text.lower()]


def _similarity(http: HttpRequest) -> float | None:
    text = _only(http, SIMILARITY)
    if text is None:
        return None
    if not _FRACTION.fullmatch(text):
        raise InvalidRequest(f"'{SIMILARITY}' should be a number from 0 to 1.", param=SIMILARITY)
    return float(text)


def _tags(http: HttpRequest) -> tuple[str, ...]:
    text = _only(http, TAGS)
    if text is None:
        return ()
    tags = tuple(dict.fromkeys(tag.strip() for tag in text.split(",")))
    if len(tags) > _MOST_TAGS or not all(_NAMESPACE.fullmatch(tag) for tag in tags):
        raise InvalidRequest(
            f"'{TAGS}' should be up to {_MOST_TAGS} names of 1 to 128 letters, digits and"
            " . _ : @ / - with commas between",
            param=TAGS,
        )
    return tags


def _only(http: HttpRequest, name: str) -> str | None:
    """Which of two would count depends on who reads, so a header that comes twice is refused."""
    values = http.headers.getlist(name)
    if len(values) > 1:
        raise InvalidRequest(f"'{name}' is given more than once.", param=name)
    return values[0].strip(" \t") if values else None
