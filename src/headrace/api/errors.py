"""Failures as the HTTP answers that callers see, all in OpenAI's one shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.generation import note_refusal
from headrace.core.errors import HeadraceError, InvalidRequest, MethodNotAllowed, NotFound

__all__ = [
    "error_body",
    "error_response",
    "install_error_handlers",
    "internal_error",
    "invalid_body",
]

_KINDS = {
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
    "dict_type": "should be an object",
    "list_type": "should be an array",
    "tuple_type": "should be an array",
    "bool_type": "should be true or false",
    "int_type": "should be an integer",
    "int_from_float": "should be an integer",
    "float_type": "should be a number",
    "string_type": "should be a string",
}


def error_body(error: HeadraceError) -> bytes:
    """The JSON object that tells of `error`, in a reply and in a stream alike."""
    told: dict[str, Any] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if error.reason is not None:
        told["reason"] = error.reason
    if error.queue_position is not None:
        told["queue_position"] = error.queue_position
    if error.retry_after_s is not None:
        told["retry_after_ms"] = _retry_after_ms(error.retry_after_s)
    return orjson.dumps({"error": told})


def error_response(error: HeadraceError, headers: Mapping[str, str] | None = None) -> Response:
    """The whole answer, with the headers that this kind of refusal has."""
    response = Response(
        error_body(error), status_code=error.status, media_type="application/json", headers=headers
    )
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(max(math.ceil(error.retry_after_s), 1))
        response.headers["retry-after-ms"] = str(_retry_after_ms(error.retry_after_s))
    return response


def _retry_after_ms(seconds: float) -> int:
    return max(math.ceil(seconds * 1000), 1)


def internal_error() -> HeadraceError:
    """What a caller is told of a fault of ours; the log has the rest."""
    return HeadraceError("The server failed to handle this request.", code="internal_error")


def invalid_body(error: ValidationError) -> InvalidRequest:
    """The first fault of a body, as a sentence about a field. Never repeats a value."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"'{param}' is required.", param=param, code="missing_field")
    said = _KINDS.get(first["type"]) or first["msg"].removeprefix("Input ")
    return InvalidRequest(f"'{param}' {said}.", param=param or None)


def install_error_handlers(app: FastAPI) -> None:
    """Every failure inside a route becomes an answer in the one shape."""
    app.exception_handler(HeadraceError)(_on_refusal)
    app.exception_handler(HTTPException)(_on_http_exception)
    app.exception_handler(RequestValidationError)(_on_bad_parameters)


def _on_refusal(request: Request, error: HeadraceError) -> Response:
    note_refusal(request.scope, error)
    return error_response(error)


def _on_http_exception(_request: Request, error: HTTPException) -> Response:
    refusal: HeadraceError
    if error.status_code == 404:
        refusal = NotFound("There is nothing at this path. /docs lists what there is.")
    elif error.status_code == 405:
        refusal = MethodNotAllowed("This path does not take this HTTP method.")
    else:
        refusal = HeadraceError("The request was refused.")
        refusal.status = error.status_code
    return error_response(refusal, error.headers)


def _on_bad_parameters(_request: Request, _error: Exception) -> Response:
    return error_response(InvalidRequest("The parameters in the URL are not valid."))
