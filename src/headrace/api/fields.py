"""Field types of the wire format that JSON Schema knows and Python's types do not."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic import WithJsonSchema as Shown
from pydantic_core import PydanticCustomError

__all__ = ["Content", "LogitBias", "Prompts", "Stops", "TokenIds", "WireModel"]

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
MAX_STOP_TOKENS = 128

_TEXT_PARTS = {"text": "text", "refusal": "refusal"}


class WireModel(BaseModel):
    """Strict about types; unknown keys are ignored and an explicit null counts as absent."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "should be a string or an array of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", f"has more than {MAX_STOPS} strings")
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise PydanticCustomError("stop", f"has a string over {MAX_STOP_LENGTH} characters")
    return tuple(stop for stop in stops if stop)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "should be an object of token ids to numbers")
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("logit_bias", f"has more than {MAX_BIASES} entries")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise PydanticCustomError("logit_bias", "has a key that is not a token id")
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "has a value that is not within -100..100")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_int(item) and item >= 0 for item in value):
        raise PydanticCustomError("token_ids", "should be an array of token ids")
    return tuple(value)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(_is_int(item) and item >= 0 for item in value):
            return (tuple(value),)
        if all(isinstance(item, list) and item for item in value):
            return tuple(_token_ids(item) for item in value)
    raise PydanticCustomError(
        "prompt",
        "should be a string, an array of strings, an array of token ids or an array of those",
    )


def _content(value: Any) -> str:
    """Text parts are joined by line breaks. Nothing that a part points to is ever fetched."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "should be a string or an array of text parts")
    texts = []
    for part in value:
        key = _TEXT_PARTS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if key is None:
            raise PydanticCustomError("content", "has a part that is not text; only text is taken")
        text = part.get(key)
        if not isinstance(text, str):
            raise PydanticCustomError("content", "has a text part without text")
        texts.append(text)
    return "\n".join(texts)


_STRINGS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}

Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_stops),
    Shown({"anyOf": [{"type": "string"}, {**_STRINGS, "maxItems": MAX_STOPS}]}),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_logit_bias),
    Shown({"type": "object", "additionalProperties": {"type": "number"}}),
]
TokenIds = Annotated[tuple[int, ...], BeforeValidator(_token_ids), Shown(_IDS)]
Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    BeforeValidator(_prompts),
    Shown({"anyOf": [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS}]}),
]
Content = Annotated[
    str,
    BeforeValidator(_content),
    Shown(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        }
    ),
]
