"""One generation request, validated and with its defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import msgspec

__all__ = ["Endpoint", "Message", "PriorityClass", "Request", "SamplingParams"]


class Endpoint(StrEnum):
    """Kinds of generation request."""

    CHAT = "chat"
    COMPLETION = "completion"


class PriorityClass(IntEnum):
    """How urgent a request is; lower is more urgent."""

    SYSTEM = 0
    INTERACTIVE = 1
    STANDARD = 2
    BATCH = 3


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How tokens are chosen and when a choice ends. Values are validated at the edge.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `max_tokens` None means up to the
    context limit. `logprobs` None is off, k >= 0 asks for the chosen token and the k best ones;
    the same for `prompt_logprobs` over the prompt. `seed` None lets the engine draw one.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn. `tool_calls` keep OpenAI's shape, with `arguments` already a mapping."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one client asked of one model: one prompt, `n` choices.

    Exactly one of `messages` (chat) and `prompt` (completion) is set. `prompt_token_ids` is None
    until the gateway has tokenised. `arrival` is the clock's monotonic time. `priority` follows
    vLLM: lower is more urgent. `extra_fields` holds the vocabulary that only some backends honour
    (tools, response_format, ...), by name as sent.
    """

    id: str
    endpoint: Endpoint
    model: str
    sampling: SamplingParams
    arrival: float
    messages: tuple[Message, ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    n: int = 1
    echo: bool = False
    tenant: str = "default"
    user: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    cache_salt: str | None = None
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
