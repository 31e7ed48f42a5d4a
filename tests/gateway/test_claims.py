"""How urgent a request may be, for whom it counts, and when it is too late."""

from __future__ import annotations

import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.request import PriorityClass
from headrace.gateway.claims import Terms, claim
from headrace.gateway.tenants import Tenant

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


@pytest.mark.parametrize("word", ["urgent", "1.5", "", "nan"])
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


def test_the_deadline_counts_from_arrival() -> None:
    assert claim(PLAIN, Terms(timeout_s=2.5), 40.0).deadline == 42.5
    assert claim(PLAIN, Terms(), 40.0).deadline is None
    assert claim(ANY, Terms(), 40.0).weight == 2.5
