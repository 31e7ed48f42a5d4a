"""The command tree. Imports typer and this package's light modules only."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace import __version__
from headrace.cli import cache, config, keys, models
from headrace.cli.serve import serve

__all__ = ["app"]

# Plain help: rich would double the time of `headrace --help`.
app = typer.Typer(
    name="headrace",
    help="Serve a language model to many clients at once over an OpenAI-compatible API.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")
app.add_typer(cache.app, name="cache")
app.add_typer(config.app, name="config")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve a language model to many clients at once over an OpenAI-compatible API."""
