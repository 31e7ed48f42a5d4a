"""The `headrace` command. Each verb imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from headrace.cli.app import app  # noqa: PLC0415 - importing headrace.cli stays free

    app()
