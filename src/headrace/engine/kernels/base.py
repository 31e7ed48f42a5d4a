"""What surrounds the matrix products of a decoder step, for one kind of device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headrace.engine.batch import Geometry, Span

__all__ = ["HeadNorms", "Kernels", "RopeTables"]


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Cosines and sines, [positions, head_dim / 2] each."""

    cosine: Tensor
    sine: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] that normalise each head of the queries and of the keys."""

    query: Tensor
    key: Tensor
    eps: float


class Kernels(Protocol):
    """`begin` packs a step, and the other calls are of the step begun last. In float32 on CPU a
    row's results do not depend on the rows beside it. Owned by one runner.

    `qkv` is [rows, heads + 2 * kv_heads, head_dim], `layer` one layer's view of the KVCache.
    Results are valid until the same call is made again.
    """

    @property
    def name(self) -> str: ...

    def begin(
        self, spans: Sequence[Span], geometry: Geometry, windows: Collection[int | None]
    ) -> None:
        """Rows follow `spans`, which must have those of length 1 first, longest context first.

        Raises IndexError if a block table does not cover its span.
        """
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        """Adds `delta` to x [rows, width] in place, and returns the sum normalised."""
        ...

    def rotate_and_store(
        self, qkv: Tensor, layer: Tensor, tables: RopeTables | None, norms: HeadNorms | None
    ) -> None:
        """Normalises and rotates queries and keys in place; stores keys and values."""
        ...

    def attention(self, qkv: Tensor, layer: Tensor, window: int | None) -> Tensor:
        """Causal attention of the step's rows over stored keys and values, [rows, heads *
        head_dim]. `window` None sees the whole context."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [rows, 2 * width] holding both side by side."""
        ...
