"""What a backend says while it answers: `Start`, then `Delta`s and `Finish`es, last `Usage`."""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = [
    "CacheNote",
    "Delta",
    "Event",
    "Finish",
    "FinishReason",
    "Start",
    "Timings",
    "TokenLogprob",
    "Usage",
]


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One token with its natural-log probability under the model's raw distribution.

    `text` is the token decoded alone (U+FFFD where it is part of a character), `raw` its bytes.
    `logprob` is None only for the first token of an echoed prompt, which nothing precedes.
    `top` holds the most probable tokens at this position, best first.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


class Timings(msgspec.Struct, frozen=True, gc=False):
    """Where a request's time went, in seconds: until its turn, from there to the first token, from
    there to the last one, and altogether. None where it never came to that."""

    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    total_s: float


class CacheNote(msgspec.Struct, frozen=True, gc=False):
    """What the response cache had to do with an answer. `status` is hit, miss, coalesced (it is
    being computed for somebody else too) or bypass, which has a `reason`; the rest is known of
    hits. `entry` names what is stored, `pair` the two questions that were taken for the same."""

    status: str
    tier: str | None = None
    entry: str | None = None
    age_s: float | None = None
    ttl_s: float | None = None
    similarity: float | None = None
    pair: str | None = None
    reason: str | None = None


class Start(msgspec.Struct, frozen=True, gc=False, tag="start"):
    """The request is accepted and being computed: from here on the HTTP status is 200.

    `queue_s` is the time from arrival to its turn; it and `cache` are set by the gateway.
    """

    model: str
    backend: str
    prompt_tokens: int
    cached_tokens: int = 0
    cache: CacheNote | None = None
    queue_s: float | None = None


class Delta(msgspec.Struct, frozen=True, gc=False, tag="delta"):
    """A piece of choice `index`. `text` may be empty while half a character or stop is held back.

    With `echo` the first delta of a choice carries the prompt. `logprobs` is None unless asked
    for, else one entry for each of `token_ids`. The texts of a choice, joined, are its answer;
    `token_ids` counts towards completion tokens except where `prompt` is true.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt: bool = False


class Finish(msgspec.Struct, frozen=True, gc=False, tag="finish"):
    """Choice `index` is complete. `stop` is the stop string or token id that ended it, if any."""

    index: int
    reason: FinishReason
    stop: str | int | None = None


class Usage(msgspec.Struct, frozen=True, gc=False, tag="usage"):
    """Exact token counts of the whole request; the prompt counts once however many choices.
    `timings` are set by the gateway."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    timings: Timings | None = None


Event = Start | Delta | Finish | Usage
