"""A complete answer as it is kept, the same bytes in memory, on disk and in Redis."""

from __future__ import annotations

import zlib

import msgspec

from headrace.core.events import Delta, Event, Finish, Start, Usage

__all__ = ["CorruptEntryError", "Entry", "entry_of", "pack", "unpack"]

_VERSION = 2
_COMPRESSED_ABOVE = 2048
_LONGEST_PIECE = 512
"""Characters of one replayed delta, about: fewer and longer pieces than the model gave them in."""

_events = msgspec.msgpack.Encoder()
_read_events = msgspec.msgpack.Decoder(tuple[Event, ...])


class CorruptEntryError(Exception):
    """These bytes are not an entry of this version."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One answer. Times are Unix seconds; `expires` is absolute and never moved by a hit.

    `log` is the encoded stream, deflated if `deflated`. `saved_s` is what computing it took, from
    its turn to its end. `tags` are names by which it may be forgotten, with what their counters
    were then.
    """

    log: bytes
    deflated: bool
    created: float
    expires: float
    saved_s: float
    prompt_tokens: int
    completion_tokens: int
    tags: tuple[tuple[str, int], ...] = ()

    def events(self) -> tuple[Event, ...]:
        """The stream, from Start to Usage. Raises CorruptEntryError."""
        try:
            return _read_events.decode(zlib.decompress(self.log) if self.deflated else self.log)
        except (zlib.error, msgspec.MsgspecError) as error:
            raise CorruptEntryError(str(error)) from None

    @property
    def size(self) -> int:
        """Bytes it takes, without the container's own."""
        return len(self.log)


_packer = msgspec.msgpack.Encoder()
_unpacker = msgspec.msgpack.Decoder(tuple[int, Entry])


def pack(entry: Entry) -> bytes:
    """For a tier that stores bytes."""
    return _packer.encode((_VERSION, entry))


def unpack(data: bytes) -> Entry:
    """Raises CorruptEntryError for anything that `pack` of this version did not write."""
    try:
        version, entry = _unpacker.decode(data)
    except msgspec.MsgspecError as error:
        raise CorruptEntryError(str(error)) from None
    if version != _VERSION:
        raise CorruptEntryError(f"version {version}")
    return entry


def entry_of(
    events: list[Event],
    *,
    created: float,
    ttl_s: float,
    saved_s: float,
    tags: tuple[tuple[str, int], ...] = (),
) -> Entry | None:
    """The entry of a whole stream, or None unless it is one: Start first, each choice that spoke
    finished exactly once and silent after, Usage last."""
    if len(events) < 2 or not isinstance(events[0], Start):
        return None
    usage = events[-1]
    if not isinstance(usage, Usage):
        return None
    merged = _merged(events)
    if merged is None:
        return None
    log = _events.encode((*merged, usage))
    deflated = len(log) > _COMPRESSED_ABOVE
    return Entry(
        log=zlib.compress(log, 1) if deflated else log,
        deflated=deflated,
        created=created,
        expires=created + ttl_s,
        saved_s=saved_s,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        tags=tags,
    )


def _merged(events: list[Event]) -> list[Event] | None:
    """Choice after choice, with short deltas joined."""
    choices: dict[int, list[Event]] = {}
    finished: set[int] = set()
    for event in events[1:-1]:
        if not isinstance(event, Delta | Finish) or event.index in finished:
            return None
        told = choices.setdefault(event.index, [])
        if isinstance(event, Finish):
            finished.add(event.index)
        elif told and isinstance(told[-1], Delta) and _joinable(told[-1], event):
            told[-1] = _joined(told[-1], event)
            continue
        told.append(event)
    if not finished or finished != choices.keys():
        return None
    return [events[0], *(event for index in sorted(choices) for event in choices[index])]


def _joinable(a: Delta, b: Delta) -> bool:
    return (
        a.prompt == b.prompt
        and (a.logprobs is None) == (b.logprobs is None)
        and len(a.text) < _LONGEST_PIECE
    )


def _joined(a: Delta, b: Delta) -> Delta:
    logprobs = None if a.logprobs is None else a.logprobs + (b.logprobs or ())
    return Delta(a.index, a.text + b.text, a.token_ids + b.token_ids, logprobs, a.prompt)
