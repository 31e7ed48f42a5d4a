"""Weights from a Hugging Face folder: config.json and one or more safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.engine.models.config import DecoderConfig, config_from_hf
from headrace.engine.models.errors import ModelError

__all__ = ["SafetensorsWeights"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_PREFIX = "model."
_RECOMPUTED = "rotary_emb.inv_freq"
"""Old checkpoints store the RoPE frequencies; ours come from the config."""


class SafetensorsWeights:
    """Opens the shards of a folder; tensors are read when asked for."""

    def __init__(self, folder: Path) -> None:
        config = _json(folder / "config.json")
        if config is None:
            raise ModelError(f"{folder.name} has no config.json")
        self._config = config_from_hf(
            config,
            _json(folder / "generation_config.json"),
            _json(folder / "tokenizer_config.json"),
        )
        self._shards = _shards(folder)
        self.files = (folder / "config.json", *self._shards)
        self._places: dict[str, tuple[Any, str]] = {}
        for path in self._shards:
            try:
                shard: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path.name} is not a readable safetensors file: {error}"
                ) from error
            for name in shard.offset_keys():
                if not name.endswith(_RECOMPUTED):
                    self._places[name.removeprefix(_PREFIX)] = (shard, name)

    @property
    def config(self) -> DecoderConfig:
        return self._config

    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def load(self, name: str) -> Tensor:
        shard, stored = self._places[name]
        tensor: Tensor = shard.get_tensor(stored)
        if tensor.dtype not in _FLOATS:
            raise ModelError(f"{stored} is of type {tensor.dtype}, which is not supported")
        return tensor


def _shards(folder: Path) -> tuple[Path, ...]:
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,)
    index = _json(folder / _INDEX)
    if index is None:
        raise ModelError(f"{folder.name} has neither {_SINGLE} nor {_INDEX}")
    names = sorted(set(index.get("weight_map", {}).values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelError(f"{_INDEX} names {name!r}, which is not in the folder")
    return tuple(folder / name for name in names)


def _json(path: Path) -> dict[str, Any] | None:
    """The object in the file, or None without a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} does not hold an object")
    return content
