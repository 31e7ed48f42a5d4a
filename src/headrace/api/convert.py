"""Bodies to requests: every rule that spans fields or comes from the limits. What only the model
can judge is the gateway's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from headrace.api.schemas import ChatBody, ChatMessage, CompletionBody, FunctionCall, GenerationBody
from headrace.config import LimitSettings
from headrace.core.errors import InvalidRequest
from headrace.core.request import Endpoint, Message, Request, SamplingParams

__all__ = ["Origin", "chat_request", "completion_requests", "core_messages"]

MAX_ARGUMENT_DEPTH = 64
_SMALLEST_TOP_P = 1e-9
"""OpenAI takes top_p 0; it leaves the most probable token alone, and so does this."""

_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
_GENERATION_EXTRAS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "prompt_logprobs",
    "use_beam_search",
)
_CHAT_EXTRAS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "web_search_options",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a request is besides its body. `arrival` is monotonic seconds."""

    id: str
    tenant: str
    arrival: float
    limits: LimitSettings


def chat_request(body: ChatBody, origin: Origin) -> Request:
    """Raises InvalidRequest that names the field."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    limit, field = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        limit, field = body.max_completion_tokens, "max_completion_tokens"
    if limit == 0:
        raise InvalidRequest(f"'{field}' should be at least 1.", param=field)
    _check(body, limit, origin)
    return Request(
        id=origin.id,
        endpoint=Endpoint.CHAT,
        messages=core_messages(body.messages),
        sampling=_sampling(body, limit, (body.top_logprobs or 0) if body.logprobs else None),
        extra_fields=_chat_extras(body),
        **_common(body, origin),
    )


def completion_requests(body: CompletionBody, origin: Origin) -> tuple[Request, ...]:
    """One request for each prompt, in order. Raises InvalidRequest that names the field."""
    if body.suffix:
        raise InvalidRequest("'suffix' is not supported.", param="suffix")
    if body.best_of is not None and body.best_of != body.n:
        raise InvalidRequest("'best_of' other than 'n' is not supported.", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("'max_tokens' 0 needs 'echo': true.", param="max_tokens")
    if len(body.prompt) > origin.limits.max_prompts:
        raise InvalidRequest(
            f"'prompt' has more than {origin.limits.max_prompts} prompts.", param="prompt"
        )
    _check(body, body.max_tokens, origin)
    sampling = _sampling(body, body.max_tokens, body.logprobs, echo=body.echo)
    common = _common(body, origin)
    extras = _set_fields(body, _GENERATION_EXTRAS)
    several = len(body.prompt) > 1
    return tuple(
        Request(
            id=f"{origin.id}-{i}" if several else origin.id,
            endpoint=Endpoint.COMPLETION,
            prompt=prompt,
            echo=body.echo,
            sampling=sampling,
            extra_fields=extras,
            **common,
        )
        for i, prompt in enumerate(body.prompt)
    )


def core_messages(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Raises InvalidRequest for a conversation that no template could render."""
    return tuple(_message(message, f"messages.{i}") for i, message in enumerate(messages))


def _message(message: ChatMessage, where: str) -> Message:
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"'{where}.content' is required.", param=f"{where}.content")
    calls = [(call.id, call.function) for call in message.tool_calls]
    if message.function_call is not None:
        calls.append((None, message.function_call))
    return Message(
        role=_TEMPLATE_ROLES.get(message.role, message.role),
        content=message.content if message.content is not None or calls else "",
        name=message.name,
        tool_calls=tuple(
            {
                "id": call_id,
                "type": "function",
                "function": {
                    "name": function.name,
                    "arguments": _arguments(function, f"{where}.tool_calls.{i}.function.arguments"),
                },
            }
            for i, (call_id, function) in enumerate(calls)
        ),
        tool_call_id=message.tool_call_id,
    )


def _arguments(function: FunctionCall, where: str) -> Mapping[str, Any]:
    """Templates loop over a mapping; on the wire it is JSON in a string. What is JSON but no
    object (clients send "", "null" or "[]" for "none") is an empty mapping."""
    value = function.arguments
    if isinstance(value, str) and value.strip():
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise InvalidRequest(f"'{where}' is not valid JSON.", param=where) from None
    if not isinstance(value, dict):
        return {}
    if not _shallow(value):
        raise InvalidRequest(f"'{where}' is nested too deeply.", param=where)
    return value


def _shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_ARGUMENT_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return True
    return False


def _check(body: GenerationBody, max_tokens: int | None, origin: Origin) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream': true.", param="stream_options")
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequest("'min_tokens' is more than 'max_tokens'.", param="min_tokens")
    if body.n > origin.limits.max_choices:
        raise InvalidRequest(f"'n' should be at most {origin.limits.max_choices}.", param="n")


def _sampling(
    body: GenerationBody, max_tokens: int | None, logprobs: int | None, *, echo: bool = False
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p or _SMALLEST_TOP_P,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed & (2**63 - 1),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )


def _common(body: GenerationBody, origin: Origin) -> dict[str, Any]:
    return {
        "model": body.model,
        "arrival": origin.arrival,
        "n": body.n,
        "tenant": origin.tenant,
        "user": body.user,
        "metadata": body.metadata,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
    }


def _set_fields(body: GenerationBody, names: Sequence[str]) -> dict[str, Any]:
    """The fields that ask for something. Values that only spell out the default are absent."""
    found = {name: getattr(body, name) for name in names}
    found = {name: value for name, value in found.items() if not _is_default(value)}
    if (found.get("response_format") or {}).get("type") == "text":
        del found["response_format"]
    return found


def _is_default(value: Any) -> bool:
    return value is None or value is False or value in ([], {})


def _chat_extras(body: ChatBody) -> dict[str, Any]:
    found = _set_fields(body, (*_GENERATION_EXTRAS, *_CHAT_EXTRAS))
    if body.add_generation_prompt is False:
        found["add_generation_prompt"] = False
    else:
        found.pop("add_generation_prompt", None)
    if found.get("modalities") == ["text"]:
        del found["modalities"]
    if "tools" not in found:
        found.pop("parallel_tool_calls", None)
        if found.get("tool_choice") in ("none", "auto"):
            del found["tool_choice"]
    elif body.parallel_tool_calls is False:
        found["parallel_tool_calls"] = False
    if "functions" not in found and found.get("function_call") in ("none", "auto"):
        del found["function_call"]
    return found
