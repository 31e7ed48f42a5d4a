"""`headrace keys`: API keys made, listed and revoked, also while a server runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.common import ConfigOption, fail, read_settings, refusals

if TYPE_CHECKING:
    from headrace.gateway.keystore import KeyStore

__all__ = ["app"]

app = typer.Typer(
    help="Make, list and revoke API keys.", no_args_is_help=True, rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(help="What to call the key.", metavar="NAME")]
StoreOption = Annotated[
    Path | None, typer.Option("--store", help="The file of the keys; else as configured.")
]


def _store_faults(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from headrace.gateway.keystore import KeyStoreError  # noqa: PLC0415 - brings pydantic

        try:
            command(*args, **kwargs)
        except KeyStoreError as error:
            fail(str(error), 1)

    return wrapped


@app.command("create")
@refusals
@_store_faults
def create(
    name: Name,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose key it is; else a tenant of its own.")
    ] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
) -> None:
    """Make a key and print it, this once. From then on the server asks for keys."""
    from headrace.core.clock import SystemEntropy  # noqa: PLC0415

    if not name.strip() or not name.isprintable() or len(name) > 64:
        fail("a key's name is 1 to 64 printable characters")
    settings = read_settings({}, config, None).settings
    known = {item.name for item in settings.tenants}
    numbered = {f"key-{i}" for i in range(1, len(settings.server.api_keys) + 1)}
    if tenant is None and name in known | numbered | {"default"}:
        fail(f"there is a tenant named {name}; write --tenant {name} if the key is to be its own")
    typer.echo(_open(store, config).create(name, tenant or name, SystemEntropy()))
    if tenant is not None and known and tenant not in known:
        typer.echo(
            f"headrace: the settings have no tenant named {tenant}; it has no limits", err=True
        )


@app.command("list")
@refusals
@_store_faults
def list_keys(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    store: StoreOption = None,
    config: ConfigOption = None,
) -> None:
    """List the keys by name, tenant and last four characters."""
    import json  # noqa: PLC0415
    from dataclasses import asdict  # noqa: PLC0415
    from datetime import UTC, datetime  # noqa: PLC0415

    keys = _open(store, config).keys()
    if as_json:
        typer.echo(json.dumps([asdict(key) for key in keys], indent=2))
        return
    for key in keys:
        made = datetime.fromtimestamp(key.created, UTC).strftime("%Y-%m-%d %H:%M")
        state = "good" if key.revoked is None else "revoked"
        typer.echo(f"{key.name:24}{key.tenant:24}...{key.ending}  {made} UTC  {state}")


@app.command("revoke")
@refusals
@_store_faults
def revoke(name: Name, store: StoreOption = None, config: ConfigOption = None) -> None:
    """Make a key useless, within a second also at servers that run."""
    _open(store, config).revoke(name)
    typer.echo(f"{name} is revoked")


def _open(store: Path | None, config: Path | None) -> KeyStore:
    """A store that is named needs no settings: keys can be revoked while those are wrong."""
    from headrace.core.clock import SystemClock  # noqa: PLC0415
    from headrace.gateway.keystore import KeyStore  # noqa: PLC0415 - brings pydantic

    path = store or read_settings({}, config, None).settings.keys.file
    return KeyStore(path, SystemClock())
