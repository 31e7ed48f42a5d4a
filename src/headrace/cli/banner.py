"""What `serve` says once it is ready: at most twelve lines."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import TYPE_CHECKING

from headrace import __version__
from headrace.config import format_size

if TYPE_CHECKING:
    from headrace.config_loading import LoadedSettings
    from headrace.engine.wire import ModelInfo

__all__ = ["banner", "exposed_warning", "is_loopback", "url_of"]


def url_of(host: str, port: int) -> str:
    """The address a client on this machine uses."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - names, no binding
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def exposed_warning(loaded: LoadedSettings, stored_keys: int | None = None) -> str | None:
    """A sentence for a server that is open to its network, else None."""
    server = loaded.settings.server
    if _keys(loaded, stored_keys) is not None or is_loopback(server.host):
        return None
    return (
        f"warning: listening on {server.host} without an API key: whoever reaches this port may"
        " use the model; set --api-key or HEADRACE__SERVER__API_KEYS, or make one with"
        " `headrace keys create NAME`"
    )


def banner(
    loaded: LoadedSettings,
    info: ModelInfo | None,
    name: str,
    url: str,
    stored_keys: int | None = None,
) -> str:
    """URL, model, device, memory, limits, access and where the settings come from."""
    settings = loaded.settings
    keys = _keys(loaded, stored_keys)
    rows = [("API", f"{url}/v1"), ("docs", f"{url}/docs")]
    if info is not None:
        tokens = info.num_blocks * info.block_size
        size = f"{_count(info.parameters)} parameters"
        computes = f"{info.device}, {info.dtype}, {info.kernels} kernels"
        rows += [
            ("model", f"{info.architecture}, {size}, context {info.context_length:,} tokens"),
            ("device", f"{computes}, weights {format_size(info.weight_bytes)}"),
            ("KV cache", f"{tokens:,} tokens in {format_size(info.kv_bytes)}"),
        ]
    running = settings.engine.max_running if info is None else info.max_running
    step = settings.engine.max_step_tokens if info is None else info.max_step_tokens
    rows += [
        (
            "limits",
            f"{running} running, {settings.limits.max_queue} waiting, {step} tokens a step",
        ),
        ("access", "open, no API key" if keys is None else f"{keys} API key{'s' * (keys != 1)}"),
        ("settings", _origins(loaded)),
    ]
    lines = [f"Headrace {__version__} serves {name}"]
    return "\n".join(lines + [f"  {label:10}{text}" for label, text in rows])


def _keys(loaded: LoadedSettings, stored_keys: int | None) -> int | None:
    """Keys that are good now, of the settings and of the store; None where none is asked for."""
    settings = loaded.settings
    configured = len(settings.server.api_keys) + sum(len(t.api_keys) for t in settings.tenants)
    return configured + (stored_keys or 0) if configured or stored_keys is not None else None


def _count(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.1f} B"
    return f"{parameters / 1e6:.0f} M" if parameters >= 1e6 else f"{parameters:,}"


def _origins(loaded: LoadedSettings) -> str:
    kinds = Counter(origin.split()[0] for origin in loaded.origins.values())
    parts = [
        f"{kinds[kind]} from {source}"
        for kind, source in (
            ("flag", "flags"),
            ("environment", "the environment"),
            ("file", str(loaded.file)),
        )
        if kinds[kind]
    ]
    return f"{', '.join(parts)}, the rest defaults" if parts else "all defaults"
