"""Settings: command-line flags > environment > TOML file > defaults, each value with its origin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

__all__ = [
    "CorsSettings",
    "EngineSettings",
    "LimitSettings",
    "LogSettings",
    "ServerSettings",
    "Settings",
]

Seconds = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CorsSettings(_Section):
    """Which browser origins may call. `*` allows any, and never with credentials."""

    origins: tuple[str, ...] = ("*",)
    credentials: bool = False


class ServerSettings(_Section):
    """The HTTP edge. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_keys: tuple[SecretStr, ...] = ()
    metrics_need_key: bool = False
    cors: CorsSettings = CorsSettings()
    max_body_bytes: Annotated[int, Field(gt=0)] = 8 * 1024 * 1024
    body_timeout: Seconds = 30.0
    idle_timeout: Seconds = 120.0
    """An idle HTTP connection is kept this long; longer than usual client pools keep theirs."""
    sse_keep_alive: Seconds = 15.0
    """A stream with nothing to say sends a comment this often."""
    stalled_reader_timeout: Seconds = 60.0
    """A client that reads nothing for this long is dropped."""
    drain_timeout: Annotated[float, Field(ge=0)] = 30.0
    """After SIGTERM running requests may finish for this long."""


class EngineSettings(_Section):
    """The embedded engine."""

    model: str = "smollm2-135m-instruct"
    served_name: str | None = None
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1)] | None = None
    kv_memory: Annotated[int, Field(gt=0)] | None = None
    """Bytes for the KV cache; from free memory where absent."""
    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    max_running: Annotated[int, Field(ge=1)] = 64
    max_step_tokens: Annotated[int, Field(ge=1)] = 256
    max_context: Annotated[int, Field(ge=2)] | None = None
    prefix_cache: bool = True
    chat_template: Path | None = None
    hang_timeout: Seconds = 10.0
    """An engine that is silent for this long is taken for hung and restarted."""


class LimitSettings(_Section):
    """What one server takes on."""

    max_queue: Annotated[int, Field(ge=0)] = 512
    """Choices waiting beyond those running; the next one is refused with 503."""
    max_choices: Annotated[int, Field(ge=1)] = 16
    """Largest `n`."""
    max_prompts: Annotated[int, Field(ge=1)] = 64
    """Most prompts in one /v1/completions call."""


class LogSettings(_Section):
    """Logging. Prompts and answers are never logged."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    json_lines: bool = False


class Settings(_Section):
    """All settings of a server."""

    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
