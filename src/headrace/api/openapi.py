"""What /docs shows of bodies that are parsed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

__all__ = ["any_object", "json_body", "refusals"]

_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "reason": {"type": "string", "description": "Which rule refused, if it says so"},
                "queue_position": {"type": "integer", "description": "Choices that were ahead"},
                "retry_after_ms": {"type": "integer", "description": "When to try again"},
            },
        }
    },
}
_MEANINGS = {
    400: "The request is at fault; `param` names the field",
    401: "No key, or a wrong one",
    403: "The key is not allowed this",
    404: "No such model",
    408: "The body took too long to arrive",
    413: "The body is too large",
    429: "A limit of this key is reached; other callers are served",
    503: "The server is starting, full or shutting down",
    504: "The request's own deadline passed, or could not have been met",
}


def json_body(model: type[BaseModel], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`openapi_extra` of a route that takes `model` and `headers`, which map names to meanings."""
    extra = _body(_inlined(model.model_json_schema()))
    if headers:
        extra["parameters"] = [
            {"name": name, "in": "header", "schema": {"type": "string"}, "description": text}
            for name, text in headers.items()
        ]
    return extra


def any_object(description: str) -> dict[str, Any]:
    """`openapi_extra` of a route that takes an object whose keys are known elsewhere."""
    return _body({"type": "object", "description": description})


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that may refuse."""
    content = {"application/json": {"schema": _ERROR_SCHEMA}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its `$defs` put in place, since a route cannot add shared components."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items()}

    resolved: dict[str, Any] = resolve(schema)
    return resolved
