"""One face for loading a model, whatever its files look like."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.models.config import DecoderConfig
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.errors import ModelError

__all__ = ["LoadedModel", "WeightSource", "load_model", "resolve_device", "resolve_dtype"]

Progress = Callable[[float, str], None]

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_HEAD_BYTES = 256 * 1024


class WeightSource(Protocol):
    """A checkpoint, under the tensor names of Hugging Face's decoders without `model.`."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The files whose content makes up the model."""
        ...

    def names(self) -> frozenset[str]: ...

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU; float32 unless stored as a 16-bit float. It may be written."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `parameters` counts shared ones once, `weight_bytes` is what the
    weights take in memory, `revision` tells files of different content apart."""

    decoder: Decoder
    config: DecoderConfig
    parameters: int
    weight_bytes: int
    revision: str
    dtype: str
    device: str


def load_model(path: Path, *, dtype: str, device: str, progress: Progress) -> LoadedModel:
    """Loads a .gguf file, or a folder with config.json and safetensors.

    `dtype` is auto, bf16 or fp32, `device` auto, cpu or cuda. `progress` is told the fraction done
    and what is being loaded. Raises ModelError, naming what is not supported.
    """
    chosen_device = resolve_device(device)
    chosen_dtype = resolve_dtype(dtype, chosen_device)
    progress(0.0, "reading the header")
    source = _open(path)
    decoder = Decoder.build(
        source.config,
        source.names(),
        source.load,
        dtype=_DTYPES[chosen_dtype],
        device=torch.device(chosen_device),
        progress=progress,
    )
    revision = _revision(source.files)
    progress(1.0, "weights loaded")
    return LoadedModel(
        decoder=decoder,
        config=decoder.config,
        parameters=decoder.parameters,
        weight_bytes=decoder.weight_bytes,
        revision=revision,
        dtype=chosen_dtype,
        device=chosen_device,
    )


def resolve_device(device: str) -> str:
    """`auto` is CUDA where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ModelError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device 'cuda' was asked for, but there is no usable CUDA device")
    return device


def resolve_dtype(dtype: str, device: str) -> str:
    """`auto` is bf16 where the device multiplies it natively, else fp32."""
    if dtype == "auto":
        native = device == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return "bf16" if native else "fp32"
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; use auto, bf16 or fp32")
    return dtype


def _open(path: Path) -> WeightSource:
    # Each reader brings a heavy package of its own, so only the one in use is imported.
    if path.is_dir():
        from headrace.engine.models.safetensors_weights import SafetensorsWeights  # noqa: PLC0415

        return SafetensorsWeights(path)
    if not path.is_file():
        raise ModelError(f"{path.name}: there is no such file or folder")
    if path.suffix.lower() == ".gguf":
        from headrace.engine.models.gguf_weights import GGUFWeights  # noqa: PLC0415

        return GGUFWeights(path)
    raise ModelError(f"{path.name} is neither a .gguf file nor a folder with safetensors")


def _revision(files: Iterable[Path]) -> str:
    """A hash of each file's size, head, tail and evenly spaced samples between."""
    digest = hashlib.sha256()
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for sample in range(1, _SAMPLES + 1):
                file.seek(max(0, size * sample // _SAMPLES - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
