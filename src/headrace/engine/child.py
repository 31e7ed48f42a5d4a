"""The front's handle on one engine process: spawn, talk, kill, reap."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from headrace.engine.transport import FrontChannel
from headrace.engine.wire import EngineConfig, EngineMessage, Shutdown

__all__ = ["Child"]

_STACK_DUMP_S = 0.2
_STDERR = 2


class Child:
    """One engine process. Lives on the event loop that spawned it.

    The process is a fresh interpreter that imports nothing of ours but `headrace.engine.process`;
    it is in a session of its own, so that a terminal's Ctrl-C reaches the front alone.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._channel: FrontChannel | None = None
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """The return code, once the process is reaped."""
        # A thread in waitpid works under every event loop, and leaves no zombie.
        threading.Thread(target=self._await_exit, name="engine-reaper", daemon=True).start()

    @classmethod
    async def spawn(
        cls,
        config: EngineConfig,
        builder: str,
        on_message: Callable[[EngineMessage], None],
        on_closed: Callable[[], None],
    ) -> Child:
        """Starts the process. Raises OSError when the system refuses one."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                child = cls(_start(theirs, builder))
            channel = await FrontChannel.open(ours, on_message, on_closed)
        except BaseException:
            ours.close()
            raise
        child._channel = channel
        channel.send([config])
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def channel(self) -> FrontChannel:
        assert self._channel is not None  # noqa: S101 - set by spawn, the only way in
        return self._channel

    async def stop(self, grace: float) -> int:
        """Asks the process to leave, kills it after `grace` seconds, and reaps it."""
        try:
            self.channel.send([Shutdown()])
            self.channel.close()
            await asyncio.wait({self.exited}, timeout=grace)
        finally:
            self.kill()
        return await asyncio.shield(self.exited)

    async def destroy(self, *, dump_stack: bool = False) -> int:
        """Kills the process at once and reaps it; first lets it print where it hangs."""
        try:
            if dump_stack and not self.exited.done():
                self._process.send_signal(signal.SIGUSR1)
                await asyncio.wait({self.exited}, timeout=_STACK_DUMP_S)
        finally:
            self.kill()
        return await asyncio.shield(self.exited)

    def kill(self) -> None:
        """SIGKILL, without waiting."""
        self._process.kill()
        if self._channel is not None:
            self._channel.abort()

    def _await_exit(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._set_exited, code)

    def _set_exited(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)


def _start(sock: socket.socket, builder: str) -> subprocess.Popen[bytes]:
    fd = sock.fileno()
    command = [sys.executable, "-P", "-m", "headrace.engine.process", str(fd), builder]
    with _signals_blocked():
        return subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # the front's standard output belongs to its user
            start_new_session=True,
        )


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """The child inherits the mask, so no signal ends it before it has set its own handlers."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
