"""What /docs shows of bodies that are parsed by hand."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

__all__ = ["json_body", "refusals"]

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
            },
        }
    },
}
_MEANINGS = {
    400: "The request is at fault; `param` names the field",
    401: "No key, or a wrong one",
    404: "No such model",
    413: "The body is too large",
    429: "A limit of this key is reached; other callers are served",
    503: "The server is starting, full or shutting down",
}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes `model`."""
    schema = _inlined(model.model_json_schema())
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
