"""Bodies become requests: every parameter, every default, every refusal by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.api.body import parse_object
from headrace.api.convert import Origin, chat_request, completion_requests
from headrace.api.errors import invalid_body
from headrace.api.schemas import ChatBody, CompletionBody
from headrace.config import LimitSettings
from headrace.core.errors import InvalidRequest
from headrace.core.request import Message, Request, SamplingParams

ORIGIN = Origin("id-1", "tenant", 5.0, LimitSettings(max_choices=4, max_prompts=3))
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> Request:
    body = {"model": "m", "messages": [USER], **fields}
    try:
        return chat_request(ChatBody.model_validate(body), ORIGIN)
    except ValidationError as error:
        raise invalid_body(error) from None


def complete(prompt: Any = "hi", **fields: Any) -> tuple[Request, ...]:
    body = {"model": "m", "prompt": prompt, **fields}
    try:
        return completion_requests(CompletionBody.model_validate(body), ORIGIN)
    except ValidationError as error:
        raise invalid_body(error) from None


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value


def test_defaults_of_a_conversation() -> None:
    request = chat()
    assert request.messages == (Message("user", "hi"),)
    assert request.sampling == SamplingParams()
    assert (request.id, request.tenant, request.arrival) == ("id-1", "tenant", 5.0)
    assert (request.n, request.echo, request.priority, request.cache_salt) == (1, False, 0, None)
    assert request.extra_fields == {}


def test_defaults_of_a_completion() -> None:
    (request,) = complete()
    assert request.prompt == "hi"
    assert request.sampling == SamplingParams(max_tokens=16)


def test_every_parameter_reaches_the_request() -> None:
    request = chat(
        max_tokens=7,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        n=2,
        stop=["a", "b"],
        include_stop_str_in_output=True,
        stop_token_ids=[3, 4],
        seed=42,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 1.5},
        logprobs=True,
        top_logprobs=3,
        ignore_eos=True,
        user="u",
        metadata={"k": "v"},
        priority=-3,
        cache_salt="s",
    )
    assert request.sampling == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=42,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
        logit_bias=((5, -100.0), (6, 1.5)),
        stop=("a", "b"),
        stop_token_ids=(3, 4),
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=3,
    )
    assert (request.n, request.user, request.metadata) == (2, "u", {"k": "v"})
    assert (request.priority, request.cache_salt) == (-3, "s")


def test_every_null_is_as_good_as_absent() -> None:
    for model, required in ((ChatBody, {"messages"}), (CompletionBody, {"prompt"})):
        optional = set(model.model_fields) - required - {"model"}
        nulls: dict[str, Any] = dict.fromkeys(optional)
        if model is ChatBody:
            assert chat(**nulls) == chat()
        else:
            assert complete(**nulls) == complete()


def test_unknown_fields_are_ignored() -> None:
    assert chat(foo=1, store=True, service_tier="auto", echo=True) == chat()


def test_the_newer_limit_wins() -> None:
    assert chat(max_tokens=3, max_completion_tokens=5).sampling.max_tokens == 5
    assert chat(max_tokens=3).sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("END", ("END",)),
        (["END"], ("END",)),
        ([], ()),
        (None, ()),
        ("", ()),
        ([""], ()),
        (["", "END"], ("END",)),
        (list("abcde"), tuple("abcde")),
    ],
)
def test_stop(stop: Any, expected: tuple[str, ...]) -> None:
    assert chat(stop=stop).sampling.stop == expected


@pytest.mark.parametrize("stop", [[1], 1, {"a": 1}, ["a", None], ["x"] * 17, "x" * 1025])
def test_stop_of_another_kind(stop: Any) -> None:
    assert refused(stop=stop).param == "stop"


@pytest.mark.parametrize(
    "bias",
    [{"-1": 5}, {"abc": 1}, {"5": 1000}, {"5": "x"}, {"5": True}, {"5.0": 1}, {" 5": 1}, [1], "x"],
)
def test_logit_bias_of_another_kind(bias: Any) -> None:
    assert refused(logit_bias=bias).param == "logit_bias"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 1.1),
        ("top_p", -1),
        ("min_p", 2),
        ("top_k", -2),
        ("top_k", 1.5),
        ("n", 0),
        ("n", 5),
        ("n", "1"),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 1.5),
        ("seed", "x"),
        ("stream", "yes"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "1"),
        ("stop_token_ids", list(range(200))),
        ("logprobs", 1),
        ("top_logprobs", 2),
        ("metadata", []),
        ("user", 1),
        ("user", "x" * 2000),
        ("priority", "high"),
        ("model", ""),
        ("model", None),
        ("model", "m" * 10_000),
        ("ignore_eos", 1),
    ],
)
def test_out_of_range_or_type(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert error.param == field
    assert error.status == 400
    assert f"'{field}'" in error.message


def test_rules_across_fields() -> None:
    assert refused(logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(min_tokens=5, max_tokens=4).param == "min_tokens"
    assert chat(min_tokens=5, max_tokens=5).sampling.min_tokens == 5
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(top_logprobs=0).sampling.logprobs is None


def test_values_at_the_edge_of_what_engines_take() -> None:
    assert chat(top_k=-1).sampling.top_k == 0
    assert 0 < chat(top_p=0).sampling.top_p < 1e-6
    assert chat(seed=-1).sampling.seed == 2**63 - 1
    assert chat(seed=2**63 - 1).sampling.seed == 2**63 - 1


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"functions": [], "function_call": "auto"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"add_generation_prompt": True, "continue_final_message": False},
        {"guided_json": None, "use_beam_search": False, "chat_template_kwargs": {}},
    ],
)
def test_fields_that_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert chat(**fields).extra_fields == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}], "parallel_tool_calls": False},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function"}},
        {"functions": [{}]},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"guided_regex": "(a+)+$"},
        {"structured_outputs": {"choice": ["a"]}},
        {"modalities": ["audio"]},
        {"chat_template": "{{ x }}"},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"prompt_logprobs": 0},
    ],
)
def test_fields_for_the_backend_to_take_or_refuse(fields: dict[str, Any]) -> None:
    assert chat(**fields).extra_fields == fields


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_prompts(prompt: Any, expected: list[Any]) -> None:
    requests = complete(prompt)
    assert [request.prompt for request in requests] == expected
    assert len({request.id for request in requests}) == len(expected)


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [1, "a"], [[1], "a"], [-1], [[1, -1]], [True], 5, {}, ["a"] * 4]
)
def test_prompts_of_another_kind(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
    ],
)
def test_what_completions_refuse(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(**fields)
    assert caught.value.param == param


def test_what_completions_take() -> None:
    (request,) = complete(echo=True, max_tokens=0, logprobs=1, best_of=2, n=2, suffix="")
    assert request.echo
    assert request.sampling == SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=1)


def test_numbers_too_large_for_an_integer_are_refused() -> None:
    body = parse_object(b'{"model":"m","messages":[{"role":"user","content":"x"}],"seed":1e30}')
    with pytest.raises(ValidationError):
        ChatBody.model_validate(body)
