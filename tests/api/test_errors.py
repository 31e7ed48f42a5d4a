"""What the error object says, and where."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from headrace.api.errors import error_body, error_response
from headrace.backends.script import Script
from headrace.core.errors import HeadraceError, Overloaded, QuotaExceeded
from support.app import HELLO, events_of, refusal_of, site

BARE = {"message": "Full.", "type": "service_unavailable", "param": None, "code": "overloaded"}


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, {}),
        ({"reason": "pushed_out"}, {"reason": "pushed_out"}),
        ({"queue_position": 0}, {"queue_position": 0}),
        ({"retry_after_s": 0.0}, {"retry_after_ms": 1}),
        ({"retry_after_s": -3.0}, {"retry_after_ms": 1}),
        ({"retry_after_s": 1.2345}, {"retry_after_ms": 1235}),
        (
            {"reason": "target", "queue_position": 7, "retry_after_s": 60.0},
            {"reason": "target", "queue_position": 7, "retry_after_ms": 60_000},
        ),
    ],
)
def test_what_is_not_set_is_not_shown(more: dict[str, Any], shown: dict[str, Any]) -> None:
    error = Overloaded("Full.", **more)
    assert orjson.loads(error_body(error)) == {"error": {**BARE, **shown}}
    headers = error_response(error).headers
    assert headers.get("retry-after-ms") == (
        str(shown["retry_after_ms"]) if "retry_after_ms" in shown else None
    )


@pytest.mark.parametrize(
    ("seconds", "whole", "ms"),
    [(0.0, "1", "1"), (0.0201, "1", "21"), (1.0, "1", "1000"), (1.001, "2", "1001")],
)
def test_who_waits_as_told_has_waited_enough(seconds: float, whole: str, ms: str) -> None:
    headers = error_response(QuotaExceeded("Too many.", retry_after_s=seconds)).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == (whole, ms)


ERROR = Overloaded("Full.", reason="pushed_out", queue_position=12, retry_after_s=2.5)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_shows_it_in_its_body(stream: bool) -> None:
    async with site(Script((), refuse=ERROR)) as s:
        for response in (await s.chat(stream=stream), await s.complete(stream=stream)):
            error = refusal_of(response, 503)
            assert error["reason"] == "pushed_out"
            assert error["queue_position"] == 12
            assert error["retry_after_ms"] == 2500
            assert response.headers["retry-after"] == "3"


@pytest.mark.anyio
async def test_so_does_an_error_in_a_stream() -> None:
    async with site(Script(HELLO.lines, fail=ERROR, fail_after=1)) as s:
        *_, last = events_of((await s.chat(stream=True)).text)
        error = orjson.loads(last)["error"]
        assert error == {
            **BARE,
            "reason": "pushed_out",
            "queue_position": 12,
            "retry_after_ms": 2500,
        }


def test_errors_say_nothing_more_by_default() -> None:
    error = HeadraceError("x")
    assert (error.reason, error.queue_position, error.retry_after_s) == (None, None, None)
