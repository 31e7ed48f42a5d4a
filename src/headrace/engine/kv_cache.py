"""Tensors of the paged KV cache, and how many blocks to reserve."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.engine.batch import Geometry
from headrace.engine.models.config import DecoderConfig
from headrace.engine.models.errors import ModelError

__all__ = ["KVCache", "available_bytes", "block_bytes", "plan_num_blocks"]

_FREE_SHARE = 0.5
"""Share of free memory that the cache may take unless told."""
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_MADV_POPULATE_WRITE = 23
_POPULATED_AT_ONCE = 8 << 20
_CPU_LIMIT = 4 << 30
"""Most that it takes of a CPU's memory unless told: a laptop has other work to do."""


class KVCache:
    """Keys and values of all layers. Written by the runner alone.

    Memory is [num_blocks + 1, layers, 2 * kv_heads, block_size * head_dim], keys before values:
    what a step adds lies close together, and gathering a sequence's rows of one head yields a
    contiguous [tokens, head_dim] matrix. The last block stays zero and pads gathers.
    `layers` are views of that memory as rows of block_size * head_dim, each beginning at its
    layer's part of the first block, so that one index serves them all.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.geometry = Geometry(
            num_kv_heads=config.num_kv_heads,
            group_size=config.group_size,
            head_dim=config.head_dim,
            block_size=block_size,
            num_layers=config.num_layers,
            total_blocks=num_blocks + 1,
            item_bytes=dtype.itemsize,
        )
        stride, planes = self.geometry.block_stride, 2 * config.num_kv_heads
        shape = (self.geometry.total_blocks * stride, block_size * config.head_dim)
        try:
            self._rows = _zeros(shape, dtype, device)
        except (RuntimeError, MemoryError) as error:
            raise ModelError(f"not enough memory for {num_blocks} KV blocks: {error}") from error
        self.layers = tuple(self._rows[first:] for first in range(0, stride, planes))
        self.blocks = self._rows.view(self.geometry.total_blocks, -1)
        """The same memory, a row a block."""
        self._to_populate = device.type == "cpu"
        self._populated = 0

    @property
    def bytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    def vectors(self, layer: Tensor) -> Tensor:
        """A layer's tensor as single vectors of head_dim."""
        return layer.view(-1, self.geometry.head_dim)

    def populate(self) -> bool:
        """Has the system back the next 8 MiB with memory, their content unchanged; true while
        there may be more to do.

        A page that is first written to in the middle of a step holds that step up, on a virtual
        machine, whose host has to find it too, by some 4 ms a MiB. Does nothing where the system
        cannot (Linux before 5.14).
        """
        if self._to_populate:
            begin = self._rows.data_ptr() + self._populated
            end = self._rows.data_ptr() + self.bytes
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            size = min(_POPULATED_AT_ONCE, (end - first) // mmap.PAGESIZE * mmap.PAGESIZE)
            self._to_populate = size > 0 and _populate(first, size)
            self._populated = first + size - self._rows.data_ptr()
        return self._to_populate

    def clear(self, blocks: Collection[int]) -> None:
        """Fills blocks with zeros."""
        self.blocks[sorted(blocks)] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On CPU the pages of the system, which are zero and take memory only once written to:
    torch.zeros would write them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, _UNSIGNED[dtype.itemsize])).view(dtype)


def _populate(address: int, size: int) -> bool:
    """False where the system refuses."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(address, size, _MADV_POPULATE_WRITE) == 0)


def block_bytes(config: DecoderConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    vectors = 2 * config.num_layers * config.num_kv_heads * block_size
    return vectors * config.head_dim * dtype.itemsize


def plan_num_blocks(
    config: DecoderConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_bytes: int | None,
    max_running: int,
    context_length: int,
) -> int:
    """Blocks to reserve: `kv_bytes` worth, or half of free memory (of a CPU's, 4 GiB at most), and
    never more than `max_running` full contexts could use. Raises ModelError if none fits."""
    size = block_bytes(config, block_size, dtype)
    if kv_bytes is not None:
        budget = kv_bytes
    else:
        budget = int(available_bytes(device) * _FREE_SHARE)
        if device.type == "cpu":
            budget = min(budget, _CPU_LIMIT)
    blocks = budget // size
    if blocks < 1:
        raise ModelError(f"a KV block takes {size} bytes, but only {budget} bytes are to be had")
    return min(blocks, max_running * -(-context_length // block_size))


def available_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Memory free for new use on the device; on CPU the least of what the machine and the
    control group leave. `root` is where /proc and /sys are found."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo(root / "proc/meminfo")
    for limit, usage in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        allowed, used = _number(root / limit), _number(root / usage)
        if allowed is not None and used is not None:
            left = max(0, allowed - used)
            free = left if free is None else min(free, left)
    if free is None:
        raise ModelError("free memory is unknown here: set the KV cache size")
    return free


def _meminfo(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file or no limit ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
