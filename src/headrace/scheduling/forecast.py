"""What the scheduler asks about answer lengths, and an answer that learns nothing."""

from __future__ import annotations

from typing import Protocol

from headrace.core.request import Request
from headrace.scheduling.base import Claim
from headrace.scheduling.lengths import Forecast

__all__ = ["FixedForecaster", "Forecaster"]


class Forecaster(Protocol):
    """`headrace.scheduling.lengths.LengthEstimator` is one. `limit` bounds an answer, None if
    nothing does; lengths are of one choice."""

    def forecast(
        self, request: Request, claim: Claim, prompt_tokens: int, limit: int | None
    ) -> Forecast: ...

    def observe(
        self, request: Request, claim: Claim, prompt_tokens: int, length: int, *, natural: bool
    ) -> None: ...


class FixedForecaster:
    """Every answer is as long as usual."""

    def __init__(self, usual: int = 256) -> None:
        self._usual = usual

    def forecast(
        self,
        request: Request,  # noqa: ARG002 - whoever asks
        claim: Claim,  # noqa: ARG002 - likewise
        prompt_tokens: int,  # noqa: ARG002 - likewise
        limit: int | None,
    ) -> Forecast:
        most = 1 << 30 if limit is None else limit
        usual = self._usual
        return Forecast(float(min(usual, most)), min(2 * usual, most), min(3 * usual, most))

    def observe(
        self, request: Request, claim: Claim, prompt_tokens: int, length: int, *, natural: bool
    ) -> None:
        pass
