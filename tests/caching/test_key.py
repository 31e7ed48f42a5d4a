"""Keys: equal only for requests with the same answer, and telling nothing."""

from __future__ import annotations

from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.caching.key import KeyMaker, last_question
from headrace.core.request import Endpoint, Message, Request, SamplingParams
from support.backend import request

KEYS = KeyMaker(b"a secret of the tests")
SCOPE = ("tenant", "model", "revision", "", 0)
CHAT = request(messages=(Message("system", "be brief"), Message("user", "hi")))


def key(asked: Request, scope: tuple[str | int, ...] = SCOPE) -> bytes:
    return KEYS.key(asked, scope)


IGNORED: dict[str, Any] = {
    "id": "other",
    "arrival": 9.0,
    "user": "u",
    "metadata": {"a": 1},
    "priority": 3,
    "tenant": "somebody",
    "prompt_token_ids": (1, 2),
}
DECISIVE: dict[str, list[Any]] = {
    "endpoint": [Endpoint.COMPLETION],
    "model": ["other"],
    "sampling": [
        SamplingParams(max_tokens=8, **change)
        for change in (
            {"min_tokens": 1},
            {"temperature": 0.5},
            {"top_p": 0.5},
            {"top_k": 5},
            {"min_p": 0.1},
            {"seed": 0},
            {"presence_penalty": 0.1},
            {"frequency_penalty": 0.1},
            {"repetition_penalty": 1.1},
            {"logit_bias": ((1, 2.0),)},
            {"stop": ("x",)},
            {"stop_token_ids": (1,)},
            {"include_stop_str_in_output": True},
            {"ignore_eos": True},
            {"logprobs": 0},
            {"prompt_logprobs": 0},
        )
    ]
    + [SamplingParams(max_tokens=limit) for limit in (None, 0, 9)],
    "messages": [
        (Message("system", "be brief"), Message("user", "Hi")),
        (Message("user", "hi"), Message("system", "be brief")),
        (Message("user", "be briefhi"),),
        (Message("system", "be brief"), Message("user", "hi", name="x")),
        (Message("system", "be brief"), Message("tool", "hi", tool_call_id="x")),
        (Message("system", "be brief"), Message("user", "hi", tool_calls=({"id": "x"},))),
    ],
    "prompt": ["", (1, 2), (12,), "12"],
    "n": [2],
    "echo": [True],
    "cache_salt": ["", "a"],
    "extra_fields": [{"tools": []}, {"tools": [{"a": 1, "b": 2}]}, {"tool_choice": "none"}],
}


def test_every_field_of_a_request_either_decides_or_is_named_as_one_that_does_not() -> None:
    names = {field.name for field in fields(Request)}
    assert names == set(IGNORED) | set(DECISIVE)
    covered = {f for s in DECISIVE["sampling"] for f in s.__struct_fields__}
    assert covered == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", IGNORED)
def test_what_does_not_decide_the_answer_is_not_in_the_key(name: str) -> None:
    assert key(replace(CHAT, **{name: IGNORED[name]})) == key(CHAT)


def test_all_that_decides_the_answer_is_in_the_key() -> None:
    requests = [CHAT] + [
        replace(CHAT, **{name: value}) for name, values in DECISIVE.items() for value in values
    ]
    assert len({key(asked) for asked in requests}) == len(requests)


def test_the_order_of_a_mapping_does_not_matter_nor_its_kind() -> None:
    one = replace(CHAT, extra_fields={"tools": [{"a": 1, "b": 2}], "tool_choice": "auto"})
    two = replace(
        CHAT, extra_fields=MappingProxyType({"tool_choice": "auto", "tools": [{"b": 2, "a": 1}]})
    )
    assert key(one) == key(two)


PART = st.text(alphabet='ab",[]:\\\x00', max_size=4)


@given(st.lists(st.tuples(PART, PART, PART, PART), min_size=2, max_size=2, unique=True))
def test_parts_do_not_run_into_each_other(pair: list[tuple[str, str, str, str]]) -> None:
    keys = {
        KEYS.key(replace(CHAT, cache_salt=salt, messages=(Message("user", text),)), (tenant, name))
        for tenant, name, salt, text in pair
    }
    assert len(keys) == 2


@given(st.text(max_size=30), st.text(max_size=30))
def test_a_message_cannot_imitate_a_conversation(a: str, b: str) -> None:
    plain = replace(CHAT, messages=(Message("user", a), Message("user", b)))
    forged = replace(CHAT, messages=(Message("user", f'{a}"}},{{"role":"user","content":"{b}'),))
    assert key(plain) != key(forged)


def test_each_part_of_the_scope_counts_in_its_place() -> None:
    scopes = [("ab", "c"), ("a", "bc"), ("c", "ab"), ("ab", "c", 0), ("ab", "c", "0")]
    assert len({key(CHAT, scope) for scope in scopes}) == len(scopes)


def test_without_the_secret_no_key_can_be_guessed() -> None:
    assert KeyMaker(b"another secret of tests").key(CHAT, SCOPE) != key(CHAT)
    assert len(key(CHAT)) == len(key(replace(CHAT, messages=(Message("user", "x" * 10**6),)))) == 32
    with pytest.raises(ValueError, match="16 bytes"):
        KeyMaker(b"short")


def test_a_partition_is_everything_but_the_last_question() -> None:
    def part(*messages: Message, **changes: Any) -> tuple[bytes, str] | None:
        return KEYS.partition(replace(CHAT, messages=messages, **changes), SCOPE)

    system, other = Message("system", "be brief"), Message("system", "be kind")
    one, two = part(system, Message("user", "a")), part(system, Message("user", "b"))
    assert one is not None
    assert two is not None
    assert (one[0], one[1], two[1]) == (two[0], "a", "b")
    for different in (
        part(other, Message("user", "a")),
        part(Message("user", "a")),
        part(system, Message("user", "x"), Message("assistant", "y"), Message("user", "a")),
        part(system, Message("user", "a", name="n")),
        part(system, Message("user", "a"), n=2),
        KEYS.partition(replace(CHAT, messages=(system, Message("user", "a"))), ("else",)),
    ):
        assert different is not None
        assert different[0] != one[0]
    assert one[0] != key(replace(CHAT, messages=(system, Message("user", None))))


@pytest.mark.parametrize(
    "last", [Message("assistant", "x"), Message("tool", "x"), Message("user", "")], ids=str
)
def test_what_does_not_end_with_a_question_has_no_partition(last: Message) -> None:
    assert KEYS.partition(replace(CHAT, messages=(Message("user", "hi"), last)), SCOPE) is None
    assert last_question(request("text")) is None


def test_samples_have_keys_of_their_own() -> None:
    names = {KEYS.sample(key(CHAT), number) for number in range(50)} | {key(CHAT)}
    assert len(names) == 51
