"""The CPU kernels in C: compiled once for this machine, by its own compiler, and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.engine.batch import Geometry, Span
from headrace.engine.kernels.base import HeadNorms, RopeTables

__all__ = ["NativeKernels", "NativeUnavailable", "compiled"]

_SOURCE = Path(__file__).with_name("cpu.c")
_FLAGS = ("-O3", "-march=native", "-std=gnu17", "-fopenmp", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 60.0
_QUERY_ROWS = 24
"""Query rows that share a pass over keys and values: enough that these come from cache but once,
few enough that the rows' scores stay there too."""
_LANES = 8


class NativeUnavailable(Exception):
    """Why the kernels cannot be built or loaded here."""


def compiled(folder: Path) -> ctypes.CDLL:
    """The library, from `folder` if it was built there for this source, compiler and CPU.

    Raises NativeUnavailable.
    """
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(words[0]) is None:
        raise NativeUnavailable(f"there is no C compiler `{words[0]}`")
    target = folder / f"cpu-{_fingerprint(words)}.so"
    try:
        if not target.exists():
            _compile(words, target)
        library = ctypes.CDLL(str(target))
    except OSError as error:
        target.unlink(missing_ok=True)  # whatever is there, the next start builds it anew
        raise NativeUnavailable(str(error)) from None
    _declare(library)
    return library


def _fingerprint(compiler: Sequence[str]) -> str:
    """Changes with whatever the machine code depends on."""
    digest = hashlib.blake2b(_SOURCE.read_bytes(), digest_size=12)
    digest.update(" ".join(_FLAGS).encode())
    digest.update(_output(*compiler, "--version"))
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        lines = cpu.read_text(errors="replace").splitlines()
        kept = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
        digest.update("\n".join(sorted(kept)).encode())
    return digest.hexdigest()


def _compile(compiler: Sequence[str], target: Path) -> None:
    """Atomic: whoever else builds at the same time makes the same file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    built = Path(name)
    try:
        _output(*compiler, *_FLAGS, "-o", str(built), str(_SOURCE), "-lm")
        built.replace(target)
    finally:
        built.unlink(missing_ok=True)


def _output(*command: str) -> bytes:
    try:
        done = subprocess.run(  # noqa: S603 - the user's own compiler, on our own source
            command, capture_output=True, check=False, timeout=_COMPILE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C compiler does not run: {error}") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise NativeUnavailable(f"the C compiler failed: {last[0]}")
    return done.stdout


def _declare(library: ctypes.CDLL) -> None:
    pointer, count, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    for name, arguments in (
        ("rms_norm", [pointer] * 4 + [count, number, real]),
        ("silu_mul", [pointer] * 2 + [count, number]),
        (
            "rotate_and_store",
            [pointer] * 4 + [real] + [pointer] * 4 + [count] + [number] * 4,
        ),
        (
            "attention",
            [pointer] * 4 + [count, pointer] + [number] * 4 + [count, number, pointer, count],
        ),
    ):
        function = getattr(library, f"headrace_{name}")
        function.argtypes, function.restype = arguments, None


class NativeKernels:
    """Implements `Kernels` for float32 on CPU. Threads are torch's own, by the same OpenMP."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._geometry: Geometry | None = None
        self._positions = self._slots = torch.empty(0, dtype=torch.int64)
        self._tiles = self._tables = torch.empty(0, dtype=torch.int32)
        self._scratch = torch.empty(0)
        self._room = 0
        self._buffers: dict[str, Tensor] = {}

    def begin(
        self, spans: Sequence[Span], geometry: Geometry, windows: Collection[int | None]
    ) -> None:
        del windows
        size, stride = geometry.block_size, geometry.block_stride * geometry.block_size
        step = max(1, _QUERY_ROWS // geometry.group_size)
        tiles: list[tuple[int, int, int, int]] = []
        tables: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for span in spans:
            table = span.block_table
            if not 0 < span.end <= len(table) * size:
                raise IndexError("a block table does not cover its sequence")
            for start in range(span.start, span.end, step):
                tokens = min(step, span.end - start)
                tiles.append((len(positions) + start - span.start, tokens, start, len(tables)))
            own = range(span.start, span.end)
            positions += own
            slots += [table[at // size] * stride + at % size for at in own]
            tables += table[: -(-span.end // size)]
        tiles.sort(key=lambda tile: -tile[1] * (tile[1] + tile[2]))  # the longest work goes first
        longest = max(start + tokens for _, tokens, start, _ in tiles)
        rows = geometry.group_size * max(tokens for _, tokens, _, _ in tiles)
        self._geometry = geometry
        self._positions, self._slots = _tensor(positions, np.int64), _tensor(slots, np.int64)
        self._tiles, self._tables = _tensor(tiles, np.int32), _tensor(tables, np.int32)
        # A thread's part begins on a cache line of its own.
        self._room = _round_up(rows * (_round_up(longest, _LANES) + geometry.head_dim), 16)
        needed = self._room * torch.get_num_threads()
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        rows, width = x.shape
        out = self._take("normed", rows, width)
        self._library.headrace_rms_norm(
            out.data_ptr(),
            _address(x),
            None if delta is None else _address(delta),
            weight.data_ptr(),
            rows,
            width,
            eps,
        )
        return out

    def rotate_and_store(
        self, qkv: Tensor, layer: Tensor, tables: RopeTables | None, norms: HeadNorms | None
    ) -> None:
        geometry = self._begun()
        self._library.headrace_rotate_and_store(
            _address(qkv),
            _address(layer),
            None if norms is None else norms.query.data_ptr(),
            None if norms is None else norms.key.data_ptr(),
            0.0 if norms is None else norms.eps,
            None if tables is None else tables.cosine.data_ptr(),
            None if tables is None else tables.sine.data_ptr(),
            self._positions.data_ptr(),
            self._slots.data_ptr(),
            qkv.shape[0],
            geometry.num_kv_heads * geometry.group_size,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.block_size,
        )

    def attention(self, qkv: Tensor, layer: Tensor, window: int | None) -> Tensor:
        geometry = self._begun()
        heads = geometry.num_kv_heads * geometry.group_size
        out = self._take("attended", qkv.shape[0], heads * geometry.head_dim)
        self._library.headrace_attention(
            out.data_ptr(),
            _address(qkv),
            _address(layer),
            self._tiles.data_ptr(),
            self._tiles.shape[0],
            self._tables.data_ptr(),
            heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.block_size,
            geometry.block_stride,
            window or 0,
            self._scratch.data_ptr(),
            self._room,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._take("gated", rows, width)
        self._library.headrace_silu_mul(out.data_ptr(), _address(gate_up), rows, width)
        return out

    def _begun(self) -> Geometry:
        if self._geometry is None:
            raise RuntimeError("no step has begun")
        return self._geometry

    def _take(self, name: str, rows: int, width: int) -> Tensor:
        """A buffer reused from call to call; fresh memory would come page by page each time."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * width:
            buffer = self._buffers[name] = torch.empty(rows * width)
        return buffer[: rows * width].view(rows, width)


def _address(tensor: Tensor) -> int:
    """C reads what lies there, whatever torch thinks of it."""
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise TypeError("the kernels take contiguous float32")
    return tensor.data_ptr()


def _tensor(values: list[Any], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
