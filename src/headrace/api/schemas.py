"""Request bodies as they come over the wire: types, ranges and what each field means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from headrace.api.fields import (
    MAX_STOP_TOKENS,
    Content,
    LogitBias,
    Prompts,
    Stops,
    TokenIds,
    WireModel,
)

__all__ = [
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "DetokenizeBody",
    "EmbeddingBody",
    "GenerationBody",
    "StreamOptions",
    "TokenizeBody",
]

MAX_INPUTS = 2048
MAX_LOGPROBS = 20
MAX_TIMEOUT_S = 365 * 86400

ModelName = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(WireModel):
    """What a stream carries besides the answer."""

    include_usage: bool = False
    """One last event before [DONE] with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """With include_usage: every event carries the usage so far."""


class GenerationBody(WireModel):
    """What both generation endpoints take."""

    model: ModelName
    max_tokens: Count | None = None
    min_tokens: Count = 0
    """No end token and no stop string ends the answer before this many tokens."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0 always takes the most probable token."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = 0
    """0 or -1 is off."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    n: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1
    stop: Stops = ()
    """Up to 16 strings; the answer ends before the first that occurs. Empty ones are ignored."""
    include_stop_str_in_output: bool = False
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS)] = ()
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: LogitBias = ()
    """Token id to a number in -100..100 that is added to its logit."""
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    """Lower is more urgent, 0 what the key's requests usually are."""
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] | None = None
    """Seconds from arrival after which nobody wants the answer; of this and the header
    X-Request-Timeout the shorter one counts."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Prompts share cached prefixes only with those of the same salt."""

    # Known, and refused by name where the model's backend does not honour them.
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None


class FunctionCall(WireModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Any = ""
    """JSON as a string, or the object itself."""


class ToolCall(WireModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(WireModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list, fail_fast=True)
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    function_call: FunctionCall | None = None


# Without fail_fast a long array of faults would become a longer list of complaints.
Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Count | None = None
    """The newer name of max_tokens; wins where both are given."""
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None

    # Known, and refused by name where the model's backend does not honour them.
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompts
    max_tokens: Count | None = 16
    """0 only with echo: the prompt is scored and nothing generated."""
    logprobs: TopLogprobs | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None


class EmbeddingBody(WireModel):
    """POST /v1/embeddings"""

    model: ModelName
    input: Annotated[Prompts, Field(max_length=MAX_INPUTS)]
    """Up to 2048 texts, or their token ids."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Shorter vectors, where the model can."""
    user: str | None = None


class TokenizeBody(WireModel):
    """POST /tokenize: either `prompt` or `messages`."""

    model: ModelName | None = None
    """The first model where absent."""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """True for a prompt and false for messages where absent, since the template adds its own."""
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(WireModel):
    """POST /detokenize"""

    model: ModelName | None = None
    """The first model where absent."""
    tokens: TokenIds
