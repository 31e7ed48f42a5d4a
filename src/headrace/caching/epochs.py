"""Invalidation of many entries at once, without looking for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

__all__ = ["Epochs", "Scope"]

_Table = dict[str, int]


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """What is forgotten together: everything, or what is of this tenant, model and namespace, as
    far as they are given. A namespace and a tag are one tenant's."""

    tenant: str | None = None
    model: str | None = None
    namespace: str | None = None
    tag: str | None = None

    def __post_init__(self) -> None:
        if self.namespace is not None and (self.tenant is None or self.model is not None):
            raise ValueError("a namespace is one tenant's, over all models")
        if self.tag is not None and (
            self.tenant is None or self.model is not None or self.namespace is not None
        ):
            raise ValueError("a tag is one tenant's, over all models and namespaces")

    @property
    def name(self) -> str:
        parts = (self.tenant, self.model, self.namespace, self.tag)
        return msgspec.json.encode(parts if self.tag is not None else parts[:3]).decode()


class Epochs:
    """A counter for each scope, part of the key of every entry in it: when it moves on, no old
    entry is found any more, in whatever tier. Those of tags are kept in the entry instead, for who
    asks does not know them. Counters only grow, so replicas merge by the larger one. Event loop
    only."""

    def __init__(self) -> None:
        self._table: _Table = {}
        self._on_change: list[Callable[[str, int], None]] = []

    def of(self, owner: str, model: str, namespace: str) -> tuple[int, ...]:
        """All counters that concern an entry. The owner is a tenant or `tenant/sub-tenant`; what
        is the tenant's is of both."""
        if not self._table:
            return (0, 0, 0, 0, 0)
        get = self._table.get
        tenant = owner.partition("/")[0]
        return (
            get(_EVERYTHING, 0),
            get(Scope(tenant=tenant).name, 0),
            get(Scope(model=model).name, 0),
            get(Scope(tenant=tenant, model=model).name, 0),
            get(Scope(tenant=tenant, namespace=namespace).name, 0),
        )

    def of_tag(self, owner: str, tag: str) -> int:
        return self._table.get(Scope(tenant=owner.partition("/")[0], tag=tag).name, 0)

    def bump(self, scope: Scope) -> int:
        """From now on no entry of the scope is found."""
        epoch = self._table.get(scope.name, 0) + 1
        self.learn(scope.name, epoch)
        return epoch

    def learn(self, name: str, epoch: int) -> bool:
        """Somebody else's counter; whether it was news."""
        if epoch <= self._table.get(name, 0):
            return False
        self._table[name] = epoch
        for tell in self._on_change:
            tell(name, epoch)
        return True

    def listen(self, tell: Callable[[str, int], None]) -> None:
        """`tell` is called with every change."""
        self._on_change.append(tell)

    def table(self) -> Mapping[str, int]:
        return dict(self._table)


_EVERYTHING = Scope().name
