"""What one tenant may take of the server, whoever else is there: a rate of requests, a rate of
tokens, and how many choices at once.

Rates are token buckets that refill continuously and hold one minute's worth, because that is what
"per minute" says to OpenAI's clients: a tenant that was quiet may send its minute at once, and the
scheduler, not the quota, keeps that burst from hurting others.

A request reserves what it is expected to take, prompt and answer, and when it ends the difference
to what it took is given back or charged; a bucket may thereby go below zero, and the tenant then
waits until it has refilled. So the tokens of any span of t minutes never exceed `rate * (t + 1)`
by more than what was under way with a wrong expectation.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.errors import InvalidRequest, QuotaExceeded

__all__ = ["Hold", "Quotas", "RateLimits", "TenantLimits"]

_MINUTE_S = 60.0
_MOST_TENANTS = 4096
_RETRY_CONCURRENCY_S = 1.0
_ROUNDING = 1e-6
"""Share of a bucket by which floating point may miss: whoever comes back when told is let in."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None is no limit. `max_concurrency` counts choices, queued ones included."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class RateLimits:
    """A tenant's rates, what is left of them, and in how many seconds they are whole again."""

    limit_requests: float | None
    remaining_requests: float | None
    reset_requests_s: float | None
    limit_tokens: float | None
    remaining_tokens: float | None
    reset_tokens_s: float | None


class _Bucket:
    """Holds `rate` a minute. The level is below zero while a debt is paid."""

    __slots__ = ("_at", "_level", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._level = rate
        self._at = now

    def level(self, now: float) -> float:
        gained = max(0.0, now - self._at) * self.rate / _MINUTE_S
        self._level = min(self.rate, self._level + gained)
        self._at = max(self._at, now)
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much is there; 0 if it is."""
        short = amount - self.level(now)
        return 0.0 if short <= self.rate * _ROUNDING else short * _MINUTE_S / self.rate

    def take(self, amount: float, now: float) -> None:
        self._level = min(self.rate, self.level(now) - amount)

    def resize(self, rate: float, now: float) -> None:
        """What was used of the old rate stays used."""
        if rate != self.rate:
            used = self.rate - self.level(now)
            self.rate = rate
            self._level = rate - used


class _Account:
    __slots__ = ("concurrency", "requests", "tokens")

    def __init__(self) -> None:
        self.requests: _Bucket | None = None
        self.tokens: _Bucket | None = None
        self.concurrency = 0

    def follow(self, limits: TenantLimits, now: float) -> None:
        self.requests = _followed(self.requests, limits.requests_per_minute, now)
        self.tokens = _followed(self.tokens, limits.tokens_per_minute, now)


def _followed(bucket: _Bucket | None, rate: float | None, now: float) -> _Bucket | None:
    if rate is None:
        return None
    if bucket is None:
        return _Bucket(rate, now)
    bucket.resize(rate, now)
    return bucket


class Hold:
    """What one request has reserved. Owned by the request, from `Quotas.admit` to `settle`."""

    __slots__ = ("_account", "_choices", "_quotas", "_tokens")

    def __init__(self, quotas: Quotas, account: _Account, choices: int, tokens: float) -> None:
        self._quotas = quotas
        self._account: _Account | None = account
        self._choices = choices
        self._tokens = tokens

    def adjust(self, tokens: float) -> None:
        """The request is known better: reserves so much instead."""
        if self._account is not None:
            self._quotas.charge(self._account, tokens - self._tokens)
            self._tokens = tokens

    def give_back(self) -> None:
        """The server refused the request for reasons of its own: as if it had never been."""
        if self._account is not None and self._account.requests is not None:
            self._quotas.uncount(self._account)
        self.settle(0.0)

    def settle(self, tokens: float) -> None:
        """The request has ended, in whatever state, and took so much. Idempotent."""
        account, self._account = self._account, None
        if account is not None:
            account.concurrency -= self._choices
            self._quotas.charge(account, tokens - self._tokens)


class Quotas:
    """Accounts of all tenants. Event loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def admit(self, tenant: str, limits: TenantLimits, choices: int, tokens: float) -> Hold:
        """Reserves, or raises QuotaExceeded and reserves nothing.

        Raises InvalidRequest for a request that no waiting would make fit.
        """
        now = self._clock.monotonic()
        self._check_size(limits, choices, tokens)
        account = self._account(tenant, limits, now)
        most = limits.max_concurrency
        if most is not None and account.concurrency + choices > most:
            raise QuotaExceeded(
                f"Your limit of {most} choices at once is reached: {account.concurrency} are under "
                f"way and this request asks for {choices} more.",
                retry_after_s=_RETRY_CONCURRENCY_S,
                reason="concurrency",
            )
        if account.requests is not None:
            self._check_requests(account.requests, now)
        if account.tokens is not None and (wait := account.tokens.wait_s(tokens, now)) > 0:
            left = max(0, int(account.tokens.level(now)))
            raise QuotaExceeded(
                f"Your limit of {account.tokens.rate:g} tokens per minute is reached: {left} are "
                f"left and this request may take {tokens:.0f}.",
                retry_after_s=wait,
                reason="tokens_per_minute",
            )
        if account.requests is not None:
            account.requests.take(1.0, now)
        account.concurrency += choices
        self.charge(account, tokens)
        return Hold(self, account, choices, tokens)

    def count(self, tenant: str, limits: TenantLimits) -> None:
        """One request that costs no computing. Raises QuotaExceeded."""
        if limits.requests_per_minute is None:
            return
        now = self._clock.monotonic()
        account = self._account(tenant, limits, now)
        if account.requests is not None:
            self._check_requests(account.requests, now)
            account.requests.take(1.0, now)

    def charge(self, account: _Account, tokens: float) -> None:
        """Negative gives back."""
        if account.tokens is not None:
            account.tokens.take(tokens, self._clock.monotonic())

    def uncount(self, account: _Account) -> None:
        """One request less."""
        if account.requests is not None:
            account.requests.take(-1.0, self._clock.monotonic())

    def require_possible(self, limits: TenantLimits, requests: int, choices: int) -> None:
        """Raises InvalidRequest for several requests that come as one call and cannot all fit."""
        rate, most = limits.requests_per_minute, limits.max_concurrency
        if rate is not None and requests > rate:
            raise InvalidRequest(
                f"This call holds {requests} prompts, more than your whole limit of {rate:g} "
                "requests a minute.",
                param="prompt",
                code="exceeds_quota",
            )
        if most is not None and choices > most:
            raise InvalidRequest(
                f"This call asks for {choices} choices, more than your limit of {most} at once.",
                param="prompt" if requests > 1 else "n",
                code="exceeds_quota",
            )

    def concurrency(self, tenant: str) -> int:
        """Choices of the tenant under way."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.concurrency

    def state(self, tenant: str, limits: TenantLimits) -> RateLimits | None:
        """As of now; None for a tenant without a rate, of which nothing true could be said: what
        it may take depends on what others do, moment by moment."""
        if limits.requests_per_minute is None and limits.tokens_per_minute is None:
            return None
        now = self._clock.monotonic()
        account = self._account(tenant, limits, now)
        requests, tokens = _figures(account.requests, now), _figures(account.tokens, now)
        return RateLimits(*requests, *tokens)

    def _check_requests(self, bucket: _Bucket, now: float) -> None:
        if (wait := bucket.wait_s(1.0, now)) > 0:
            raise QuotaExceeded(
                f"Your limit of {bucket.rate:g} requests per minute is reached.",
                retry_after_s=wait,
                reason="requests_per_minute",
            )

    def _check_size(self, limits: TenantLimits, choices: int, tokens: float) -> None:
        rate, most = limits.tokens_per_minute, limits.max_concurrency
        if rate is not None and tokens > rate:
            raise InvalidRequest(
                f"This request may take {tokens:.0f} tokens, more than your whole limit of "
                f"{rate:g} a minute. Shorten it, or set a smaller max_tokens.",
                code="exceeds_quota",
            )
        if most is not None and choices > most:
            raise InvalidRequest(
                f"This request asks for {choices} choices, more than your limit of {most} at once.",
                param="n",
                code="exceeds_quota",
            )

    def _account(self, tenant: str, limits: TenantLimits, now: float) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
            self._forget_idle()
        self._accounts.move_to_end(tenant)
        account.follow(limits, now)
        return account

    def _forget_idle(self) -> None:
        """Bounds memory: the longest unused account without anything under way goes first."""
        while len(self._accounts) > _MOST_TENANTS:
            idle = next((n for n, a in self._accounts.items() if not a.concurrency), None)
            if idle is None:
                return
            del self._accounts[idle]


def _figures(bucket: _Bucket | None, now: float) -> tuple[float | None, float | None, float | None]:
    if bucket is None:
        return None, None, None
    return bucket.rate, max(0.0, bucket.level(now)), bucket.wait_s(bucket.rate, now)
