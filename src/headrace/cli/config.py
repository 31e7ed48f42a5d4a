"""`headrace config`: what the settings are, where each comes from, whether they can be used."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.common import ConfigOption, SetOption, read_settings, refusals

__all__ = ["app"]

app = typer.Typer(
    help="Show, check and explain the settings.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("show")
@refusals
def show(
    config: ConfigOption = None,
    assignments: SetOption = None,
    *,
    origin: Annotated[
        bool, typer.Option("--origin", help="Say where each value comes from.")
    ] = False,
) -> None:
    """Print every setting, secrets masked."""
    rows = read_settings({}, config, assignments).rows()
    width = max(len(f"{key} = {value}") for key, value, _ in rows)
    for key, value, source in rows:
        line = f"{key} = {value}"
        typer.echo(f"{line:{width}}  # {source}" if origin else line)


@app.command("check")
@refusals
def check(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Say whether the settings can be used; exit code 2 if not."""
    loaded = read_settings({}, config, assignments)
    typer.echo(f"the settings can be used ({loaded.file or 'no file'})")


@app.command("reference")
@refusals
def reference() -> None:
    """Print the table of all settings, as docs/configuration.md has it."""
    from headrace.cli.reference import settings_table  # noqa: PLC0415

    typer.echo(settings_table())
