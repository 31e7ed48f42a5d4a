"""The life of one request, and who may ask."""

from __future__ import annotations

from headrace.gateway.gateway import Gateway
from headrace.gateway.tenants import DEFAULT_TENANT, KeyRing, Tenant

__all__ = ["DEFAULT_TENANT", "Gateway", "KeyRing", "Tenant"]
