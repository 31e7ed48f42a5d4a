"""Conversations: roles, parts, and tool calls in the history."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.api.convert import Origin, chat_request
from headrace.api.errors import invalid_body
from headrace.api.schemas import ChatBody
from headrace.config import LimitSettings
from headrace.core.errors import InvalidRequest
from headrace.core.request import Message, Request

ORIGIN = Origin("id-1", "tenant", 5.0, LimitSettings(max_choices=4, max_prompts=3))
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> Request:
    body = {"model": "m", "messages": [USER], **fields}
    try:
        return chat_request(ChatBody.model_validate(body), ORIGIN)
    except ValidationError as error:
        raise invalid_body(error) from None


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hi", "messages"),
        ({}, "messages"),
        ([], "messages"),
        (123, "messages"),
        (None, "messages"),
        ([None], "messages.0"),
        (["hi"], "messages.0"),
        ([USER, {"content": "x"}], "messages.1.role"),
        ([{"role": "alien", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 1}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content"),
        ([{"role": "user", "content": ["hi"]}], "messages.0.content"),
        ([{"role": "user", "content": "x", "name": 1}], "messages.0.name"),
    ],
)
def test_messages_of_another_kind(messages: Any, param: str) -> None:
    error = refused(messages=messages)
    assert error.param == param
    for word in ("dict", "list", "NoneType", "instance", "ChatMessage", "alien"):
        assert word not in error.message


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": None},
        {},
    ],
)
def test_only_text_parts_are_taken(part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "look"}, part]
    error = refused(messages=[{"role": "user", "content": content}])
    assert error.param == "messages.0.content"
    assert "127.0.0.1" not in error.message


def test_text_parts_are_joined() -> None:
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = chat(messages=[{"role": "user", "content": content}])
    assert request.messages == (Message("user", "one\ntwo"),)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city":"X"}', {"city": "X"}),
        ({"city": "X"}, {"city": "X"}),
        ("", {}),
        (" ", {}),
        ("[]", {}),
        ("null", {}),
        ("42", {}),
        ('"text"', {}),
        (None, {}),
    ],
)
def test_a_tool_call_in_the_history(arguments: Any, expected: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": arguments}}
    request = chat(
        messages=[
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "unknown", "content": "sunny"},
        ]
    )
    assert request.messages is not None
    assistant, tool = request.messages[1:]
    assert assistant.content is None
    assert assistant.tool_calls[0]["function"] == {"name": "w", "arguments": expected}
    assert tool == Message("tool", "sunny", tool_call_id="unknown")


@pytest.mark.parametrize("arguments", ["{bad", '{"a":1}x', '{"a":NaN}', "{" * 2000])
def test_tool_arguments_that_are_not_json(arguments: str) -> None:
    call = {"id": "c1", "function": {"name": "w", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    error = refused(messages=messages)
    assert error.param == "messages.1.tool_calls.0.function.arguments"


def test_tool_arguments_too_deep_for_a_template() -> None:
    deep = '{"a":' + "[" * 100 + "]" * 100 + "}"
    call = {"id": "c1", "function": {"name": "w", "arguments": deep}}
    error = refused(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert "nested too deeply" in error.message


def test_roles_that_templates_do_not_know() -> None:
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a":1}'}},
            {"role": "function", "name": "f", "content": "1"},
            {"role": "assistant"},
        ]
    )
    assert request.messages is not None
    assert [message.role for message in request.messages] == [
        "system",
        "assistant",
        "tool",
        "assistant",
    ]
    assert request.messages[1].tool_calls[0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert request.messages[3].content == ""
