from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from headrace.config import LogSettings
from headrace.core.clock import VirtualClock
from headrace.core.events import Delta, Finish, FinishReason, Start, Usage
from headrace.telemetry import Metrics, RequestRecord, configure_logging
from support.backend import request

LOGGERS = ("headrace", "uvicorn")
SECRET = "the words of a prompt"


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    kept = [(logging.getLogger(name), logging.getLogger(name).__dict__.copy()) for name in LOGGERS]
    handlers = [logger.handlers[:] for logger, _ in kept]
    yield
    for (logger, state), before in zip(kept, handlers, strict=True):
        logger.handlers[:] = before
        logger.propagate = state["propagate"]
        logger.setLevel(state["level"])


def logged(*, json_lines: bool, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(
        LogSettings.model_validate({"json_lines": json_lines, "level": level}), stream
    )
    return stream


def finish_a_request(request_id: str = "req-1") -> None:
    clock = VirtualClock()
    asked = request(SECRET, id=request_id, user=SECRET, metadata={"k": SECRET})
    record = RequestRecord(asked, "key-1", clock, Metrics())
    record.routed("m")
    clock.advance(0.25)
    record.turn()
    record.observe(Start("m", "b", 5, 2))
    clock.advance(0.5)
    record.observe(Delta(0, SECRET, (1,)))
    record.observe(Finish(0, FinishReason.STOP))
    clock.advance(0.25)
    record.observe(Usage(5, 1, 2))
    record.close()


def test_a_finished_request_is_one_json_line() -> None:
    stream = logged(json_lines=True)
    finish_a_request()
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["level"] == "info"
    assert entry["logger"] == "headrace.request"
    expected = {
        "id": "req-1",
        "tenant": "key-1",
        "model": "m",
        "endpoint": "completion",
        "outcome": "stop",
        "error": None,
        "choices": 1,
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "completion_tokens": 1,
        "queue_ms": 250.0,
        "first_token_ms": 750.0,
        "total_ms": 1000.0,
    }
    assert {key: entry[key] for key in expected} == expected
    assert SECRET not in line


def test_a_finished_request_is_one_line_of_text() -> None:
    stream = logged(json_lines=False)
    finish_a_request()
    (line,) = stream.getvalue().splitlines()
    assert " INFO headrace.request: request finished id=req-1 tenant=key-1 model=m " in line
    assert "outcome=stop" in line
    assert "error=" not in line
    assert SECRET not in line


@pytest.mark.parametrize("json_lines", [True, False])
@pytest.mark.parametrize(
    "evil", ["a\nINFO forged: line", "a\r\x1b[31mred", "\ud800", 'a b"c=d', ""]
)
def test_no_value_breaks_a_line_or_the_log(evil: str, json_lines: bool) -> None:
    stream = logged(json_lines=json_lines)
    finish_a_request(evil)
    logging.getLogger("headrace.test").warning("%s", evil)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.isascii()
        assert line.isprintable()


@pytest.mark.parametrize("json_lines", [True, False])
def test_tracebacks_are_kept(json_lines: bool) -> None:
    stream = logged(json_lines=json_lines)
    try:
        raise RuntimeError("héhé \ud800")
    except RuntimeError:
        logging.getLogger("headrace.test").exception("it broke")
    text = stream.getvalue()
    assert "RuntimeError" in text
    assert text.isascii()


def test_the_level_counts_and_setting_up_twice_does_not_double() -> None:
    logged(json_lines=False)
    stream = logged(json_lines=False, level="warning")
    finish_a_request()
    logging.getLogger("uvicorn.error").info("started")
    assert stream.getvalue() == ""
    logging.getLogger("uvicorn.error").warning("careful")
    assert stream.getvalue().count("careful") == 1
