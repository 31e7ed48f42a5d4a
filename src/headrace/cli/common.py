"""What several verbs share: options, flags as settings, and how a refusal looks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from headrace.config_loading import LoadedSettings

__all__ = [
    "ConfigOption",
    "KeyOption",
    "SetOption",
    "UrlOption",
    "fail",
    "read_settings",
    "refusals",
]

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file; else ./headrace.toml, else the user's headrace/headrace.toml.",
        metavar="FILE",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any setting, as in --set limits.max_queue=64. Repeatable.",
        metavar="KEY=VALUE",
    ),
]

UrlOption = Annotated[
    str, typer.Option("--url", help="The server.", envvar="HEADRACE_URL", metavar="URL")
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", help="Its API key.", envvar="HEADRACE_API_KEY", metavar="KEY"),
]


def fail(message: str, code: int = 2) -> NoReturn:
    """Ends the command with a sentence on standard error."""
    typer.echo(f"headrace: {message}", err=True)
    raise typer.Exit(code)


def refusals(command: Callable[..., None]) -> Callable[..., None]:
    """Turns the expected errors of a verb into a sentence and exit code 2."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        from headrace.config_loading import ConfigError  # noqa: PLC0415 - brings pydantic
        from headrace.engine.models.store import ModelError  # noqa: PLC0415

        try:
            command(*args, **kwargs)
        except ConfigError as error:
            fail("\n  ".join(["the settings cannot be used:", *error.problems]))
        except ModelError as error:
            fail(str(error))

    return wrapped


def read_settings(
    flags: dict[str, tuple[str, Any]], config: Path | None, assignments: list[str] | None
) -> LoadedSettings:
    """Settings with `flags` (key to flag name and value; None is not given) on top."""
    from headrace.config_loading import Given, load_settings  # noqa: PLC0415 - brings pydantic

    given: dict[str, Given] = {}
    for assignment in assignments or []:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            fail("--set takes KEY=VALUE, as in --set limits.max_queue=64")
        given[key.strip()] = Given(text, "flag --set", is_text=True)
    for key, (flag, value) in flags.items():
        if value is not None:
            given[key] = Given(value, f"flag {flag}", is_text=isinstance(value, str))
    return load_settings(flags=given, config_file=config)
