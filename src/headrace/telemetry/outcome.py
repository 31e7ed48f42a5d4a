"""How a request can end, in the words of metrics and logs."""

from __future__ import annotations

from enum import StrEnum

from headrace.core.errors import (
    BackendUnavailable,
    ContextLengthExceeded,
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    NotCached,
    Overloaded,
    PayloadTooLarge,
    PermissionDenied,
    QuotaExceeded,
    RequestTimeout,
    ShuttingDown,
    Unauthorized,
    UnsupportedField,
)

__all__ = ["Outcome"]


class Outcome(StrEnum):
    """Each request has exactly one. With several choices it is LENGTH if any of them was cut.

    Refused means that it was told so before Start, by the HTTP edge or behind it; FAILED that
    something broke, or that a request already running was ended for a reason of ours.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNAUTHORIZED = "refused_unauthorized"
    BODY_TIMEOUT = "refused_body_timeout"
    TOO_LARGE = "refused_too_large"
    INVALID = "refused_invalid"
    UNSUPPORTED = "refused_unsupported"
    CONTEXT_LENGTH = "refused_context_length"
    MODEL_NOT_FOUND = "refused_model_not_found"
    PERMISSION = "refused_permission"
    QUOTA = "refused_quota"
    OVERLOADED = "refused_overloaded"
    UNAVAILABLE = "refused_unavailable"
    SHUTTING_DOWN = "refused_shutting_down"
    DEADLINE = "refused_deadline"
    NOT_CACHED = "refused_not_cached"

    @classmethod
    def of_refusal(cls, error: HeadraceError) -> Outcome:
        """The outcome of a request that got this error before Start."""
        return next((outcome for kind, outcome in _REFUSALS if isinstance(error, kind)), cls.FAILED)


_REFUSALS: tuple[tuple[type[HeadraceError], Outcome], ...] = (
    (UnsupportedField, Outcome.UNSUPPORTED),
    (ContextLengthExceeded, Outcome.CONTEXT_LENGTH),
    (InvalidRequest, Outcome.INVALID),  # after the kinds of it above
    (Unauthorized, Outcome.UNAUTHORIZED),
    (RequestTimeout, Outcome.BODY_TIMEOUT),
    (PayloadTooLarge, Outcome.TOO_LARGE),
    (ModelNotFound, Outcome.MODEL_NOT_FOUND),
    (PermissionDenied, Outcome.PERMISSION),
    (QuotaExceeded, Outcome.QUOTA),
    (Overloaded, Outcome.OVERLOADED),
    (BackendUnavailable, Outcome.UNAVAILABLE),
    (ShuttingDown, Outcome.SHUTTING_DOWN),
    (DeadlineExceeded, Outcome.DEADLINE),
    (NotCached, Outcome.NOT_CACHED),
)
