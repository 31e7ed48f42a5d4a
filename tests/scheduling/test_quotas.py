"""Token buckets: exact waits, honest refunds, books that close."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.clock import VirtualClock
from headrace.core.errors import InvalidRequest, QuotaExceeded
from headrace.scheduling.quotas import Hold, Quotas, RateLimits, TenantLimits

NONE = TenantLimits()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def quotas(clock: VirtualClock) -> Quotas:
    return Quotas(clock)


def refused(quotas: Quotas, limits: TenantLimits, choices: int = 1, tokens: float = 0) -> float:
    with pytest.raises(QuotaExceeded) as refusal:
        quotas.admit("t", limits, choices, tokens)
    assert refusal.value.status == 429
    assert refusal.value.retry_after_s is not None
    return refusal.value.retry_after_s


def test_a_minutes_requests_at_once_then_one_at_each_interval(
    quotas: Quotas, clock: VirtualClock
) -> None:
    limits = TenantLimits(requests_per_minute=6)
    for _ in range(6):
        quotas.admit("t", limits, 1, 0).settle(0)
    assert refused(quotas, limits) == pytest.approx(10)
    clock.advance(9.9)
    wait = refused(quotas, limits)
    clock.advance(wait)
    quotas.admit("t", limits, 1, 0)
    assert refused(quotas, limits) == pytest.approx(10)
    quotas.admit("other", limits, 1, 0)


def test_tokens_are_reserved_and_put_right_at_the_end(quotas: Quotas, clock: VirtualClock) -> None:
    limits = TenantLimits(tokens_per_minute=600)
    hold = quotas.admit("t", limits, 1, 500)
    assert refused(quotas, limits, tokens=200) == pytest.approx(10)
    hold.adjust(300)
    second = quotas.admit("t", limits, 1, 200)
    hold.settle(100)
    hold.settle(100)
    state = quotas.state("t", limits)
    assert state is not None
    assert state.remaining_tokens == pytest.approx(300)
    assert state.reset_tokens_s == pytest.approx(30)
    second.settle(1000)  # longer than anybody thought: a debt
    assert refused(quotas, limits, tokens=100) == pytest.approx(60)
    clock.advance(60)
    quotas.admit("t", limits, 1, 100)


def test_what_was_refused_takes_nothing(quotas: Quotas) -> None:
    limits = TenantLimits(requests_per_minute=10, tokens_per_minute=100, max_concurrency=2)
    quotas.admit("t", limits, 1, 90)
    before = quotas.state("t", limits)
    refused(quotas, limits, tokens=50)
    refused(quotas, limits, choices=2)
    assert quotas.state("t", limits) == before
    assert quotas.concurrency("t") == 1


def test_choices_at_once(quotas: Quotas) -> None:
    limits = TenantLimits(max_concurrency=3)
    first, second = quotas.admit("t", limits, 2, 0), quotas.admit("t", limits, 1, 0)
    assert refused(quotas, limits) > 0
    second.settle(0)
    quotas.admit("t", limits, 1, 0).settle(0)
    first.settle(0)
    assert quotas.concurrency("t") == 0


@pytest.mark.parametrize(
    ("limits", "choices", "tokens"),
    [(TenantLimits(tokens_per_minute=100), 1, 101), (TenantLimits(max_concurrency=3), 4, 0)],
)
def test_what_never_fits_is_said_to_never_fit(
    quotas: Quotas, limits: TenantLimits, choices: int, tokens: int
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        quotas.admit("t", limits, choices, tokens)
    assert refusal.value.code == "exceeds_quota"
    assert refusal.value.retry_after_s is None


def test_the_six_figures(quotas: Quotas, clock: VirtualClock) -> None:
    assert quotas.state("t", NONE) is None
    assert quotas.state("t", TenantLimits(max_concurrency=3)) is None
    limits = TenantLimits(requests_per_minute=60)
    assert quotas.state("t", limits) == RateLimits(60, 60, 0, None, None, None)
    quotas.admit("t", limits, 1, 0)
    assert quotas.state("t", limits) == RateLimits(60, 59, 1, None, None, None)
    clock.advance(0.5)
    assert quotas.state("t", limits) == RateLimits(60, 59.5, 0.5, None, None, None)


def test_a_changed_limit_keeps_what_was_used(quotas: Quotas) -> None:
    quotas.admit("t", TenantLimits(tokens_per_minute=1000), 1, 400)
    state = quotas.state("t", TenantLimits(tokens_per_minute=2000))
    assert state is not None
    assert state.remaining_tokens == pytest.approx(1600)


def test_tenants_without_work_are_forgotten_and_no_others(quotas: Quotas) -> None:
    limits = TenantLimits(max_concurrency=1)
    hold = quotas.admit("busy", limits, 1, 0)
    for number in range(5000):
        quotas.admit(f"t{number}", limits, 1, 0).settle(0)
    assert len(quotas._accounts) <= 4096
    assert quotas.concurrency("busy") == 1
    hold.settle(0)
    assert quotas.concurrency("busy") == 0


@given(
    st.floats(10, 1000),
    st.lists(
        st.tuples(st.floats(0, 90), st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=60
    ),
)
def test_no_span_takes_more_than_its_rate_and_one_minutes_worth(
    rate: float, asked: list[tuple[float, float, float]]
) -> None:
    """Requests of up to a bucket each, with gaps; what is reserved is what is taken."""
    clock = VirtualClock()
    quotas = Quotas(clock)
    limits = TenantLimits(tokens_per_minute=rate)
    taken: list[tuple[float, float]] = []
    for gap, share, _ in asked:
        clock.advance(gap)
        tokens = min(rate, rate * share / 10)  # rounding must not make it a little more
        try:
            quotas.admit("t", limits, 1, tokens).settle(tokens)
        except QuotaExceeded as refusal:
            clock.advance(refusal.retry_after_s or 0.0)
            quotas.admit("t", limits, 1, tokens).settle(tokens)
        taken.append((clock.monotonic(), tokens))
    for first in range(len(taken)):
        total = 0.0
        for at, tokens in taken[first:]:
            total += tokens
            span = at - taken[first][0]
            assert total <= rate * (span / 60 + 1) + rate * 2e-6 * len(taken)


@given(
    st.floats(0, 1e7),
    st.floats(1, 1e9),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
)
def test_the_wait_that_is_told_is_enough_and_no_less_is(
    start: float, rate: float, used: float, wanted: float, by_requests: bool
) -> None:
    clock = VirtualClock(start)
    quotas = Quotas(clock)
    if by_requests:
        limits, tokens = TenantLimits(requests_per_minute=rate % 1000 + 1), 0.0
        try:
            for _ in range(1001):
                quotas.admit("t", limits, 1, 0).settle(0)
        except QuotaExceeded:
            pass
    else:
        limits, tokens = TenantLimits(tokens_per_minute=rate), rate * wanted
        quotas.admit("t", limits, 1, rate * used).settle(rate * used * 1.5)
    try:
        quotas.admit("t", limits, 1, tokens)
    except QuotaExceeded as refusal:
        wait = refusal.retry_after_s
        assert wait is not None
        assert wait > 0
        if wait > 0.1:
            clock.advance(wait * 0.99)
            wait *= 0.01
            refused(quotas, limits, tokens=tokens)
        clock.advance(wait)
        quotas.admit("t", limits, 1, tokens)


@given(st.lists(st.tuples(st.sampled_from(["admit", "adjust", "settle"]), st.floats(0, 50))))
def test_books_close_whatever_happens_in_between(moves: list[tuple[str, float]]) -> None:
    clock = VirtualClock()
    quotas = Quotas(clock)
    limits = TenantLimits(tokens_per_minute=1e9, max_concurrency=10_000)
    open_holds: list[Hold] = []
    actual = 0.0
    for move, tokens in moves:
        if move == "admit" or not open_holds:
            open_holds.append(quotas.admit("t", limits, 2, tokens))
        elif move == "adjust":
            open_holds[0].adjust(tokens)
        else:
            open_holds.pop(0).settle(tokens)
            actual += tokens
        assert quotas.concurrency("t") == 2 * len(open_holds)
    for hold in open_holds:
        hold.settle(0)
    state = quotas.state("t", limits)
    assert state is not None
    assert state.remaining_tokens == pytest.approx(1e9 - actual)
    assert quotas.concurrency("t") == 0
