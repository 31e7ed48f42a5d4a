"""How one step's tokens are packed: rows, KV slots and groups of sequences attended together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["KEY_GRANULE", "QUERY_GRANULE", "AttentionBatch", "Geometry", "Group", "Span", "Tile"]

KEY_GRANULE = 64
"""Keys are padded to a multiple of this, query rows to one of `QUERY_GRANULE`."""
QUERY_GRANULE = 4
_GROUP_BYTES = 5 << 20
"""Keys and values gathered at once: small enough to stay in cache until they are used."""
_WASTE_BYTES = 768 << 10
"""Padding a group may gather before another group, with its own calls, is cheaper."""
_SCORE_BYTES = 8 << 20
_MAX_TILE = 128
"""Tokens of a chunk attended at once."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the KV cache and of the heads over it. `total_blocks` counts the null block,
    which is the last one, all zeros and never written."""

    num_kv_heads: int
    group_size: int
    head_dim: int
    block_size: int
    num_layers: int
    total_blocks: int
    item_bytes: int

    @property
    def null_block(self) -> int:
        return self.total_blocks - 1

    @property
    def block_stride(self) -> int:
        """Rows of a head, keys or values, from one block to the next."""
        return self.num_layers * 2 * self.num_kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.item_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, start + length) of one sequence, whose KV lies in `block_table`."""

    start: int
    length: int
    block_table: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows [row, row + sequences * tokens) over the first keys of their group.

    `query_rows` is tokens times query heads a KV head, padded. `masks` maps each window of the
    model to what is added to the scores: float [kv_heads * sequences or 1, query_rows or 1, keys].
    """

    row: int
    tokens: int
    query_rows: int
    masks: dict[int | None, Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences whose keys and values are gathered together, `blocks` blocks each.

    `index` selects rows of a layer's cache, ordered keys before values, then KV head, sequence,
    block.
    """

    sequences: int
    blocks: int
    index: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's attention. `slots` [rows, 2 * kv_heads] says where each row's keys and values go
    in a layer's cache seen as vectors of head_dim."""

    geometry: Geometry
    groups: tuple[Group, ...]
    slots: Tensor

    @classmethod
    def build(
        cls,
        spans: Sequence[Span],
        geometry: Geometry,
        windows: Iterable[int | None],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AttentionBatch:
        """Rows follow `spans`, which must have those of length 1 first, longest context first.

        Raises IndexError if a block table does not cover its span.
        """
        maker = _Maker(geometry, tuple(windows), dtype, device)
        for span in spans:
            if not 0 < span.end <= len(span.block_table) * geometry.block_size:
                raise IndexError("a block table does not cover its sequence")
        singles = 0
        while singles < len(spans) and spans[singles].length == 1:
            singles += 1
        groups: list[Group] = []
        row = 0
        while row < singles:
            count = maker.decodes_together(spans[row:singles])
            groups.append(maker.decode_group(row, spans[row : row + count]))
            row += count
        for span in spans[singles:]:
            groups.append(maker.chunk_group(row, span))
            row += span.length
        return cls(geometry, tuple(groups), maker.slots(spans))


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


class _Maker:
    """Turns spans into tensors of one geometry."""

    def __init__(
        self,
        geometry: Geometry,
        windows: tuple[int | None, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._geometry = geometry
        self._windows = windows
        self._dtype = dtype
        self._device = device
        self._planes = np.arange(2 * geometry.num_kv_heads)

    def decodes_together(self, spans: Sequence[Span]) -> int:
        """How many of these, longest first, to attend in one group."""
        keys = _round_up(spans[0].end, KEY_GRANULE)
        capacity = max(1, _GROUP_BYTES // (keys * self._geometry.token_bytes))
        waste = _WASTE_BYTES // self._geometry.token_bytes
        count = 0
        for span in spans[:capacity]:
            waste -= keys - _round_up(span.end, KEY_GRANULE)
            if waste < 0:
                break
            count += 1
        return count

    def decode_group(self, row: int, spans: Sequence[Span]) -> Group:
        keys = _round_up(spans[0].end, KEY_GRANULE)
        index, blocks = self._gather(spans, keys)
        positions = np.array([[span.start] for span in spans])
        masks = {}
        for window in self._windows:
            mask = self._mask(positions, keys, window)  # [sequences, 1, keys]
            masks[window] = mask.repeat(self._geometry.num_kv_heads, 1, 1)
        query_rows = _round_up(self._geometry.group_size, QUERY_GRANULE)
        return Group(len(spans), blocks, index, (Tile(row, 1, query_rows, masks),))

    def chunk_group(self, row: int, span: Span) -> Group:
        geometry = self._geometry
        index, blocks = self._gather([span], _round_up(span.end, KEY_GRANULE))
        score_bytes = geometry.num_kv_heads * geometry.group_size * 4 * span.end
        step = min(_MAX_TILE, max(QUERY_GRANULE, _SCORE_BYTES // score_bytes))
        tiles = []
        for start in range(span.start, span.end, step):
            tokens = min(step, span.end - start)
            keys = _round_up(start + tokens, KEY_GRANULE)
            query_rows = _round_up(tokens * geometry.group_size, QUERY_GRANULE)
            positions = np.full((1, query_rows), start + tokens)  # padding sees all: never empty
            real = np.repeat(np.arange(start, start + tokens), geometry.group_size)
            positions[0, : real.size] = real
            masks = {window: self._mask(positions, keys, window) for window in self._windows}
            tiles.append(Tile(row + start - span.start, tokens, query_rows, masks))
        return Group(1, blocks, index, tuple(tiles))

    def slots(self, spans: Sequence[Span]) -> Tensor:
        size = self._geometry.block_size
        stride = self._geometry.block_stride * size
        found: list[int] = []
        for span in spans:
            table = span.block_table
            found.extend(
                table[position // size] * stride + position % size
                for position in range(span.start, span.end)
            )
        rows = np.array(found, dtype=np.int64)[:, None] + self._planes * size
        return self._tensor(rows)

    def _gather(self, spans: Sequence[Span], keys: int) -> tuple[Tensor, int]:
        blocks = -(-keys // self._geometry.block_size)
        table = np.full((len(spans), blocks), self._geometry.null_block, dtype=np.int64)
        for row, span in enumerate(spans):
            used = -(-span.end // self._geometry.block_size)
            table[row, :used] = span.block_table[:used]
        table *= self._geometry.block_stride
        return self._tensor((self._planes[:, None] + table.reshape(1, -1)).reshape(-1)), blocks

    def _mask(self, positions: np.ndarray, keys: int, window: int | None) -> Tensor:
        """Zero where a query at a position sees a key, else minus infinity."""
        key = np.arange(keys)
        query = positions[..., None]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        return self._tensor(mask).to(self._dtype)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
