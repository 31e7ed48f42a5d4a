"""Several prompts of one call, as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import cast

from headrace.core.events import CacheNote, Delta, Event, Finish, Start, Timings, Usage

__all__ = ["closing", "merge"]

_FAVOUR = ("hit", "coalesced", "miss", "bypass")
_HELD = 64
"""With more events than this not yet taken by the reader, the prompts wait."""


def closing(events: AsyncIterator[Event]) -> aclosing[AsyncGenerator[Event]]:
    """Closes the stream on the way out, which cancels the work. Events come from generators."""
    return aclosing(cast("AsyncGenerator[Event]", events))


async def merge(
    streams: Sequence[AsyncIterator[Event]], choices_each: int
) -> AsyncGenerator[Event]:
    """The events of all streams as they come, choice i of stream p under index p * n + i.

    The one Start comes when every prompt has started, so that a refusal of any of them is still a
    status; the one Usage, with the sums, when all are done. A failure of one ends them all.
    """
    inbox = _Inbox()
    tasks = [asyncio.create_task(inbox.fill(i, stream)) for i, stream in enumerate(streams)]
    try:
        starts: list[Start] = []
        usages: list[Usage] = []
        held: list[Event] = []
        ended = 0
        while ended < len(streams):
            number, item = await inbox.take()
            if item is None:
                ended += 1
            elif isinstance(item, Exception):
                raise item
            elif isinstance(item, Start):
                starts.append(item)
                if len(starts) == len(streams):
                    yield _joint_start(starts)
                    for event in held:
                        yield event
                    inbox.bound()
            elif isinstance(item, Usage):
                usages.append(item)
            else:
                event = _moved(item, number * choices_each)
                if len(starts) == len(streams):
                    yield event
                else:
                    held.append(event)
        if len(usages) == len(streams):
            yield _joint_usage(usages)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Inbox:
    """Events of many streams in one queue, each with its stream's number, then None or an error.

    Unbounded at first: a prompt that runs must not be held up, and hold up others, while one
    still waits for its place. What comes until then is bounded by the prompts' own limits.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._bounded = False

    def bound(self) -> None:
        self._bounded = True

    async def fill(self, number: int, stream: AsyncIterator[Event]) -> None:
        end: Exception | None = None
        try:
            async with closing(stream) as events:
                async for event in events:
                    await self._room.wait()
                    self._queue.put_nowait((number, event))
                    if self._bounded and self._queue.qsize() >= _HELD:
                        self._room.clear()
        except Exception as error:  # noqa: BLE001  # raised again where the reader is
            end = error
        self._queue.put_nowait((number, end))

    async def take(self) -> tuple[int, Event | Exception | None]:
        item = await self._queue.get()
        if self._queue.qsize() < _HELD:
            self._room.set()
        return item


def _moved(event: Delta | Finish, by: int) -> Delta | Finish:
    if isinstance(event, Finish):
        return Finish(event.index + by, event.reason, event.stop)
    index = event.index + by
    return Delta(index, event.text, event.token_ids, event.logprobs, event.prompt)


def _joint_start(starts: Sequence[Start]) -> Start:
    return Start(
        model=starts[0].model,
        backend=starts[0].backend,
        prompt_tokens=sum(start.prompt_tokens for start in starts),
        cached_tokens=sum(start.cached_tokens for start in starts),
        cache=_joint_note([start.cache for start in starts]),
        queue_s=_last(start.queue_s for start in starts),
    )


def _joint_note(notes: Sequence[CacheNote | None]) -> CacheNote | None:
    """The least favourable one: a call is a hit only if each of its prompts is."""
    known = [note for note in notes if note is not None]
    if len(known) < len(notes):
        return None
    return max(known, key=lambda note: _FAVOUR.index(note.status))


def _joint_usage(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        timings=_joint_timings([usage.timings for usage in usages]),
    )


def _joint_timings(each: Sequence[Timings | None]) -> Timings | None:
    """The call's own: until the last of its prompts had its turn, from there until the last one
    had its first token, from there until the last one was done. The parts add up as each one's do,
    and the first agrees with the joint Start."""
    known = [t for t in each if t is not None]
    if not known:
        return None
    turn = _last(t.queue_s for t in known)
    token = _last(_sum(t.queue_s, t.prefill_s) for t in known if t.prefill_s is not None)
    done = _last(_sum(t.queue_s, t.prefill_s, t.decode_s) for t in known if t.decode_s is not None)
    return Timings(
        queue_s=turn,
        prefill_s=_between(turn, token),
        decode_s=_between(_last((turn, token)), done),
        total_s=max(t.total_s for t in known),
    )


def _last(times: Iterable[float | None]) -> float | None:
    return max((at for at in times if at is not None), default=None)


def _sum(*parts: float | None) -> float:
    return sum(part or 0.0 for part in parts)


def _between(start: float | None, end: float | None) -> float | None:
    return None if end is None else max(end - (start or 0.0), 0.0)
