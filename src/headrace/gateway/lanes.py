"""The backends, each behind its scheduler, and which of them serves a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from headrace.backends.base import Backend, ModelCard
from headrace.core.clock import Clock
from headrace.core.errors import BackendUnavailable, ModelNotFound
from headrace.core.health import Health, State
from headrace.gateway.control import Control
from headrace.gateway.tuning import Tuning
from headrace.scheduling import Scheduler
from headrace.telemetry import Metrics

__all__ = ["Lane", "Lanes"]

_RETRY_S = {State.STARTING: 5.0, State.RESTARTING: 2.0, State.FAILED: 60.0, State.CLOSED: 60.0}
_SHOWN_NAME = 64


@dataclass(frozen=True, slots=True)
class Lane:
    """One backend and the queue before it."""

    backend: Backend
    scheduler: Scheduler
    control: Control

    @classmethod
    def before(cls, backend: Backend, tuning: Tuning, *, clock: Clock, rng: random.Random) -> Lane:
        control = Control(backend, tuning, clock=clock, rng=rng)
        return cls(backend, control.scheduler, control)

    def require_ready(self) -> None:
        """Raises BackendUnavailable unless the backend takes requests now."""
        state = self.backend.health().state
        if state is not State.READY:
            raise BackendUnavailable(
                f"The model is not available now ({state.value}). Please retry later.",
                retry_after_s=_RETRY_S[state],
            )
        self.control.require_capacity()

    def observe(self, metrics: Metrics, wall: float) -> None:
        """Sets the gauges. What is admitted is known here, what of it runs only to the backend."""
        cards = self.backend.models
        if not cards:
            return
        load, queue = self.backend.load(), self.scheduler.stats()
        running = min(load.running, queue.dispatched)
        engine = metrics.engine(cards[0].id)
        engine.set_load(running, queue.dispatched - running + queue.waiting, load.kv_usage, wall)
        if load.kv_blocks:
            engine.set_cache_shape(load.block_size, load.kv_blocks)
        self.control.observe(metrics.scheduling(cards[0].id))


class Lanes:
    """All backends. Models are looked up in what they list, and nowhere else."""

    def __init__(
        self,
        backends: Sequence[Backend],
        tuning: Tuning,
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        if not backends:
            raise ValueError("a gateway needs a backend")
        self._lanes = tuple(Lane.before(b, tuning, clock=clock, rng=rng) for b in backends)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def cards(self) -> tuple[ModelCard, ...]:
        """Each served model once."""
        cards: dict[str, ModelCard] = {}
        for lane in self._lanes:
            for card in lane.backend.models:
                cards.setdefault(card.id, card)
        return tuple(cards.values())

    def route(self, name: str, allowed: Callable[[str], bool]) -> tuple[Lane, ModelCard]:
        """The first backend that is ready for the model, or else the first that has it. A model
        that is not allowed is as unknown as one that does not exist."""
        found = [
            (lane, card)
            for lane in self._lanes
            for card in lane.backend.models
            if card.id == name and allowed(name)
        ]
        if not found:
            self._refuse(name)
        ready = (entry for entry in found if entry[0].backend.health().state is State.READY)
        return next(ready, found[0])

    def health(self) -> Health:
        """READY as soon as one backend is; otherwise the first one's troubles."""
        healths = [lane.backend.health() for lane in self._lanes]
        return next((health for health in healths if health.state is State.READY), healths[0])

    def _refuse(self, name: str) -> NoReturn:
        if any(not lane.backend.models for lane in self._lanes):
            raise BackendUnavailable(
                "The server is starting and does not know its models yet. Please retry later.",
                retry_after_s=_RETRY_S[State.STARTING],
            )
        raise ModelNotFound(
            f"The model `{_shown(name)}` does not exist. GET /v1/models lists those that do.",
            param="model",
        )


def _shown(name: str) -> str:
    """A caller's word, short and printable."""
    short = name if len(name) <= _SHOWN_NAME else name[:_SHOWN_NAME] + "..."
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in short)
