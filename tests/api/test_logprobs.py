"""Both shapes of log-probabilities."""

from __future__ import annotations

import math

import orjson
import pytest

from headrace.api.logprobs import LegacyLogprobs, chat_entries
from headrace.core.events import TokenLogprob


def token(raw: bytes, logprob: float | None = -0.5, *top: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(1, raw.decode(errors="replace"), raw, logprob, top)


def test_chat_shape() -> None:
    entries = chat_entries([token(b"a", -0.5, token(b"a"), token(b"b", -1.0))])
    assert entries == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": -1.0, "bytes": [98]},
            ],
        }
    ]


@pytest.mark.parametrize("logprob", [-math.inf, math.inf, math.nan, -1e300, 1e-9])
def test_numbers_that_json_has_not(logprob: float) -> None:
    (entry,) = chat_entries([token(b"a", logprob)])
    legacy = LegacyLogprobs(1).render([token(b"a", logprob, token(b"a", logprob))])
    for value in (entry["logprob"], legacy["token_logprobs"][0], legacy["top_logprobs"][0]["a"]):
        assert -9999 <= value <= 0
    assert b"null" not in orjson.dumps(entry)


def test_chat_has_a_number_even_where_nothing_precedes() -> None:
    assert chat_entries([token(b"a", None)])[0]["logprob"] == -9999.0


def test_legacy_lists_run_in_parallel() -> None:
    lists = LegacyLogprobs(1)
    first = lists.render([token(b"A", None), token(b" B", -1.0, token(b" C", -0.1))])
    assert first == {
        "text_offset": [0, 1],
        "token_logprobs": [None, -1.0],
        "tokens": ["A", " B"],
        "top_logprobs": [None, {" C": -0.1, " B": -1.0}],
    }
    assert lists.render([token(b" D")])["text_offset"] == [3]


def test_legacy_without_top() -> None:
    assert LegacyLogprobs(0).render([token(b"a")])["top_logprobs"] == [None]


def test_legacy_tokens_inside_a_character() -> None:
    emoji = "\U0001f600".encode()
    parts = [token(b"x"), token(emoji[:2]), token(emoji[2:]), token(b"y")]
    rendered = LegacyLogprobs(0).render(parts)
    assert rendered["tokens"] == ["x", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "y"]
    assert rendered["text_offset"] == [0, 1, 1, 2]
