"""How the semantic tier comes to know questions: from this server, from others, from before."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from headrace.caching.semantic.base import Embedder, EmbeddingFailedError
from headrace.caching.semantic.questions import Asked, Questions, Stored
from headrace.core.clock import Clock

if TYPE_CHECKING:
    from headrace.caching.semantic.journal import Journal

__all__ = ["Learned", "Learner"]

_BATCH = 16
_MOST_WAITING = 2_048
_RETRY_S = 10.0

_log = logging.getLogger(__name__)


class Learned(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `text` is stored under `key` until `expires`, in Unix time."""

    partition: bytes
    text: str
    key: bytes
    expires: float


_reader = msgspec.msgpack.Decoder(Learned)


class Learner:
    """One task: loads the embedder, as often as it takes, recalls what the journal has, then
    learns what comes. `questions` is None until it is of use. Event loop only."""

    def __init__(
        self,
        embedder: Embedder,
        understand: Callable[[bytes, str], Asked],
        *,
        most: int,
        clock: Clock,
        journal: Journal | None,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self.questions: Questions | None = None
        self.learned = 0
        self.given_up = 0
        self._embedder = embedder
        self._understand = understand
        self._most = most
        self._clock = clock
        self._journal = journal
        self._sleep = sleep
        self._waiting: deque[Learned] = deque()
        self._news = asyncio.Event()
        self._told = False

    def add(self, learned: Learned) -> None:
        """In its turn; given up where too many wait."""
        if len(self._waiting) >= _MOST_WAITING:
            self.given_up += 1
            return
        self._waiting.append(learned)
        self._news.set()

    def hear(self, message: bytes) -> None:
        """What another replica has learnt, or this one itself."""
        with suppress(msgspec.MsgspecError):
            learned = _reader.decode(message)
            if self.questions is None or learned.key not in self.questions:
                self.add(learned)

    async def run(self) -> None:
        """Until it is cancelled."""
        questions = await self._ready()
        if self._journal is not None:
            async for page in self._journal.questions():
                await self._learn(questions, [Learned(*row) for row in page])
        while True:
            await self._news.wait()
            while self._waiting:
                size = min(_BATCH, len(self._waiting))
                await self._learn(questions, [self._waiting.popleft() for _ in range(size)])
            self._news.clear()

    async def _ready(self) -> Questions:
        while True:
            try:
                await self._embedder.start()
                break
            except EmbeddingFailedError as error:
                if not self._told:
                    _log.warning("nothing is found by meaning yet: %s", error)
                self._told = True
                await self._sleep(_RETRY_S)
        if self._told:
            _log.info("the embedder %s is there now", self._embedder.id)
        self.questions = Questions(self._embedder.dimensions, self._most)
        return self.questions

    async def _learn(self, questions: Questions, batch: Sequence[Learned]) -> None:
        try:
            self.learned += await self._add(questions, batch)
        except EmbeddingFailedError:
            self.given_up += len(batch)
        except Exception as error:  # noqa: BLE001 - one text must not end all learning
            self.given_up += len(batch)
            frames = "".join(traceback.format_tb(error.__traceback__))
            _log.error("a question could not be learnt: %s\n%s", type(error).__name__, frames)

    async def _add(self, questions: Questions, batch: Sequence[Learned]) -> int:
        now = self._clock.wall()
        new: list[Stored] = []
        for learned in batch:
            asked = self._understand(learned.partition, learned.text)
            if asked.prepared.unfit is None and learned.expires > now:
                new.append(Stored(asked, learned.key, learned.expires))
        if new:
            vectors = await self._embedder.embed([stored.question.text for stored in new])
            for stored, vector in zip(new, vectors, strict=True):
                await questions.add(stored, vector)
        return len(new)
