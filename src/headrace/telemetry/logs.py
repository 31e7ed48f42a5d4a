"""Structured logs on the standard library: text for people, JSON lines for machines.

Prompts, answers and keys never get here; whatever does is escaped to one line of ASCII.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from headrace.config import LogSettings
    from headrace.telemetry.record import RequestRecord

__all__ = ["configure_logging", "log_request"]

_requests = logging.getLogger("headrace.request")
_FIELDS = "fields"


def configure_logging(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Sends the server's and uvicorn's records to `stream` (standard error). May be repeated."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.json_lines else TextFormatter())
    for name in ("headrace", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(settings.level.upper())
        logger.propagate = False


def log_request(record: RequestRecord, now: float) -> None:
    """The one line of a finished request. Times in milliseconds since its arrival."""
    if not _requests.isEnabledFor(logging.INFO):
        return
    request = record.request
    fields: dict[str, Any] = {
        "id": request.id,
        "tenant": record.tenant,
        "model": record.model,
        "endpoint": request.endpoint.value,
        "outcome": None if record.outcome is None else record.outcome.value,
        "error": record.error_code,
        "choices": request.n,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "cache": None if record.cache is None else record.cache.tier or record.cache.status,
    }
    for name, at in (
        ("queue_ms", record.dispatched),
        ("first_token_ms", record.first_token),
        ("total_ms", now),
    ):
        fields[name] = None if at is None else round((at - request.arrival) * 1e3, 1)
    _requests.info("request finished", extra={_FIELDS: fields})


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO headrace.request: message key=value ...`, local time."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        words = [
            f"{stamp}.{int(record.msecs):03d} {record.levelname} {record.name}:",
            _one_line(record.getMessage()),
        ]
        words += [f"{k}={_word(v)}" for k, v in _fields(record).items() if v is not None]
        line = " ".join(words)
        return f"{line}\n{_traceback(record)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line; `time` is Unix seconds."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = _traceback(record)
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, _FIELDS, {})
    return fields


def _traceback(record: logging.LogRecord) -> str:
    text = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
    return text.encode("ascii", "backslashreplace").decode()


def _one_line(text: str) -> str:
    return text if text.isascii() and text.isprintable() else json.dumps(text)[1:-1]


def _word(value: Any) -> str:
    text = str(value)
    simple = text.isascii() and text.isprintable() and text and not set(text) & set(' "=')
    return text if simple else json.dumps(text)
