"""`headrace cache`: what a running server has stored, undone, moved and filled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.common import KeyOption, UrlOption, fail

if TYPE_CHECKING:
    from headrace.cli.remote import Remote

__all__ = ["app"]

app = typer.Typer(
    help="See, undo, move and fill the answers that a running server has stored.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

EntryArgument = Annotated[
    str, typer.Argument(help="The header x-cache-entry of an answer.", metavar="ENTRY")
]
_URL = "http://127.0.0.1:8000"
_BATCH_BYTES = 1 << 20


def _remote_faults(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from headrace.cli.remote import RemoteError  # noqa: PLC0415 - brings ssl

        try:
            command(*args, **kwargs)
        except RemoteError as error:
            fail(str(error), 1)

    return wrapped


def _remote(url: str, api_key: str | None) -> Remote:
    from headrace.cli.remote import Remote  # noqa: PLC0415 - brings ssl

    return Remote(url, api_key)


def _show(what: Any) -> None:
    typer.echo(json.dumps(what, indent=2, ensure_ascii=False))


@app.command("stats")
@_remote_faults
def stats(url: UrlOption = _URL, api_key: KeyOption = None) -> None:
    """Print hits by tier, what they saved, and the state of each tier."""
    _show(_remote(url, api_key).json("GET", "/v1/cache/stats")[0])


@app.command("show")
@_remote_faults
def show(entry: EntryArgument, url: UrlOption = _URL, api_key: KeyOption = None) -> None:
    """Print one stored answer."""
    _show(_remote(url, api_key).json("GET", f"/v1/cache/entries/{entry}")[0])


@app.command("forget")
@_remote_faults
def forget(entry: EntryArgument, url: UrlOption = _URL, api_key: KeyOption = None) -> None:
    """Forget one stored answer."""
    _remote(url, api_key).json("DELETE", f"/v1/cache/entries/{entry}")
    typer.echo("forgotten")


@app.command("invalidate")
@_remote_faults
def invalidate(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose answers.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Which model's.")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="One namespace of a tenant.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="One tag of a tenant.")] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All answers of all tenants.")] = False,
    url: UrlOption = _URL,
    api_key: KeyOption = None,
) -> None:
    """Forget all stored answers of what is given."""
    given = {"tenant": tenant, "model": model, "namespace": namespace, "tag": tag}
    scope = {name: value for name, value in given.items() if value is not None}
    if bool(scope) == everything:
        fail("say what to forget, or --all")
    _remote(url, api_key).json("POST", "/v1/cache/invalidate", scope)
    typer.echo("invalidated " + (", ".join(f"{k} {v}" for k, v in scope.items()) or "everything"))


@app.command("export")
@_remote_faults
def export(
    file: Annotated[
        Path | None, typer.Option("--out", help="Where to; standard output otherwise.")
    ] = None,
    url: UrlOption = _URL,
    api_key: KeyOption = None,
) -> None:
    """Write all stored answers, a JSON object a line, for `headrace cache import`."""
    lines = _remote(url, api_key).lines("/v1/cache/export")
    if file is None:
        for line in lines:
            typer.echo(line.decode(), nl=False)
        return
    count = 0
    with file.open("wb") as out:
        for line in lines:
            out.write(line)
            count += 1
    typer.echo(f"{count} entries in {file}", err=True)


@app.command("import")
@_remote_faults
def take(
    file: Annotated[Path, typer.Argument(help="What was exported.", exists=True, dir_okay=False)],
    url: UrlOption = _URL,
    api_key: KeyOption = None,
) -> None:
    """Take over what a server with the same caching.secret and model has exported."""
    remote = _remote(url, api_key)
    total: Counter[str] = Counter()
    for batch in _batches(file):
        total.update(remote.send("/v1/cache/import", batch))
    typer.echo(f"{total['taken']} taken, {total['skipped']} skipped")


@app.command("warm")
@_remote_faults
def warm(
    file: Annotated[
        Path,
        typer.Argument(
            help="Bodies of chat or completion requests, a JSON object a line; or lines of an"
            " OpenAI batch file.",
            exists=True,
            dir_okay=False,
        ),
    ],
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=256)] = 8,
    url: UrlOption = _URL,
    api_key: KeyOption = None,
) -> None:
    """Ask every request of a file once, as batch work, so that its answer is stored."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - only this verb needs it

    remote = _remote(url, api_key)
    requests = list(_requests(file))
    with ThreadPoolExecutor(concurrency) as pool:
        outcomes = Counter(pool.map(lambda request: _ask(remote, *request), requests))
    for outcome, count in sorted(outcomes.items()):
        typer.echo(f"{count:6} {outcome}")
    if any(outcome.startswith("failed") for outcome in outcomes):
        raise typer.Exit(1)


def _batches(file: Path) -> Iterator[bytes]:
    batch: list[bytes] = []
    size = 0
    with file.open("rb") as lines:
        for line in lines:
            if batch and size + len(line) > _BATCH_BYTES:
                yield b"".join(batch)
                batch, size = [], 0
            batch.append(line)
            size += len(line)
    if batch:
        yield b"".join(batch)


def _requests(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and bodies. All lines are read before the first is asked."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError:
            fail(f"line {number} of {file} is not JSON", 1)
        if isinstance(body, dict) and isinstance(body.get("body"), dict):
            body = body["body"]
        if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
            fail(f"line {number} of {file} is not the body of a chat or completion", 1)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        yield path, {**body, "stream": False}


def _ask(remote: Remote, path: str, body: dict[str, Any]) -> str:
    from headrace.cli.remote import RemoteError  # noqa: PLC0415 - brings ssl

    try:
        headers = remote.json("POST", path, body, {"x-priority": "batch"})[1]
    except RemoteError as error:
        return f"failed: {error}"
    status = headers.get("x-cache", "no cache")
    return {
        "HIT": "were stored already",
        "MISS": "computed and stored",
        "COALESCED": "computed and stored",
        "BYPASS": f"computed but not stored ({headers.get('x-cache-reason')})",
    }.get(status, status)
