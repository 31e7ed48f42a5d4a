"""Models of a hub, by id `org/name` or `org/name@revision`, kept in the hub library's own cache."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.engine.models.errors import ModelError

__all__ = ["cached_snapshot", "download"]

_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
_UNWANTED = ["*/*", "consolidated*"]

Report = Callable[[float, str], None]


def cached_snapshot(name: str) -> Path | None:
    """The model's folder if all of it is on this machine. Never uses the network."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import, rarely needed
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    repo, _, revision = name.partition("@")
    try:
        folder = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
    return Path(folder) if _is_complete(Path(folder)) else None


def download(name: str, report: Report) -> Path:
    """Fetches what serving needs (configuration, safetensors, tokenizer, chat template).

    Raises ModelError.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError(
            f"{name} is on a hub, and the engine extra is not installed:"
            " pip install 'headrace[engine]'"
        )
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415 - as above
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{name} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it; unset it, or"
            " name a local folder or .gguf file"
        )
    repo, _, revision = name.partition("@")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    report(0.0, repo)
    try:
        folder = snapshot_download(
            repo,
            revision=revision or None,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            tqdm_class=_reporting_bar(report, repo),
        )
    except GatedRepoError:
        raise ModelError(f"{name} is gated: accept its terms on the hub and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"the hub has no model {repo}, or it is private (then set HF_TOKEN)"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"the hub's {repo} has no revision {revision}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"it answered {status}" if status else "it cannot be reached"
        raise ModelError(
            f"cannot fetch {name} from the hub: {reason}; check the network, or name a local"
            " folder or .gguf file"
        ) from None
    if not _is_complete(Path(folder)):
        raise ModelError(f"the hub's {name} has no config.json with safetensors, nothing to serve")
    return Path(folder)


def _is_complete(folder: Path) -> bool:
    """Whether config.json and every weight file that an index names are there."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        return False
    return all((folder / name).is_file() for name in names)


def _reporting_bar(report: Report, repo: str) -> Any:
    """A progress bar class for the hub library that shows nothing and reports bytes instead."""
    tqdm: Any = importlib.import_module("tqdm.auto").tqdm  # comes with the hub library

    class Bar(tqdm):  # type: ignore[misc]  # it has no stubs
        def display(self, *_args: Any, **_kwargs: Any) -> None:
            return

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.unit == "B" and self.total:
                report(min(1.0, self.n / self.total), repo)
            return shown

    return Bar
