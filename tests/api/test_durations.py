"""Times as headers and bodies spell them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.durations import duration, server_timing, timings_object
from headrace.core.events import Start, Timings, Usage

_PARTS = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:(\d+)ms)?", re.ASCII)
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_METRIC = re.compile(rf'{_TOKEN}(?:;(?:dur=\d+(?:\.\d+)?|desc="[^"\\]*"))*', re.ASCII)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-5, "0s"),
        (0.02, "20ms"),
        (0.0001, "1ms"),
        (0.9999, "1s"),
        (1, "1s"),
        (1.5, "1.5s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (93.5, "1m33.5s"),
        (3600, "1h0m0s"),
        (86400, "24h0m0s"),
    ],
)
def test_durations_are_spelt_as_go_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e6))
def test_who_waits_a_duration_has_waited_enough_and_no_millisecond_more(seconds: float) -> None:
    match = _PARTS.fullmatch(duration(seconds))
    assert match is not None
    hours, minutes, rest, ms = (float(part or 0) for part in match.groups())
    told = hours * 3600 + minutes * 60 + rest + ms / 1000
    assert seconds - 1e-6 <= told < seconds + 0.001 + 1e-6
    assert minutes < 60
    assert rest < 60


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (Start("m", "b", 9, 4, queue_s=0.0123456), 'queue;dur=12.346, cached;desc="4"'),
        (Start("m", "b", 9), 'cached;desc="0"'),
        (Usage(9, 2, 4), 'cached;desc="4"'),
        (
            Usage(9, 2, 4, Timings(0.5, 0.25, 1.0, 1.75)),
            'queue;dur=500, prefill;dur=250, decode;dur=1000, total;dur=1750, cached;desc="4"',
        ),
        (Usage(9, 0, 0, Timings(None, None, None, 1e-7)), 'total;dur=0, cached;desc="0"'),
        (
            Usage(9, 0, 0, Timings(1e6, None, None, 1e9)),
            'queue;dur=1000000000, total;dur=1000000000000, cached;desc="0"',
        ),
    ],
)
def test_server_timing_tells_what_is_known(known: Start | Usage, text: str) -> None:
    assert server_timing(known).decode() == text


@given(st.floats(0, 1e9), st.none() | st.floats(0, 1e9), st.integers(0, 2**31))
def test_server_timing_is_always_valid(total: float, part: float | None, cached: int) -> None:
    header = server_timing(Usage(0, 0, cached, Timings(part, part, part, total))).decode()
    for metric in header.split(", "):
        assert _METRIC.fullmatch(metric), header


def test_the_object_has_every_figure_or_is_not_there() -> None:
    assert timings_object(Usage(9, 2, 4)) is None
    assert timings_object(Usage(9, 2, 4, Timings(0.0015, 0.25, None, 2.0))) == {
        "queue_ms": 1.5,
        "prefill_ms": 250.0,
        "decode_ms": None,
        "total_ms": 2000.0,
        "cached_tokens": 4,
    }
