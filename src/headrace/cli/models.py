"""`headrace models`: which models there are, where they lie, and fetching them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli.common import fail, refusals

__all__ = ["app"]

app = typer.Typer(
    help="List, locate and fetch models.", no_args_is_help=True, rich_markup_mode=None
)

Name = Annotated[
    str, typer.Argument(help="Short name, folder, .gguf file or hub id org/name.", metavar="NAME")
]


@app.command("pull")
@refusals
def pull(name: Name) -> None:
    """Fetch a model and print where it lies."""
    from headrace.cli.progress import StageReporter  # noqa: PLC0415
    from headrace.core.health import Stage  # noqa: PLC0415
    from headrace.engine.models import store  # noqa: PLC0415

    source = store.resolve(name)
    if source.path is None:
        with StageReporter(sys.stderr) as reporter:
            store.pull(name, lambda done, words: reporter.update(Stage.DOWNLOAD, done, words))
    typer.echo(store.pull(name))


@app.command("path")
@refusals
def path(name: Name) -> None:
    """Print where a model lies on this machine; exit code 1 if it must be fetched first."""
    from headrace.engine.models import store  # noqa: PLC0415

    source = store.resolve(name)
    if source.path is None:
        fail(f"{name} is not on this machine; fetch it with: headrace models pull {name}", 1)
    typer.echo(source.path)


@app.command("list")
@refusals
def list_models(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the short names, and whether each is on this machine."""
    import json  # noqa: PLC0415

    from headrace.config import format_size  # noqa: PLC0415
    from headrace.engine.models import store  # noqa: PLC0415
    from headrace.engine.models.wheels import SHORT_NAMES  # noqa: PLC0415

    rows = [
        {
            "name": model.name,
            "bytes": model.file_size,
            "licence": model.licence,
            "path": None if (found := store.resolve(model.name).path) is None else str(found),
        }
        for model in SHORT_NAMES.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        place = row["path"] or "not fetched"
        size = format_size(int(str(row["bytes"])))
        typer.echo(f"{row['name']:28}{size:>10}  {row['licence']:12}{place}")
