"""`headrace serve`: settings and refusals; what runs is in `headrace.cli.server`."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.common import ConfigOption, SetOption, fail, read_settings, refusals

if TYPE_CHECKING:
    from headrace.config_loading import LoadedSettings

__all__ = ["missing_packages", "serve"]

_ENGINE_PACKAGES = ("torch", "numpy", "tokenizers", "jinja2", "gguf", "safetensors")


def _option(name: str, help_text: str, metavar: str | None = None) -> Any:
    return typer.Option(name, help=help_text, metavar=metavar, show_default=False)


@refusals
def serve(  # noqa: PLR0917 - typer passes by name; each is one flag
    model: Annotated[
        str | None,
        typer.Argument(
            help="Short name, folder, .gguf file or hub id; else the setting engine.model.",
            metavar="[MODEL]",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str | None, _option("--host", "Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, _option("--port", "Port; 0 takes a free one [8000].")] = None,
    config: ConfigOption = None,
    api_key: Annotated[
        list[str] | None,
        _option(
            "--api-key",
            "Key that opens the API; repeatable. Others can see it in the process list:"
            " HEADRACE__SERVER__API_KEYS hides it better.",
            "KEY",
        ),
    ] = None,
    served_name: Annotated[
        str | None, _option("--served-name", "The model's name in the API.")
    ] = None,
    dtype: Annotated[str | None, _option("--dtype", "auto, bf16 or fp32.")] = None,
    device: Annotated[str | None, _option("--device", "auto, cpu or cuda.")] = None,
    threads: Annotated[int | None, _option("--threads", "CPU threads of the engine.")] = None,
    kv_memory: Annotated[
        str | None, _option("--kv-memory", "KV cache, as in 2GiB; else from free memory.", "SIZE")
    ] = None,
    max_running: Annotated[
        int | None, _option("--max-running", "Most sequences computed together [64].")
    ] = None,
    max_step_tokens: Annotated[
        int | None, _option("--max-step-tokens", "Most tokens in one step [256].")
    ] = None,
    max_context: Annotated[
        int | None, _option("--max-context", "Longest prompt and answer together, in tokens.")
    ] = None,
    max_queue: Annotated[
        int | None, _option("--max-queue", "Choices that may wait; more get 503 [512].")
    ] = None,
    chat_template: Annotated[
        str | None, _option("--chat-template", "Jinja file in place of the model's own.", "FILE")
    ] = None,
    drain_timeout: Annotated[
        float | None,
        _option("--drain-timeout", "Seconds running requests get after SIGTERM [30].", "SECONDS"),
    ] = None,
    log_level: Annotated[
        str | None, _option("--log-level", "debug, info, warning or error [info].")
    ] = None,
    assignments: SetOption = None,
) -> None:
    """Serve a model over an OpenAI-compatible API.

    The first SIGTERM or Ctrl-C lets running requests finish, the second ends them at once.
    """
    loaded = read_settings(
        {
            "engine.model": ("MODEL", model),
            "server.host": ("--host", host),
            "server.port": ("--port", port),
            "server.api_keys": ("--api-key", api_key),
            "engine.served_name": ("--served-name", served_name),
            "engine.dtype": ("--dtype", dtype),
            "engine.device": ("--device", device),
            "engine.threads": ("--threads", threads),
            "engine.kv_memory": ("--kv-memory", kv_memory),
            "engine.max_running": ("--max-running", max_running),
            "engine.max_step_tokens": ("--max-step-tokens", max_step_tokens),
            "engine.max_context": ("--max-context", max_context),
            "limits.max_queue": ("--max-queue", max_queue),
            "engine.chat_template": ("--chat-template", chat_template),
            "server.drain_timeout": ("--drain-timeout", drain_timeout),
            "log.level": ("--log-level", log_level),
        },
        config,
        assignments,
    )
    if missing := missing_packages():
        fail(
            f"the engine is not installed ({', '.join(missing)} missing); install it with:"
            " pip install 'headrace[engine]'"
        )
    _check_template(loaded)
    from headrace.cli import server  # noqa: PLC0415 - brings FastAPI and uvicorn
    from headrace.engine.models import store  # noqa: PLC0415

    source = store.resolve(loaded.settings.engine.model)
    try:
        sock = server.bind(loaded.settings.server.host, loaded.settings.server.port)
    except server.CannotListen as error:
        fail(str(error))
    status = server.run_embedded(loaded, source, sock, sys.stderr)
    if status:
        raise typer.Exit(status)


def missing_packages() -> list[str]:
    """Packages of the engine extra that are not installed; none is imported to find out."""
    return [name for name in _ENGINE_PACKAGES if importlib.util.find_spec(name) is None]


def _check_template(loaded: LoadedSettings) -> None:
    template = loaded.settings.engine.chat_template
    if template is None:
        return
    try:
        template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        fail(
            f"engine.chat_template ({loaded.origin('engine.chat_template')}): {template} cannot"
            f" be read: {reason}"
        )
