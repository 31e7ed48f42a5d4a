"""The table of all settings, from their one list in `headrace.config`."""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr

from headrace.config import parse_size
from headrace.config_loading import env_name, setting_fields

__all__ = ["settings_table"]

_NAMES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    SecretStr: "secret",
}


def settings_table() -> str:
    """Markdown: a section for each part, a row for each key."""
    sections: dict[str, list[str]] = {}
    for key, field in setting_fields().items():
        section, _, name = key.rpartition(".")
        cells = (
            f"`{name}`<br>`{env_name(key)}`",
            _kind(field.annotation, field.metadata),
            f"`{json.dumps(field.default, ensure_ascii=False)}`",
            " ".join((field.description or "").split()),
        )
        sections.setdefault(section, []).append(f"| {' | '.join(cells)} |")
    head = "| key, variable | kind | default | meaning |\n|---|---|---|---|"
    return "\n\n".join(
        "\n".join([f"### [{section}]" if section else "### tables", "", head, *rows])
        for section, rows in sections.items()
    )


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if any(getattr(item, "func", None) is parse_size for item in metadata):
        return "size"
    if origin is Annotated:
        return _kind(args[0], annotation.__metadata__)
    if origin in {Union, types.UnionType}:
        return " or ".join(_kind(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        return f"list of {_kind(args[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return _NAMES[annotation]
