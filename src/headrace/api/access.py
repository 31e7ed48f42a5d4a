"""Who may change a server: an admin's key, or where there are no keys, its own machine."""

from __future__ import annotations

import ipaddress

from starlette.requests import Request as HttpRequest

from headrace.api.base import context_of, tenant_of
from headrace.core.errors import PermissionDenied, Unauthorized

__all__ = ["guarded", "is_admin", "require_admin", "require_operator"]

_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
"""Headers of proxies: with one of them, who is at the other end is anybody's guess."""


def guarded(http: HttpRequest) -> bool:
    """Whether there are keys, which is to say whether nobody gets in without one."""
    try:
        context_of(http).gateway.authenticate(None)
    except Unauthorized:
        return True
    return False


def is_admin(http: HttpRequest) -> bool:
    """Whether the caller's key is an admin's."""
    return tenant_of(http).admin


def require_admin(http: HttpRequest) -> None:
    """Raises PermissionDenied. Where there are no keys everybody may."""
    if guarded(http) and not is_admin(http):
        raise PermissionDenied("This needs the key of an admin.")


def require_operator(http: HttpRequest) -> None:
    """As `require_admin`, but where there are no keys only clients on the server's own machine
    may. A proxy beside the server makes everyone's address a local one, and a web page may have its
    own name point here; so neither a proxy's header nor a foreign host name may be there."""
    if guarded(http):
        require_admin(http)
        return
    client = http.client
    if (
        client is None
        or not _is_loopback(client.host)
        or any(name in http.headers for name in _FORWARDED)
        or not _is_local_host(http.headers.get("host", ""))
    ):
        raise PermissionDenied(
            "Without API keys only clients on the server's own machine may change it."
        )


def _is_local_host(host: str) -> bool:
    """The Host header names this machine; its port does not matter."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower() == "localhost" or _is_loopback(name)


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped.is_loopback
    return found.is_loopback
