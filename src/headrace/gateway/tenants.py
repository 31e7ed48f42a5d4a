"""Who is asking, and what they may do."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from headrace.config import Settings, TenantSettings
from headrace.core.errors import Unauthorized
from headrace.core.request import PriorityClass
from headrace.scheduling.quotas import TenantLimits

__all__ = ["DEFAULT_TENANT", "KeyRing", "KeySource", "Tenant", "key_digest"]

_NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Tenant:
    """A party whose requests are kept apart from those of others: caches, queues, limits.

    No `models` is all of them. `trusted` may speak for sub-tenants, `admin` sees and shapes the
    whole queue.
    """

    name: str
    weight: float = 1.0
    default_class: PriorityClass = PriorityClass.STANDARD
    highest_class: PriorityClass = PriorityClass.INTERACTIVE
    limits: TenantLimits = _NO_LIMITS
    models: frozenset[str] = frozenset()
    trusted: bool = False
    admin: bool = False

    @classmethod
    def of(cls, settings: TenantSettings) -> Tenant:
        return cls(
            name=settings.name,
            weight=settings.weight,
            default_class=PriorityClass[settings.default_class.upper()],
            highest_class=PriorityClass[settings.highest_class.upper()],
            limits=TenantLimits(
                settings.requests_per_minute, settings.tokens_per_minute, settings.max_concurrency
            ),
            models=frozenset(settings.models),
            trusted=settings.trusted,
            admin=settings.admin,
        )

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models

    def owns(self, flow: str) -> bool:
        """Whether a flow of the scheduler is this tenant's, or one of its sub-tenants'."""
        return flow == self.name or flow.startswith(f"{self.name}/")


DEFAULT_TENANT = Tenant("default")


class KeySource(Protocol):
    """Keys that come and go while the server runs; `headrace.gateway.keystore` has them."""

    @property
    def guards(self) -> bool:
        """Whether there ever was a key here, so that nobody gets in without one."""
        ...

    def entries(self) -> tuple[tuple[bytes, str], ...]:
        """Digest and tenant of each key that is good now."""
        ...


class KeyRing:
    """API keys, held as digests, each with its tenant. Without keys everybody is the default one.

    Every key is compared on every look-up, in constant time and as bytes, so that neither the
    position nor a prefix of a key can be measured.
    """

    def __init__(
        self,
        keys: Iterable[tuple[str, Tenant]] = (),
        *,
        tenants: Iterable[Tenant] = (),
        source: KeySource | None = None,
    ) -> None:
        entries = []
        for key, tenant in keys:
            if not key.strip():
                raise ValueError("an API key must not be empty")
            entries.append((key_digest(key.encode("utf-8", "surrogateescape")), tenant))
        self._entries = tuple(entries)
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._source = source

    @classmethod
    def numbered(cls, keys: Iterable[str]) -> KeyRing:
        """A tenant of its own for each key: key-1, key-2, in the order given."""
        return cls((key, Tenant(f"key-{i}")) for i, key in enumerate(keys, 1))

    @classmethod
    def of(cls, settings: Settings, source: KeySource | None = None) -> KeyRing:
        """Keys and tenants of the settings, and those that `source` has."""
        keys = [
            (key.get_secret_value(), Tenant(f"key-{i}"))
            for i, key in enumerate(settings.server.api_keys, 1)
        ]
        tenants = [Tenant.of(tenant) for tenant in settings.tenants]
        for tenant, given in zip(tenants, settings.tenants, strict=True):
            keys += [(key.get_secret_value(), tenant) for key in given.api_keys]
        return cls(keys, tenants=tenants, source=source)

    def __bool__(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._entries) or (self._source is not None and self._source.guards)

    def tenant(self, credential: bytes | None) -> Tenant:
        """The tenant of this key. Raises Unauthorized, and never repeats the credential."""
        if not self:
            return self._tenants.get(DEFAULT_TENANT.name, DEFAULT_TENANT)
        if not credential:
            raise Unauthorized(
                "No API key was given. Send it in the header `Authorization: Bearer KEY`."
            )
        given = key_digest(credential)
        found: Tenant | None = None
        for digest, tenant in self._entries:
            if hmac.compare_digest(digest, given):
                found = tenant
        for digest, name in () if self._source is None else self._source.entries():
            if hmac.compare_digest(digest, given):
                found = self._tenants.get(name) or Tenant(name)
        if found is None:
            raise Unauthorized("The API key is not valid.")
        return found


def key_digest(key: bytes) -> bytes:
    """Keys are long and random, so a plain hash does not let them be guessed."""
    return hashlib.sha256(key).digest()
