"""The engine process: one loop of drain inbox, step, send.

Started as `python -m headrace.engine.process FD BUILDER` by `headrace.engine.child`. FD is one end
of a socket pair, whose first frame is the EngineConfig; BUILDER is the dotted name of a function
with the signature of `headrace.engine.assembly.build_engine`. The process lives as long as the
front's end is open, and ignores SIGINT and SIGTERM: the front decides when it stops.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.health import Stage
from headrace.engine.models.errors import ModelError
from headrace.engine.transport import ChannelClosed, EngineChannel
from headrace.engine.wire import (
    Abort,
    Alive,
    EngineConfig,
    Failed,
    Fault,
    FrontMessage,
    ModelInfo,
    Preempt,
    Progress,
    Ready,
    SetTargets,
    Shutdown,
    Submit,
)

if TYPE_CHECKING:
    from headrace.engine.core import EngineCore

__all__ = ["Builder", "ProgressReport", "main", "usable_cores"]

ProgressReport = Callable[[str, float, str], None]
"""Called with stage, fraction and detail, from any thread."""
Builder = Callable[[EngineConfig, ProgressReport], "tuple[EngineCore, ModelInfo]"]

_SPINS = 20_000_000
"""OpenMP threads wait for work this many turns, some 50 ms, before they sleep: through a step, not
through idle time. Falling asleep between its thousand parallel regions cost 15 % of a decode step
of 64 sequences on two virtual cores."""
_ORPHAN_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("headrace.engine")


def main(fd: int, builder: str) -> int:
    """Returns the exit status: 0 when told to leave, 1 after a failure."""
    _guard_signals()
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    channel = EngineChannel(socket.socket(fileno=fd))
    threading.Thread(target=_die_with_front, args=(channel,), daemon=True).start()
    try:
        config = channel.receive_config()
        _set_threads(config.threads)
        core = _load(channel, config, builder)
        if core is None:
            return 1
        _serve(channel, core, config)
    except ChannelClosed:
        return 0
    except Exception as error:  # noqa: BLE001 - whatever it is, the front is to know
        _log.exception("the engine loop failed")
        with contextlib.suppress(ChannelClosed):
            channel.send(Failed(_describe(error)))
        return 1
    return 0


def _load(channel: EngineChannel, config: EngineConfig, builder: str) -> EngineCore | None:
    """The engine, announced as Ready; None where it cannot be, announced as Failed."""
    reported: dict[str, float] = {}

    def report(stage: str, fraction: float, detail: str = "") -> None:
        # Hundreds of tensors are loaded; people see percents.
        if fraction < 1.0 and fraction - reported.get(stage, -1.0) < 0.01:
            return
        reported[stage] = fraction
        channel.send(Progress(stage, fraction, detail))

    report(Stage.LOAD_WEIGHTS, 0.0, "importing libraries")
    try:
        core, info = _resolve(builder)(config, report)
    except ChannelClosed:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the front is to know
        if not _is_fatal(error):  # else the message says it all, and the front logs it
            _log.exception("the model cannot be loaded")
        channel.send(Failed(_describe(error), fatal=_is_fatal(error)))
        return None
    _tune_gc()
    channel.send(Ready(info))
    return core


def _serve(channel: EngineChannel, core: EngineCore, config: EngineConfig) -> None:
    """Until Shutdown. Every turn sends something, after `alive_interval` at the latest."""
    timeout, worked = 0.0, True
    while True:
        for message in channel.receive(timeout):
            if isinstance(message, Shutdown):
                return
            _handle(core, message, faults=config.fault_hooks)
        step = None if core.idle else core.step()
        if step is not None:
            channel.send(step)
            timeout, worked = 0.0, True
            continue
        if worked:
            gc.collect()  # the loop has come to rest: a pause here delays nobody
            worked = False
        else:
            channel.send(Alive())
        timeout = 0.0 if core.rest() else config.alive_interval


def _handle(core: EngineCore, message: FrontMessage, *, faults: bool) -> None:
    match message:
        case Submit():
            core.submit(message)
        case Abort():
            core.abort(message.seqs)
        case SetTargets():
            core.set_targets(message.max_step_tokens, message.max_running)
        case Preempt():
            core.preempt(message.seqs)
        case Fault() if faults:
            _break(message.kind)
        case _:
            pass


def _break(kind: str) -> None:
    """Test hook."""
    if kind == "exit":
        os._exit(70)
    while kind == "hang":
        time.sleep(3600)
    raise RuntimeError(f"fault hook: {kind}")


def _resolve(builder: str) -> Builder:
    module, _, name = builder.partition(":")
    function: Builder = getattr(importlib.import_module(module), name)
    return function


def _is_fatal(error: Exception) -> bool:
    """Whether loading again would end the same way."""
    return isinstance(error, (ModelError, FileNotFoundError, ImportError))


def _describe(error: Exception) -> str:
    """For the operator; callers are never shown it."""
    return str(error) if _is_fatal(error) else f"{type(error).__name__}: {error}"


def _guard_signals() -> None:
    """SIGUSR1 prints all stacks. The parent had blocked these until the handlers are in place.

    The kernel kills the process when the front's event-loop thread ends, even one that is stopped
    or holds the interpreter's lock for ever; in all other cases the closed socket ends it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):  # the name that ps and top show; Linux only
        Path("/proc/self/comm").write_text("headrace-engine")


def _die_with_front(channel: EngineChannel) -> None:
    """The loop leaves by itself when the front is gone; this is for a loop that hangs."""
    channel.wait_hang_up()
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(1)


def usable_cores() -> int:
    """Cores this process may use: its affinity, further limited by the cgroup's CPU quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this platform
        cores = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def _set_threads(threads: int | None) -> None:
    """Before torch is imported, so that its OpenMP pool starts with the right size."""
    cores = usable_cores()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    if os.environ["OMP_NUM_THREADS"] == str(cores):
        # Beside another busy process the system may put two threads on one core: then every
        # barrier, of which a token has hundreds, takes a time slice (164 ms a step for 37; 56
        # when bound). With cores to spare it is not needed, and would keep to the first ones.
        os.environ.setdefault("OMP_PROC_BIND", "true")
    os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _tune_gc() -> None:
    """The model's objects never die, so the collector need not look at them again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


if __name__ == "__main__":
    status = main(int(sys.argv[1]), sys.argv[2])
    logging.shutdown()
    sys.stdout.flush()
    # Without the interpreter's tear-down: libraries' threads may not delay or crash the exit.
    os._exit(status)
