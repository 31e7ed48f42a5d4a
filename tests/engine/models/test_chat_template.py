from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.engine.models.chat_template import ChatTemplate
from headrace.engine.models.errors import ModelError
from support.chat_templates import CHATML, LLAMA3, MISTRAL, TOOLS

PLAIN: list[dict[str, Any]] = [
    {"role": "user", "content": '  Hi <b>&"you"</b> \n'},
    {"role": "assistant", "content": "Zażółć 🙂 {{ braces }}"},
    {"role": "user", "content": "again\n\n"},
]
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "weather?", "name": "bob"},
    {
        "role": "assistant",
        "content": "<think>hm</think>\n\nlet me see",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "w", "arguments": {"città": "Forlì <x>", "n": 3}},
            }
        ],
    },
    {"role": "tool", "content": "22°", "tool_call_id": "1"},
]
TOOL = {"type": "function", "function": {"name": "w", "description": "<weather> & more"}}
NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: NOON)
    return template.render(messages, **options)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    ("source", "messages", "tools"),
    [
        (CHATML, PLAIN, None),
        (CHATML, [{"role": "system", "content": "S"}, *PLAIN], None),
        (TOOLS, PLAIN, None),
        (TOOLS, TOOL_TALK, None),
        (TOOLS, TOOL_TALK, [TOOL] * 12),
        (MISTRAL, PLAIN, None),
    ],
)
def test_renders_as_transformers_does(
    source: str, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    [expected], _ = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert render(source, messages, tools=tools, add_generation_prompt=prompt) == expected


def test_the_time_is_injected() -> None:
    text = render(LLAMA3, PLAIN)
    assert text.startswith(
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 04 Mar 2026"
    )
    assert text.endswith("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")


def test_absent_special_tokens_are_undefined() -> None:
    template = ChatTemplate("{{ bos_token is defined }}{{ eos_token }}", eos_token="E")
    assert template.render([]) == "FalseE"


def test_a_refusal_of_the_template_reaches_the_client() -> None:
    with pytest.raises(InvalidRequest, match="must alternate") as caught:
        render(MISTRAL, [PLAIN[0], PLAIN[0]])
    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] + messages[0]['nothing'] }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson(indent='x', separators=3) }}",
        "{% for x in 3 %}{% endfor %}",
        "{{ messages[0].content.nothing() }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ raise_exception(none) }}",
        "{{ strftime_now(3) }}",
    ],
)
def test_every_failure_is_a_refused_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source, PLAIN)
    assert caught.value.param == "messages"
    assert "Error" not in caught.value.message
    assert "Traceback" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ range(1000000000) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source, PLAIN)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * ['x'] }}",
        "{{ range(1000000000) | list }}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t=n.t+n.t %}{% endfor %}",
    ],
)
def test_output_is_bounded(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source, PLAIN)


def test_the_conversation_is_left_as_it_was() -> None:
    before = repr(TOOL_TALK)
    render(TOOLS, TOOL_TALK, tools=[TOOL])
    assert repr(TOOL_TALK) == before


def test_a_broken_template_is_refused_at_load() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("{% if x %}\n{% endfor %}")
