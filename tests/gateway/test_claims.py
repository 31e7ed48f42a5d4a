"""How urgent a request may be, for whom it counts, and when it is too late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.clock import VirtualClock
from headrace.core.errors import InvalidRequest
from headrace.core.request import PriorityClass
from headrace.gateway.claims import SubTenants, Terms, claim
from headrace.gateway.tenants import Tenant
from headrace.scheduling import Claim

SYSTEM, INTERACTIVE, STANDARD, BATCH = PriorityClass
PLAIN = Tenant("plain")
ANY = Tenant("any", highest_class=SYSTEM, trusted=True, weight=2.5)


@pytest.mark.parametrize(
    ("terms", "wanted"),
    [
        (Terms(), STANDARD),
        (Terms(priority=-1), INTERACTIVE),
        (Terms(priority=-2), SYSTEM),
        (Terms(priority=-100), SYSTEM),
        (Terms(priority=1), BATCH),
        (Terms(priority=1000), BATCH),
        (Terms(x_priority="batch"), BATCH),
        (Terms(x_priority="System"), SYSTEM),
        (Terms(x_priority="-1"), INTERACTIVE),
        (Terms(x_priority="0"), STANDARD),
        (Terms(objective="interactive"), INTERACTIVE),
        (Terms(objective="someone-elses-name"), STANDARD),
        (Terms(priority=1, x_priority="system", objective="system"), BATCH),
        (Terms(x_priority="batch", objective="system"), BATCH),
    ],
)
def test_the_first_word_that_says_anything_counts(terms: Terms, wanted: PriorityClass) -> None:
    assert claim(ANY, terms, 0.0).priority_class is wanted


@pytest.mark.parametrize(
    "terms", [Terms(priority=-2), Terms(x_priority="system"), Terms(objective="system")]
)
def test_nobody_is_more_urgent_than_allowed(terms: Terms) -> None:
    assert claim(PLAIN, terms, 0.0).priority_class is INTERACTIVE
    slow = Tenant("slow", default_class=BATCH, highest_class=BATCH)
    assert claim(slow, terms, 0.0).priority_class is BATCH


@pytest.mark.parametrize("word", ["urgent", "1.5", "", "nan", "-1_0", "٣", "1" * 5000])
def test_a_word_that_is_no_class_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        claim(ANY, Terms(x_priority=word), 0.0)
    assert refusal.value.param == "X-Priority"


def test_sub_tenants_are_heard_from_the_trusted_alone() -> None:
    terms = Terms(fairness_id="team-7@example.org")
    assert claim(ANY, terms, 0.0).flow == "any/team-7@example.org"
    assert claim(PLAIN, terms, 0.0).flow == "plain"
    assert ANY.owns("any/team-7@example.org")
    assert ANY.owns("any")
    assert not PLAIN.owns("any")
    assert not Tenant("an").owns("any")


@pytest.mark.parametrize("name", ["a/b", "a b", "x" * 65, "-", "é"])
def test_a_sub_tenants_name_is_plain_and_short(name: str) -> None:
    with pytest.raises(InvalidRequest, match="fairness-id"):
        claim(ANY, Terms(fairness_id=name), 0.0)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf"), float("-inf")])
def test_a_deadline_that_is_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(InvalidRequest, match="X-Request-Timeout") as refusal:
        claim(PLAIN, Terms(timeout_s=timeout), 0.0)
    assert refusal.value.param == "timeout"


@given(
    st.sampled_from(PriorityClass),
    st.sampled_from(PriorityClass),
    st.builds(
        Terms,
        priority=st.integers(),
        x_priority=st.none() | st.integers(-(10**9) + 1, 10**9 - 1).map(str),
        objective=st.none() | st.text(),
        fairness_id=st.none() | st.text(),
    ),
)
def test_whatever_is_asked_for_stays_within_the_tenants_own(
    default: PriorityClass, highest: PriorityClass, terms: Terms
) -> None:
    tenant = Tenant("t", default_class=max(default, highest), highest_class=highest)
    claimed = claim(tenant, terms, 0.0)
    assert highest <= claimed.priority_class <= BATCH
    assert claimed.flow == "t"
    less = claim(tenant, replace(terms, priority=terms.priority + 1), 0.0).priority_class
    if terms.priority not in (0, -1):
        assert less >= claimed.priority_class


def test_the_deadline_counts_from_arrival() -> None:
    assert claim(PLAIN, Terms(timeout_s=2.5), 40.0).deadline == 42.5
    assert claim(PLAIN, Terms(), 40.0).deadline is None
    assert claim(ANY, Terms(), 40.0).weight == 2.5


def test_naming_sub_tenants_gives_no_more_of_the_server() -> None:
    clock = VirtualClock()
    shares = SubTenants(clock)

    def ask(name: str | None, tenant: Tenant = ANY) -> Claim:
        return shares.shared(tenant, claim(tenant, Terms(fairness_id=name), 0.0))

    assert ask("a").weight == 2.5
    assert ask("b").weight == 1.25
    assert [ask(name).weight for name in ("a", "b", None)] == [1.25, 1.25, 2.5 / 3]
    clock.advance(61)
    assert ask("a").weight == 2.5
    assert ask(None, PLAIN).weight == 1.0
    flows = {ask(f"s{number}").flow for number in range(1000)}
    assert len(flows) <= 257
    assert ANY.name in flows
