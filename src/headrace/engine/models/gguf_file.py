"""Reads the header of a GGUF file once: metadata and where each tensor lies.

The `gguf` package builds an array object for every string of the vocabulary, which takes seconds;
this reader walks the same format in a tenth of one. Block formats and their dequantisation are
the package's.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from headrace.engine.models.errors import ModelError

__all__ = ["GGUFFile", "GGUFTensor", "read_gguf"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in the file. `shape` has the outermost dimension first, `offset` is in bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a file, and its bytes mapped read-only."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: NDArray[np.uint8]

    def raw(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The tensor's blocks as bytes, one row for each row of the tensor. Do not write."""
        rows = tensor.num_bytes // row_bytes(tensor.shape[-1], tensor.type)
        return self.data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(rows, -1)


def row_bytes(width: int, kind: GGMLQuantizationType) -> int:
    """Bytes that hold `width` elements."""
    block, size = GGML_QUANT_SIZES[kind]
    return int(width // block * size)


def read_gguf(path: Path) -> GGUFFile:
    """Raises ModelError if the file is no GGUF file, damaged or cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            header = _Header(view)
            metadata, tensors = header.read()
        data = np.memmap(path, mode="r", dtype=np.uint8)
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path.name} is not a readable GGUF file: {error}") from error
    for tensor in tensors.values():
        if tensor.offset + tensor.num_bytes > data.size:
            raise ModelError(f"{path.name} is cut short: {tensor.name} lies beyond its end")
    return GGUFFile(path, metadata, tensors, data)


class _Header:
    """A cursor over the header's bytes."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._view[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported")
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        tensors = {
            name: GGUFTensor(name, shape, kind, start + offset, size)
            for name, shape, kind, offset, size in found
        }
        return metadata, tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        code, offset = self._scalar("I"), self._scalar("Q")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise ModelError(f"{name} is of tensor type {code}, which is not supported") from None
        block = GGML_QUANT_SIZES[kind][0]
        if shape[-1] % block:
            raise ValueError(f"{name} has rows of {shape[-1]}, no multiple of {block}")
        rows = 1
        for extent in shape[:-1]:
            rows *= extent
        return name, shape, kind, offset, rows * row_bytes(shape[-1], kind)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_code(kind))
        item, count = self._scalar("I"), self._scalar("Q")
        if count > len(self._view):
            raise ValueError("an array is longer than the file")
        if item == _STRING:
            return self._strings(count)
        if item == _ARRAY:
            return [self._value(item) for _ in range(count)]
        layout = struct.Struct(f"<{count}{_code(item)}")
        values = layout.unpack_from(self._view, self._at)
        self._at += layout.size
        return list(values)

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self._view, self._at)
        self._at += layout.size
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        view, at, length_at = self._view, self._at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            end = at + 8 + length_at(view, at)[0]
            if end > len(view):
                raise ValueError("a string is longer than the file")
            found.append(view[at + 8 : end].decode("utf-8", errors="replace"))
            at = end
        self._at = at
        return found


def _code(kind: int) -> str:
    try:
        return _SCALARS[kind]
    except KeyError:
        raise ValueError(f"metadata type {kind} is unknown") from None
