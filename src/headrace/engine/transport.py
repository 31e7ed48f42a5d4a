"""Length-prefixed msgpack frames over a socket pair: blocking in the engine, asyncio in the front.

A frame is four bytes of little-endian length and one message. Nothing is queued on the receiving
side: every message is handled as it is read, so a peer that falls behind fills the socket and its
partner waits.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

import msgspec

from headrace.engine.wire import EngineConfig, EngineMessage, FrontMessage

__all__ = ["ChannelClosed", "EngineChannel", "FrameDecoder", "FrontChannel", "encode_frame"]

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_MAX_FRAME = 256 * 1024 * 1024
_READ_SIZE = 256 * 1024
_encoder = msgspec.msgpack.Encoder()


class ChannelClosed(Exception):
    """The other side is gone."""


def encode_frame(message: object) -> bytearray:
    """One message as its frame. Safe from any thread."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    size = len(frame) - _LENGTH.size
    if size > _MAX_FRAME:
        raise ValueError(f"a message of {size} bytes does not fit a frame")
    _LENGTH.pack_into(frame, 0, size)
    return frame


class FrameDecoder(Generic[T]):
    """Turns a byte stream back into messages; keeps at most one unfinished frame."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The messages completed by `data`. Raises ChannelClosed on bytes that are no frame."""
        buffer = self._buffer
        buffer += data
        messages: list[T] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, start)
            if size > _MAX_FRAME:
                raise ChannelClosed("the frame is too large")
            end = start + _LENGTH.size + size
            if len(buffer) < end:
                break
            try:
                message = self._decoder.decode(bytes(buffer[start + _LENGTH.size : end]))
            except msgspec.DecodeError as error:
                raise ChannelClosed(f"the frame does not decode: {error}") from error
            messages.append(cast("T", message))
            start = end
        if start:
            del buffer[:start]
        return messages


class EngineChannel:
    """The engine's end. `send` from any thread, the rest from the loop's thread only."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._lock = threading.Lock()
        self._messages: FrameDecoder[FrontMessage] = FrameDecoder(FrontMessage)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive_config(self) -> EngineConfig:
        """The first frame, which comes alone. Blocks."""
        (size,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size))
        return msgspec.msgpack.decode(self._read_exactly(size), type=EngineConfig)

    def receive(self, timeout: float) -> list[FrontMessage]:
        """What has arrived, waiting up to `timeout` seconds for the first byte.

        Raises ChannelClosed once everything sent before the close is handed out.
        """
        if timeout > 0 and not self._readable.poll(timeout * 1000):
            return []
        messages: list[FrontMessage] = []
        while True:
            try:
                data = self._sock.recv(_READ_SIZE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise ChannelClosed from error
            if not data and messages:
                return messages
            if not data:
                raise ChannelClosed
            messages += self._messages.feed(data)

    def send(self, message: EngineMessage) -> None:
        """Blocks while the front reads slower than the engine writes."""
        frame = encode_frame(message)
        with self._lock:
            try:
                self._sock.sendall(frame)
            except OSError as error:
                raise ChannelClosed from error

    def wait_hang_up(self) -> None:
        """Blocks until the front's end is closed, reading nothing. For a thread of its own."""
        poller = select.poll()
        poller.register(self._sock, 0)
        while not poller.poll():
            continue

    def _read_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._sock.recv(size - len(data))
            if not part:
                raise ChannelClosed
            data += part
        return bytes(data)


class FrontChannel(asyncio.Protocol):
    """The front's end. Lives on the event loop that made it.

    `on_message` is called for every message as it is read, `on_closed` once at the end.
    """

    def __init__(
        self, on_message: Callable[[EngineMessage], None], on_closed: Callable[[], None]
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._messages: FrameDecoder[EngineMessage] = FrameDecoder(EngineMessage)
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        on_message: Callable[[EngineMessage], None],
        on_closed: Callable[[], None],
    ) -> FrontChannel:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(
            lambda: cls(on_message, on_closed), sock=sock
        )
        return channel

    def send(self, messages: Iterable[object]) -> None:
        """Writes without waiting; nothing happens once the channel is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(encode_frame(message) for message in messages))

    async def drain(self) -> None:
        """Waits until the engine has taken most of what was sent."""
        await self._writable.wait()

    def close(self) -> None:
        """Flushes, then closes."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._messages.feed(data):
                self._on_message(message)
        except ChannelClosed:
            self.abort()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._transport = None
        self._writable.set()
        self._on_closed()
