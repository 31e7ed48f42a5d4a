"""The plain PyTorch kernels: right on any device, and in float32 on CPU independent of the batch.

A row's result must not depend on its neighbours. Row-wise operations give that for free. For
attention it holds because every sum runs in an order fixed by position alone: keys are padded with
weights that are exactly zero, and values are summed in segments of `SEGMENT` keys, added in order,
so that no blocking inside a matrix product can depend on how long a batch's longest context is.
Query rows come in multiples of four because the CPU matrix product takes other code, with another
order of summation, for one to three rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor

from headrace.engine.batch import AttentionBatch, Geometry, Span
from headrace.engine.kernels.base import HeadNorms, RopeTables

__all__ = [
    "SEGMENT",
    "ReferenceKernels",
    "Workspace",
    "paged_attention",
    "rms_norm",
    "rope_",
    "silu_mul",
]

SEGMENT = 128
"""The longest sum that the CPU matrix product never splits, whatever its length is padded to."""


class Workspace:
    """Scratch tensors reused from call to call, each under a name. Owned by one runner.

    Fresh memory of this size would come from the operating system, page by page, at each call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with what was last left in it, valid until `name` is taken again."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.zeros(size, dtype=dtype, device=self._device)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension; 16-bit inputs are squared and summed in float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


def rope_(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates x [rows, heads, head_dim] in place.

    The tables are [rows, 1, head_dim]; the first half of `sine` is negated, so that with x rolled
    by half a head the result is `x * cosine + rolled * sine`.
    """
    rolled = x.roll(x.shape[-1] // 2, dims=-1).mul_(sine)
    return x.mul_(cosine).add_(rolled)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [rows, 2 * width] holding both side by side.

    Independent of the batch where threads get whole vectors, that is where 16 * threads divides
    the width: elsewhere an element's last bit may depend on whether it falls into a remainder.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def paged_attention(
    query: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    window: int | None,
    work: Workspace,
) -> Tensor:
    """Causal attention of packed query rows over paged keys and values.

    `query` is [rows, heads, head_dim], `cache` one layer's as
    rows of block_size * head_dim, as KVCache lays them. Returns [rows, heads * head_dim], valid
    until the next call with the same workspace.
    """
    geometry = batch.geometry
    rows, heads, head_dim = query.shape
    out = work.take("attended", (rows, heads, head_dim), query.dtype)
    for group in batch.groups:
        width = geometry.block_size * head_dim
        gathered = work.take("gathered", (group.index.shape[0], width), query.dtype)
        torch.index_select(cache, 0, group.index, out=gathered)
        pairs = geometry.num_kv_heads * group.sequences
        keys, values = gathered.view(2, pairs, group.blocks * geometry.block_size, head_dim)
        for tile in group.tiles:
            # Rows ordered by KV head, then sequence, token and head of the group.
            shape = (group.sequences, tile.tokens, geometry.num_kv_heads, -1, head_dim)
            real = tile.tokens * geometry.group_size
            taken = slice(tile.row, tile.row + group.sequences * tile.tokens)
            by_head = query[taken].view(shape).permute(2, 0, 1, 3, 4)
            packed = work.take("queries", (pairs, tile.query_rows, head_dim), query.dtype)
            packed[:, :real].view(by_head.shape).copy_(by_head)
            summed = _attend(packed, keys, values, tile.masks[window], work)
            out_by_head = out[taken].view(shape).permute(2, 0, 1, 3, 4)
            out_by_head.copy_(summed[:, :real].view(by_head.shape))
    return out.view(rows, heads * head_dim)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, work: Workspace) -> Tensor:
    """Attention of [pairs, query_rows, head_dim], pairs being KV heads times sequences."""
    length = mask.shape[-1]
    scores = work.take("scores", (*query.shape[:2], length), query.dtype)
    scale = query.shape[-1] ** -0.5
    torch.baddbmm(mask, query, keys[:, :length].transpose(1, 2), alpha=scale, out=scores)
    weights = work.take("weights", scores.shape, torch.float32)
    torch.softmax(scores, -1, dtype=torch.float32, out=weights)
    weights = weights.to(query.dtype)

    summed = work.take("summed", query.shape, query.dtype)
    torch.bmm(weights[:, :, :SEGMENT], values[:, : min(SEGMENT, length)], out=summed)
    for start in range(SEGMENT, length, SEGMENT):
        end = min(start + SEGMENT, length)
        part = work.take("part", query.shape, query.dtype)
        torch.bmm(weights[:, :, start:end], values[:, start:end], out=part)
        summed.add_(part)
    return summed


class ReferenceKernels:
    """Implements `Kernels` with PyTorch operations."""

    name = "reference"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._work = Workspace(device)
        self._batch: AttentionBatch | None = None
        self._positions: Tensor | None = None
        self._rotation: tuple[Tensor, Tensor] | None = None

    def begin(
        self, spans: Sequence[Span], geometry: Geometry, windows: Collection[int | None]
    ) -> None:
        self._batch = AttentionBatch.build(
            spans, geometry, windows, dtype=self._dtype, device=self._device
        )
        positions = [at for span in spans for at in range(span.start, span.end)]
        self._positions = torch.tensor(positions, device=self._device)
        self._rotation = None

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None
    ) -> Tensor:
        if delta is not None:
            x.add_(delta)
        return rms_norm(x, weight, eps)

    def rotate_and_store(
        self, qkv: Tensor, layer: Tensor, tables: RopeTables | None, norms: HeadNorms | None
    ) -> None:
        batch = self._begun()
        kv_heads, head_dim = batch.geometry.num_kv_heads, batch.geometry.head_dim
        heads = kv_heads * batch.geometry.group_size
        query, key = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        if norms is not None:
            query.copy_(rms_norm(query, norms.query, norms.eps))
            key.copy_(rms_norm(key, norms.key, norms.eps))
        if tables is not None:
            rope_(qkv[:, : heads + kv_heads], *self._rotate_by(tables))
        layer.view(-1, head_dim)[batch.slots] = qkv[:, heads:]

    def attention(self, qkv: Tensor, layer: Tensor, window: int | None) -> Tensor:
        batch = self._begun()
        heads = batch.geometry.num_kv_heads * batch.geometry.group_size
        return paged_attention(qkv[:, :heads], layer, batch, window, self._work)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def _begun(self) -> AttentionBatch:
        if self._batch is None:
            raise RuntimeError("no step has begun")
        return self._batch

    def _rotate_by(self, tables: RopeTables) -> tuple[Tensor, Tensor]:
        if self._rotation is None:
            cosine, sine = tables.cosine[self._positions], tables.sine[self._positions]
            self._rotation = (
                torch.cat([cosine, cosine], dim=-1)[:, None],
                torch.cat([-sine, sine], dim=-1)[:, None],
            )
        return self._rotation
