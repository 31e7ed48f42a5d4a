"""What can be set, with defaults and limits. `headrace.config_loading` fills it from its sources.

The docstring below a field is its line in docs/configuration.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

__all__ = [
    "TENANT_NAME",
    "CachingSettings",
    "CorsSettings",
    "DiskCacheSettings",
    "EmbeddingSettings",
    "EngineSettings",
    "KeySettings",
    "LimitSettings",
    "LogSettings",
    "RedisCacheSettings",
    "SchedulingSettings",
    "SemanticCacheSettings",
    "ServerSettings",
    "Settings",
    "TenantSettings",
    "format_size",
    "parse_size",
]

_LEAST_SECRET = 16
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b?)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: object) -> object:
    """Bytes from "2GiB", "512 MB" or "1048576"; anything but a string is passed on as it is."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError('write a size as bytes or like "512MiB", "2GiB", "1.5GB"')
    base = 1024 if match[3] else 1000
    return round(float(match[1]) * base ** _POWERS[(match[2] or "").lower()])


def format_size(size: int) -> str:
    """A size for people: "1.5 GiB"."""
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if amount >= 100 or unit == "B" else f"{amount:.1f} {unit}"


def _usable_key(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("an API key is one or more visible ASCII characters without spaces")
    return key


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
ApiKey = Annotated[SecretStr, AfterValidator(_usable_key)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CorsSettings(_Section):
    """Which browser origins may call."""

    origins: tuple[str, ...] = ("*",)
    """Origins such as `https://app.example.org`; `*` allows any, and never with credentials."""
    credentials: bool = False
    """Whether browsers may send cookies; needs `origins` to be listed one by one."""

    @model_validator(mode="after")
    def _no_credentials_for_all(self) -> CorsSettings:
        if self.credentials and "*" in self.origins:
            raise ValueError("credentials cannot be combined with the origin *; list the origins")
        return self


class ServerSettings(_Section):
    """The HTTP edge. Times in seconds, sizes in bytes."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for every interface."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one, which the banner names."""
    api_keys: tuple[ApiKey, ...] = ()
    """Keys that open the API (`Authorization: Bearer KEY`); without any it is open to all."""
    metrics_need_key: bool = False
    """Whether /metrics asks for a key too."""
    cors: CorsSettings = CorsSettings()
    max_body_bytes: Size = 8 * 1024 * 1024
    """Largest request body."""
    body_timeout: Seconds = 30.0
    """A request body must have arrived after this long."""
    idle_timeout: Seconds = 120.0
    """An idle HTTP connection is kept this long; longer than usual client pools keep theirs."""
    sse_keep_alive: Seconds = 15.0
    """A stream with nothing to say sends a comment this often."""
    stalled_reader_timeout: Seconds = 60.0
    """A client that reads nothing for this long is dropped."""
    drain_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """After SIGTERM running requests may finish for this long."""


class EngineSettings(_Section):
    """The embedded engine."""

    model: Annotated[str, Field(min_length=1)] = "smollm2-135m-instruct"
    """A short name, a folder with safetensors, a .gguf file, or a hub id `org/name`."""
    served_name: Annotated[str, Field(min_length=1)] | None = None
    """The model's name in the API; from `model` where absent."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the weights; auto is bf16 where the device computes in it, else fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes a GPU if there is one."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads; one for each core where absent."""
    kernels: Literal["auto", "native", "reference"] = "auto"
    """What computes around the matrix products: native kernels, compiled on the first start by
    this machine's C compiler (fp32 on CPU), or plain PyTorch; auto takes native ones if it can."""
    kv_memory: Size | None = None
    """Bytes for the KV cache; from free memory where absent."""
    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Tokens in one KV block."""
    max_running: Annotated[int, Field(ge=1)] = 64
    """Most sequences computed together."""
    max_step_tokens: Annotated[int, Field(ge=1)] = 256
    """Most tokens computed in one step."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt and answer together, in tokens; the model's own limit where absent."""
    prefix_cache: bool = True
    """Whether equal beginnings of prompts are computed once."""
    chat_template: Path | None = None
    """A Jinja file in place of the model's own chat template."""
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


ClassName = Literal["system", "interactive", "standard", "batch"]
Target = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_URGENCY = get_args(ClassName)
TENANT_NAME = r"[A-Za-z0-9._:@-]{1,64}"
"""What tenants may be called: no slash, which parts a sub-tenant from its tenant."""


class TenantSettings(_Section):
    """One [[tenants]] table: a party whose requests are kept apart from those of others."""

    name: Annotated[str, Field(pattern=f"^{TENANT_NAME}$")]
    """Letters, digits and . _ : @ -; `default` is everybody where there are no keys."""
    api_keys: tuple[ApiKey, ...] = ()
    """Its keys; `headrace keys create` makes more."""
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0
    """Its share of the server where several have work waiting."""
    default_class: ClassName = "standard"
    """The priority class of requests that do not ask for one."""
    highest_class: ClassName = "interactive"
    """The most urgent class that it may ask for."""
    requests_per_minute: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Most requests a minute; a minute's worth may come at once."""
    tokens_per_minute: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Most tokens a minute, of prompts and answers."""
    max_concurrency: Annotated[int, Field(ge=1)] | None = None
    """Most choices at once, queued ones included."""
    models: tuple[str, ...] = ()
    """The models it may use; all where none is named."""
    trusted: bool = False
    """Whether it may speak for sub-tenants (x-gateway-inference-fairness-id)."""
    admin: bool = False
    """Whether it sees the whole queue and may change how it is scheduled."""

    @model_validator(mode="after")
    def _ordered(self) -> TenantSettings:
        if _URGENCY.index(self.highest_class) > _URGENCY.index(self.default_class):
            raise ValueError(
                f"tenant {self.name}: highest_class must not be less urgent than default_class"
            )
        return self


class KeySettings(_Section):
    """Keys made by `headrace keys`."""

    store: Path | None = None
    """The file they are kept in; keys.sqlite in the user's state folder where absent. While it is
    there but cannot be read, nobody gets in without a key."""

    @property
    def file(self) -> Path:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return self.store or Path(base) / "headrace" / "keys.sqlite"


class SchedulingSettings(_Section):
    """Order and admission; changed while running by PATCH /scheduler/config. Times in seconds."""

    itl_target: Target | None = None
    """Longest gap between the tokens of a stream (p99); from the machine's speed where absent."""
    auto_targets: bool = True
    """Whether the targets below are raised to what this machine needs to serve a full batch."""
    system_ttft: Target = 1.0
    """Target for the time to the first token, as for the other classes below."""
    interactive_ttft: Target = 2.0
    """A request that would wait longer than its class's target is refused with 503."""
    standard_ttft: Target = 5.0
    """The class of requests that ask for none."""
    batch_ttft: Target = 60.0
    """Work that nobody waits for."""
    preemption: bool = True
    """Whether running work gives way where a more urgent class would miss its target."""


class DiskCacheSettings(_Section):
    """Answers that survive a restart, below those in memory."""

    folder: Path | None = None
    """Where answers are kept on disk; nowhere where absent. Only its owner can read them."""
    size: Size = 1024 * 1024 * 1024
    """Bytes on disk for answers."""


class RedisCacheSettings(_Section):
    """Answers shared with other servers, and what they tell each other, in Redis or Valkey."""

    url: SecretStr | None = None
    """Such as redis://user:password@host:6379/0, rediss:// for TLS, unix:///path. Needs
    caching.secret."""
    prefix: Annotated[str, Field(min_length=1, max_length=64)] = "headrace:"
    """What all keys in Redis begin with."""
    timeout: Annotated[float, Field(ge=0.005, le=5)] = 0.05
    """How long a request waits for Redis at most; slower is a miss."""

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(_REDIS_SCHEMES):
            raise ValueError(f"a URL that begins with one of {', '.join(_REDIS_SCHEMES)}")
        return url


class SemanticCacheSettings(_Section):
    """Answers to questions that mean the same; see docs/caching.md before you switch it on."""

    enabled: bool = False
    """Whether answers are found by meaning at all."""
    models: tuple[str, ...] = ("*",)
    """Models whose answers are; "*" is all."""
    tenants: tuple[str, ...] = ("*",)
    """Tenants whose requests are; "*" is all."""
    delta: Annotated[float, Field(gt=0, le=0.2)] = 0.01
    """Share of wrong answers among those found by meaning that is put up with."""
    embedder: Literal["wordllama", "minilm", "endpoint"] = "wordllama"
    """What turns questions into vectors: two that come with the extra `semantic`, or a server."""
    endpoint_url: str | None = None
    """Of an OpenAI-compatible server, such as https://host/v1, for the embedder `endpoint`."""
    endpoint_model: str = "text-embedding-3-small"
    """Its embedding model."""
    endpoint_dimensions: Annotated[int | None, Field(ge=2, le=8192)] = None
    """Length of the vectors asked for, where that model can shorten them."""
    endpoint_api_key: SecretStr | None = None
    """Its key."""
    deadline: Annotated[float, Field(ge=0.001, le=5)] = 0.05
    """Seconds that a look-up may take; later is a miss."""
    questions: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    """So many stored questions are compared with at most."""
    judge_model: str | None = None
    """A model served here, and able to judge, that is asked off the request path whether unsure
    pairs of questions are the same and whether a sample of what was found was right."""
    judge_calls: Annotated[float, Field(gt=0, le=10_000)] = 30
    """Calls of the judge a minute at most."""
    judge_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the answers found by meaning that is judged."""

    @model_validator(mode="after")
    def _has_an_endpoint(self) -> SemanticCacheSettings:
        if self.embedder == "endpoint" and self.endpoint_url is None:
            raise ValueError("the embedder 'endpoint' needs endpoint_url")
        return self


class CachingSettings(_Section):
    """Answers kept for the next one who asks the same; see docs/caching.md. Times in seconds."""

    enabled: bool = True
    """Whether complete answers of greedy and seeded requests are kept and shared."""
    memory: Size = 64 * 1024 * 1024
    """Bytes of this process's memory for answers."""
    ttl: Seconds = 86_400.0
    """How long an answer is kept, from when it was computed; a caller may only ask for less."""
    samples: Annotated[int, Field(ge=0, le=64)] = 0
    """Of a request whose answer is drawn by chance so many answers are kept and one of them is
    given; 0 keeps none."""
    coalesce: Literal["deterministic", "all", "off"] = "deterministic"
    """Which requests share one generation with an equal one that is under way: greedy and seeded
    ones, those drawn by chance too, or none."""
    tool_calls: bool = False
    """Whether answers that call tools are kept."""
    secret: SecretStr | None = None
    """What the names of entries are made with; 16 characters or more, the same for all servers
    that share a Redis. Made and kept in caching.disk.folder where absent."""
    disk: DiskCacheSettings = DiskCacheSettings()
    redis: RedisCacheSettings = RedisCacheSettings()
    semantic: SemanticCacheSettings = SemanticCacheSettings()

    @field_validator("secret")
    @classmethod
    def _long_enough(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value().encode()) < _LEAST_SECRET:
            raise ValueError(f"a secret of at least {_LEAST_SECRET} characters")
        return secret

    @model_validator(mode="after")
    def _secret_is_shared(self) -> CachingSettings:
        if self.redis.url is not None and self.secret is None:
            raise ValueError(
                "servers that share a Redis need one secret: set caching.secret to the same"
                " text of 16 characters or more on each"
            )
        return self


class EmbeddingSettings(_Section):
    """Models that turn texts into vectors, for /v1/embeddings. They need the extra `semantic`."""

    models: tuple[Literal["wordllama", "minilm"], ...] = ()
    """Those that are served, by their names."""


class LogSettings(_Section):
    """Logging. Prompts and answers are never logged."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    json_lines: bool = False
    """One JSON object a line instead of text."""


class Settings(_Section):
    """All settings of a server."""

    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    limits: LimitSettings = LimitSettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    caching: CachingSettings = CachingSettings()
    embeddings: EmbeddingSettings = EmbeddingSettings()
    keys: KeySettings = KeySettings()
    tenants: tuple[TenantSettings, ...] = ()
    """Tables of their own, [[tenants]] each; see docs/scheduling.md."""
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _tenants_apart(self) -> Settings:
        names = [tenant.name for tenant in self.tenants]
        keys = [key.get_secret_value() for key in self.server.api_keys]
        numbered = {f"key-{i}" for i in range(1, len(keys) + 1)}
        for tenant in self.tenants:
            if tenant.name in numbered:
                raise ValueError(
                    f"tenants: {tenant.name} is what server.api_keys calls a tenant of its own;"
                    " choose another name"
                )
            if names.count(tenant.name) > 1:
                raise ValueError(f"tenants: there are two named {tenant.name}")
            keys += [key.get_secret_value() for key in tenant.api_keys]
        if len(set(keys)) < len(keys):
            raise ValueError("tenants: an API key belongs to two, or is listed twice")
        return self
