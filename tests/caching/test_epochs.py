"""Invalidation by counters."""

from __future__ import annotations

import pytest

from headrace.caching.epochs import Epochs, Scope

ENTRIES = [
    (owner, model, namespace)
    for owner in ("a", "a/sub", "b")
    for model in ("m", "n")
    for namespace in ("", "x")
]


@pytest.mark.parametrize(
    "scope",
    [
        Scope(),
        Scope(tenant="a"),
        Scope(model="m"),
        Scope(tenant="a", model="m"),
        Scope(tenant="a", namespace="x"),
    ],
    ids=lambda scope: scope.name,
)
def test_exactly_what_is_in_the_scope_changes(scope: Scope) -> None:
    epochs = Epochs()
    epochs.bump(Scope(tenant="c"))
    before = {entry: epochs.of(*entry) for entry in ENTRIES}
    epochs.bump(scope)
    for owner, model, namespace in ENTRIES:
        within = (
            scope.tenant in (None, owner[0])
            and scope.model in (None, model)
            and scope.namespace in (None, namespace)
        )
        changed = epochs.of(owner, model, namespace) != before[owner, model, namespace]
        assert changed is within


def test_replicas_merge_by_the_larger_counter_and_are_told_once() -> None:
    heard: list[tuple[str, int]] = []
    one, two = Epochs(), Epochs()
    two.listen(lambda name, epoch: heard.append((name, epoch)))
    one.bump(Scope(tenant="a"))
    one.bump(Scope(tenant="a"))
    for name, epoch in one.table().items():
        assert two.learn(name, epoch)
        assert not two.learn(name, epoch)
        assert not two.learn(name, epoch - 1)
    assert two.of("a", "m", "") == one.of("a", "m", "")
    assert heard == [(Scope(tenant="a").name, 2)]


def test_a_namespace_is_one_tenants() -> None:
    for wrong in ({"namespace": "x"}, {"namespace": "x", "tenant": "a", "model": "m"}):
        with pytest.raises(ValueError, match="namespace"):
            Scope(**wrong)


def test_names_cannot_be_forged() -> None:
    names = {
        Scope(tenant='a","m').name,
        Scope(tenant="a", model="m").name,
        Scope(tenant="a").name,
        Scope(model="a").name,
        Scope(tenant="null").name,
        Scope().name,
    }
    assert len(names) == 6


def test_a_tag_is_one_tenants_and_has_a_counter_of_its_own() -> None:
    epochs = Epochs()
    before = epochs.of("a/sub", "m", "")
    epochs.bump(Scope(tenant="a", tag="x"))
    assert epochs.of("a/sub", "m", "") == before
    assert epochs.of_tag("a/sub", "x") == 1
    assert epochs.of_tag("a", "y") == epochs.of_tag("b", "x") == 0
    for wrong in ({"tag": "x"}, {"tag": "x", "tenant": "a", "model": "m"}):
        with pytest.raises(ValueError, match="tag"):
            Scope(**wrong)


def test_no_scope_imitates_another() -> None:
    names = {
        Scope().name,
        Scope(tenant="a").name,
        Scope(model="a").name,
        Scope(tenant="a", model="a").name,
        Scope(tenant="a", namespace="a").name,
        Scope(tenant="a", tag="a").name,
        Scope(tenant='a",null').name,
    }
    assert len(names) == 7
