"""Paged attention against attention written out, and its independence of the batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headrace.engine.batch import AttentionBatch, Geometry, Span
from headrace.engine.kernels.reference import Workspace, paged_attention, rms_norm, rope_, silu_mul

CPU = torch.device("cpu")


class Paged:
    """Random keys and values of one layer, paged for several sequences."""

    def __init__(self, kv_heads: int, group: int, dim: int, block: int, lengths: list[int]) -> None:
        self.blocks = [-(-length // block) for length in lengths]
        total = sum(self.blocks) + 1
        layers, layer = 3, 1
        self.geometry = Geometry(kv_heads, group, dim, block, layers, total, 4)
        generator = torch.Generator().manual_seed(1)
        memory = torch.randn(total, layers, 2 * kv_heads, block * dim, generator=generator)
        self.cache = memory.view(-1, block * dim)[layer * 2 * kv_heads :]
        self.planes = memory[:, layer].view(total, 2 * kv_heads, block, dim).transpose(0, 1)
        self.planes[:, -1] = 0
        order = torch.randperm(total - 1, generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in self.blocks]
        self.queries = [
            torch.randn(length, kv_heads * group, dim, generator=generator) for length in lengths
        ]

    def keys_values(self, sequence: int, length: int) -> tuple[Tensor, Tensor]:
        """[kv_heads, length, dim] each."""
        rows = self.planes[:, self.tables[sequence]].flatten(1, 2)[:, :length]
        half = self.geometry.num_kv_heads
        return rows[:half], rows[half:]

    def attend(self, spans: list[tuple[int, int, int]], window: int | None = None) -> list[Tensor]:
        """One call over (sequence, start, length); the result of each."""
        batch = AttentionBatch.build(
            [Span(start, length, self.tables[sequence]) for sequence, start, length in spans],
            self.geometry,
            {window},
            dtype=torch.float32,
            device=CPU,
        )
        query = torch.cat([self.queries[at][start : start + size] for at, start, size in spans])
        out = paged_attention(query, self.cache, batch, window, Workspace(CPU)).clone()
        return list(torch.split(out, [size for _, _, size in spans]))

    def written_out(self, sequence: int, position: int, window: int | None = None) -> Tensor:
        keys, values = self.keys_values(sequence, position + 1)
        first = 0 if window is None else max(0, position + 1 - window)
        group = self.geometry.group_size
        query = self.queries[sequence][position].view(-1, group, self.geometry.head_dim).double()
        scores = query @ keys[:, first:].double().transpose(1, 2)
        weights = (scores / math.sqrt(self.geometry.head_dim)).softmax(-1)
        return (weights @ values[:, first:].double()).flatten().float()


SHAPES = [(3, 3, 64, 16), (2, 1, 16, 16), (1, 7, 80, 24), (2, 8, 128, 5), (2, 2, 12, 256)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_equals_attention_written_out(shape: tuple[int, int, int, int], window: int | None) -> None:
    paged = Paged(*shape, [200, 65, 1])
    spans = [(1, 64, 1), (2, 0, 1), (0, 30, 170), (1, 0, 64)]
    for (sequence, start, length), rows in zip(spans, paged.attend(spans, window), strict=True):
        for at in {0, length // 2, length - 1}:
            wanted = paged.written_out(sequence, start + at, window)
            torch.testing.assert_close(rows[at], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 50])
def test_rows_are_the_same_bits_in_any_company(
    shape: tuple[int, int, int, int], window: int | None
) -> None:
    lengths = [700, 300, 129, 128, 64, 3]
    paged = Paged(*shape, lengths)
    alone = [
        torch.cat([paged.attend([(at, position, 1)], window)[0] for position in range(length)])
        for at, length in enumerate(lengths)
    ]
    for size in (2, 31, 128, 200, 700):
        for at, length in enumerate(lengths):
            rows = [
                paged.attend([(at, start, min(size, length - start))], window)[0]
                for start in range(0, length, size)
            ]
            assert torch.equal(torch.cat(rows), alone[at]), (size, at)
    crowd = [(at, length - 1, 1) for at, length in enumerate(lengths)]
    for (at, position, _), row in zip(crowd, paged.attend(crowd, window), strict=True):
        assert torch.equal(row[0], alone[at][position])
    mixed = [(1, 200, 1), (4, 10, 1), (5, 0, 3), (0, 100, 300), (2, 0, 129)]
    for (at, start, length), result in zip(mixed, paged.attend(mixed, window), strict=True):
        assert torch.equal(result, alone[at][start : start + length])


def test_stale_values_beyond_the_context_do_not_matter() -> None:
    paged = Paged(2, 2, 16, 16, [40, 40])
    before = paged.attend([(0, 39, 1)])[0]
    paged.planes[:, paged.tables[0][2], 8:] = 1e30
    assert torch.equal(paged.attend([(0, 39, 1)])[0], before)


def test_a_table_that_is_too_short_is_refused() -> None:
    paged = Paged(1, 1, 8, 4, [8])
    with pytest.raises(IndexError, match="block table"):
        paged.attend([(0, 8, 1)])


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 48), torch.randn(48)
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), wanted)
    half = rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), wanted, rtol=0.03, atol=0.03)


def test_rope_turns_pairs() -> None:
    angle = torch.rand(6, 1, 4) * 3
    cosine = torch.cat([angle.cos(), angle.cos()], -1)
    sine = torch.cat([-angle.sin(), angle.sin()], -1)
    x = torch.randn(6, 2, 8)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    wanted = torch.cat([pairs.real, pairs.imag], -1)
    torch.testing.assert_close(rope_(x.clone(), cosine, sine), wanted)


def test_silu_mul() -> None:
    x = torch.randn(3, 10)
    wanted = x[:, :5] * torch.sigmoid(x[:, :5]) * x[:, 5:]
    torch.testing.assert_close(silu_mul(x), wanted)
