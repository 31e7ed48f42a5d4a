"""The counters of invalidation in a file, so that a restart brings nothing back."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from headrace.caching.epochs import Epochs

__all__ = ["keep_epochs"]

_log = logging.getLogger(__name__)
_reader = msgspec.json.Decoder(dict[str, int])


def keep_epochs(epochs: Epochs, path: Path) -> None:
    """Reads what the file has, and writes it anew with every change: rare, and short enough for the
    event loop. A file that cannot be read or written is told of; then an invalidation may be lost
    at the next start."""
    try:
        for name, epoch in _reader.decode(path.read_bytes()).items():
            epochs.learn(name, epoch)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as error:
        _log.warning("%s cannot be read, what was invalidated is forgotten: %s", path, error)

    def write(*_: object) -> None:
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.touch(mode=0o600)
            part.write_bytes(msgspec.json.encode(dict(epochs.table())))
            part.replace(path)
        except OSError as error:
            _log.warning("%s cannot be written: %s", path, error.strerror)

    epochs.listen(write)
