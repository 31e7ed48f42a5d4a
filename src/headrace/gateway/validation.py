"""What of a request can only be judged by the model and backend that would serve it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from headrace.backends.base import Backend, ModelCard
from headrace.core.errors import ContextLengthExceeded, InvalidRequest, UnsupportedField
from headrace.core.request import Endpoint, Request

__all__ = [
    "check_capabilities",
    "check_token_ids",
    "check_vocabulary",
    "context_limit",
    "fit",
    "vocabulary",
]

_OPTIONAL: tuple[tuple[str, Callable[[Request], bool]], ...] = (
    ("echo", lambda r: r.echo),
    (
        "logprobs",
        lambda r: r.sampling.logprobs is not None or r.sampling.prompt_logprobs is not None,
    ),
    ("n", lambda r: r.n != 1),
    ("top_k", lambda r: r.sampling.top_k != 0),
    ("min_p", lambda r: r.sampling.min_p != 0),
    ("repetition_penalty", lambda r: r.sampling.repetition_penalty != 1),
    ("logit_bias", lambda r: bool(r.sampling.logit_bias)),
    ("min_tokens", lambda r: r.sampling.min_tokens != 0),
    ("ignore_eos", lambda r: r.sampling.ignore_eos),
    ("stop_token_ids", lambda r: bool(r.sampling.stop_token_ids)),
    ("include_stop_str_in_output", lambda r: r.sampling.include_stop_str_in_output),
)
"""Fields a backend may lack, and whether a request asks for more than their default."""

_PATHS = {Endpoint.CHAT: "/v1/chat/completions", Endpoint.COMPLETION: "/v1/completions"}


def check_capabilities(request: Request, backend: Backend) -> None:
    """Raises UnsupportedField for the first thing asked that the backend does not honour."""
    able = backend.capabilities
    if request.endpoint not in able.endpoints:
        raise InvalidRequest(
            f"This model is not served at {_PATHS[request.endpoint]}.",
            param="model",
            code="unsupported_endpoint",
        )
    asked = [name for name, is_asked in _OPTIONAL if is_asked(request)]
    for name in (*asked, *request.extra_fields):
        if name not in able.fields:
            raise UnsupportedField(f"`{name}` is not supported by this model.", param=name)
    codec = backend.codec
    if request.messages is not None and codec is not None and not codec.has_chat_template:
        raise InvalidRequest(
            "This model has no chat template; send a prompt to /v1/completions instead.",
            param="messages",
        )


def vocabulary(card: ModelCard, backend: Backend) -> int | None:
    """Token ids below this are known to both model and tokenizer; None if neither says."""
    sizes = [] if card.vocab_size is None else [card.vocab_size]
    if backend.codec is not None:
        sizes.append(backend.codec.vocab_size)
    return min(sizes, default=None)


def check_vocabulary(request: Request, vocab_size: int | None) -> None:
    """Raises InvalidRequest for token ids that the model does not have."""
    if isinstance(request.prompt, tuple):
        check_token_ids(request.prompt, vocab_size, "prompt")
    check_token_ids(request.sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids([t for t, _ in request.sampling.logit_bias], vocab_size, "logit_bias")


def check_token_ids(ids: Sequence[int], vocab_size: int | None, param: str) -> None:
    """Raises InvalidRequest unless all are in 0 .. vocab_size - 1."""
    if not ids:
        return
    if min(ids) < 0:
        raise InvalidRequest(f"`{param}` has a negative token id.", param=param)
    if vocab_size is not None and max(ids) >= vocab_size:
        raise InvalidRequest(
            f"`{param}` has a token id outside the model's vocabulary of {vocab_size}.",
            param=param,
        )


def context_limit(card: ModelCard, backend: Backend) -> int:
    """Most tokens, prompt and answer together, that a sequence can have: the model's context or
    what the KV cache holds, whichever is smaller."""
    load = backend.load()
    held = load.kv_blocks * load.block_size
    return min(card.context_length, held) if held else card.context_length


def fit(request: Request, limit: int) -> Request:
    """The tokenised request with `max_tokens` set, or ContextLengthExceeded.

    The prompt and one token must fit, and so must all of `max_tokens` where it is given: an
    answer is never cut shorter than asked without a word. Where it is absent, it becomes what
    is left.
    """
    ids = request.prompt_token_ids
    if ids is None:
        return request
    param = "messages" if request.messages is not None else "prompt"
    sampling = request.sampling
    if len(ids) >= limit:
        raise ContextLengthExceeded(
            f"The context limit is {limit} tokens, which must hold the prompt and at least one "
            f"token of the answer; the prompt alone has {len(ids)}. Please shorten it.",
            param=param,
        )
    wanted = sampling.max_tokens if sampling.max_tokens is not None else sampling.min_tokens
    if len(ids) + wanted > limit:
        field = "max_tokens" if sampling.max_tokens is not None else "min_tokens"
        raise ContextLengthExceeded(
            f"The context limit is {limit} tokens; the prompt has {len(ids)} and {field} asks for "
            f"{wanted} more, {len(ids) + wanted} together. Please shorten either.",
            param=param,
        )
    if sampling.max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=limit - len(ids))
        request = replace(request, sampling=sampling)
    return request
