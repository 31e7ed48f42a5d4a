"""Every way a request can fail, as the status and the OpenAI error body that the client sees.

Raised before `Start` an error becomes an HTTP status; raised after it, an error event.
Messages are written for the caller: they name the field and say what to do, and never carry a
traceback, a class name or another caller's text.
"""

from __future__ import annotations

__all__ = [
    "BackendFailed",
    "BackendUnavailable",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "HeadraceError",
    "InvalidRequest",
    "MethodNotAllowed",
    "ModelNotFound",
    "NotCached",
    "NotFound",
    "Overloaded",
    "PayloadTooLarge",
    "PermissionDenied",
    "QuotaExceeded",
    "RequestTimeout",
    "ShuttingDown",
    "Unauthorized",
    "UnsupportedField",
]


class HeadraceError(Exception):
    """Base of all errors shown to callers.

    `param` is the name of the offending field or header (never its value), `code` a stable
    machine-readable word. The rest is shown only where it is set: `retry_after_s`, when to try
    again, as `retry_after_ms` and in the headers Retry-After and retry-after-ms; `reason`, a fixed
    word for the rule that refused where a code has several; `queue_position`, how many choices
    were ahead of this request's when it was refused.
    """

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
        queue_position: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.queue_position = queue_position


class InvalidRequest(HeadraceError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedField(InvalidRequest):
    """The field is known, but the backend that serves this model does not honour it."""

    code = "unsupported_field"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(HeadraceError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(HeadraceError):
    status = 403
    type = "permission_error"
    code = "permission_denied"


class NotFound(HeadraceError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(HeadraceError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(HeadraceError):
    """The caller sent its body too slowly."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class PayloadTooLarge(HeadraceError):
    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class QuotaExceeded(HeadraceError):
    """The tenant's own limit; other tenants are served."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class BackendFailed(HeadraceError):
    """The backend broke while this request ran; the request may be sent again."""

    status = 500
    code = "backend_failed"


class BackendUnavailable(HeadraceError):
    """The backend is not there to take the request: starting, restarting or gone."""

    status = 503
    type = "service_unavailable"
    code = "backend_unavailable"


class Overloaded(HeadraceError):
    """The server is full; every caller is told the same."""

    status = 503
    type = "service_unavailable"
    code = "overloaded"


class ShuttingDown(HeadraceError):
    status = 503
    type = "service_unavailable"
    code = "shutting_down"


class DeadlineExceeded(HeadraceError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class NotCached(HeadraceError):
    """The caller wants a stored answer or none (only-if-cached, RFC 9111 section 5.2.1.7)."""

    status = 504
    type = "invalid_request_error"
    code = "not_cached"
