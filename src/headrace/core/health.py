"""How a backend is: the steps of starting up, and whether it takes requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Health", "Stage", "StageProgress", "State"]


class Stage(StrEnum):
    """Steps of starting up, in order."""

    RESOLVE = "resolve"
    DOWNLOAD = "download"
    LOAD_WEIGHTS = "load_weights"
    RESERVE_KV = "reserve_kv"
    WARM_UP = "warm_up"
    LISTENING = "listening"


@dataclass(frozen=True, slots=True)
class StageProgress:
    """`fraction` in 0..1, `seconds` spent in this stage so far."""

    stage: Stage
    fraction: float
    seconds: float
    detail: str = ""


class State(StrEnum):
    """A backend's life; only READY takes requests."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Health:
    """Only READY takes requests. `detail` says why not, in words for an operator."""

    state: State
    detail: str = ""
    progress: tuple[StageProgress, ...] = field(default=())
