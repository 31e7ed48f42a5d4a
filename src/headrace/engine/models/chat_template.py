"""Chat templates: Jinja2 in a sandbox, as the `transformers` package renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.core.errors import InvalidRequest
from headrace.engine.models.errors import ModelError

__all__ = ["ChatTemplate"]

_MAX_OUTPUT = 32 * 2**20
"""Characters; several times the largest request body."""
_MAX_REASON = 300


def _local_time() -> datetime:
    return datetime.now(UTC).astimezone()


class ChatTemplate:
    """A compiled template. Safe from any thread.

    The template is the operator's choice, the conversation is not: whatever goes wrong while
    rendering is an InvalidRequest about `messages`.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = _local_time,
    ) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["namespace"] = _Namespace
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from error
        self.source = source
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as one text. `messages` and `tools` are plain JSON values."""
        variables = {
            **self._tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return "".join(_limited(self._template.generate(variables)))
        except _Refusal as refusal:
            reason = f"the chat template refuses it: {refusal.message or ''}"[:_MAX_REASON]
        except _TooLong:
            reason = "the chat template makes more text of it than is allowed"
        except Exception as error:  # noqa: BLE001 - a template may raise anything at all
            detail = error.message if isinstance(error, TemplateError) else None
            reason = f"the chat template cannot render it: {detail or 'unexpected values'}"
        raise InvalidRequest(f"messages: {reason[:_MAX_REASON]}", param="messages")


class _Refusal(TemplateError):
    """The template called `raise_exception`."""


class _TooLong(Exception):
    """The output passed its limit."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, which matters only in training."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Keeps private names out of reach of templates."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        _refuse_private(dict(*args[1:], **kwargs))
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private((name,))
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses operations whose result would not fit the limit, before computing it."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed in a chat template")
        if operator == "*":
            _refuse_long(left, right)
            _refuse_long(right, left)
        elif isinstance(left, str) and isinstance(right, str):
            _refuse_long(left, 1 + len(right) // max(1, len(left)))
        return super().call_binop(context, operator, left, right)


def _refuse_long(sequence: Any, times: Any) -> None:
    if (
        isinstance(sequence, str | list | tuple)
        and isinstance(times, int)
        and len(sequence) * times > _MAX_OUTPUT
    ):
        raise _TooLong


def _refuse_private(names: Any) -> None:
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold the private name {name!r}")


def _limited(pieces: Iterator[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > _MAX_OUTPUT:
            raise _TooLong
        yield piece


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, leaves HTML characters alone."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
