"""What may be stored and reused, and what a caller may ask of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from headrace.core.events import Event, Finish, FinishReason
from headrace.core.request import Request

__all__ = ["NO_CONTROLS", "CachePolicy", "Controls", "Determinism", "Mode", "determinism"]

Mode = Literal["off", "exact", "semantic"]
Coalesce = Literal["deterministic", "all", "off"]


class Determinism(Enum):
    """Whether the same request has the same answer again."""

    GREEDY = "greedy"
    SEEDED = "seeded"
    SAMPLED = "sampled"


def determinism(request: Request) -> Determinism:
    """By what the request says with its defaults filled in: an omitted temperature is the model's
    own, not 0."""
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.top_k == 1:
        return Determinism.GREEDY
    return Determinism.SAMPLED if sampling.seed is None else Determinism.SEEDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """What one caller asks of the cache, by HTTP's Cache-Control (RFC 9111) and headers of ours.

    `no_store`: neither kept nor joined. `no_cache`: computed anew, and what is kept is replaced.
    `max_age_s`: no entry older than this. `only_if_cached`: no computing. `ttl_s`: how long the
    answer is kept, at most as long as by default. `namespace` keeps entries apart. `mode` None
    allows what the operator allows. `min_similarity` may only raise the operator's bar. By `tags`
    the answer can be forgotten.
    """

    no_store: bool = False
    no_cache: bool = False
    max_age_s: float | None = None
    only_if_cached: bool = False
    ttl_s: float | None = None
    namespace: str = ""
    mode: Mode | None = None
    min_similarity: float | None = None
    tags: tuple[str, ...] = ()


NO_CONTROLS = Controls()


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """What the operator allows. `ttl_s` is absolute and the most a caller can ask for. `samples`:
    so many answers of a sampled request are kept and one of them served, 0 keeps none. `coalesce`:
    which concurrent twins share one generation; for one of another replica a request waits up to
    `twin_wait_s`. `tool_calls`: whether answers that call tools are kept."""

    ttl_s: float = 86_400.0
    samples: int = 0
    coalesce: Coalesce = "deterministic"
    twin_wait_s: float = 5.0
    tool_calls: bool = False

    def storable(self, request: Request) -> bool:
        return determinism(request) is not Determinism.SAMPLED or self.samples > 0

    def shareable(self, request: Request) -> bool:
        """Whether twins that are there at once may get one answer."""
        if self.coalesce == "deterministic":
            return determinism(request) is not Determinism.SAMPLED
        return self.coalesce == "all"

    def keeps(self, event: Event) -> bool:
        """False for an event whose answer is not to be kept."""
        if not isinstance(event, Finish):
            return True
        if event.reason is FinishReason.TOOL_CALLS:
            return self.tool_calls
        return event.reason is not FinishReason.CONTENT_FILTER
