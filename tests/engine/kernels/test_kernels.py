"""The plain and the compiled kernels: right, and independent of the batch to the last bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headrace.engine.batch import Geometry, Span
from headrace.engine.kernels.base import HeadNorms, Kernels, RopeTables
from headrace.engine.kernels.reference import ReferenceKernels
from support.decoders import make_kernels

CPU = torch.device("cpu")


@pytest.fixture(params=["reference", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return make_kernels(request.param)


class Paged:
    """Random keys and values of one layer, paged for several sequences."""

    def __init__(
        self,
        kernels: Kernels,
        shape: tuple[int, int, int, int],
        lengths: list[int],
    ) -> None:
        kv_heads, group, dim, block = shape
        self.kernels = kernels
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
        self.kernels.begin(
            [Span(start, length, self.tables[sequence]) for sequence, start, length in spans],
            self.geometry,
            {window},
        )
        query = torch.cat([self.queries[at][start : start + size] for at, start, size in spans])
        others = torch.full((len(query), 2 * self.geometry.num_kv_heads, query.shape[2]), 1e30)
        qkv = torch.cat([query, others], dim=1)
        out = self.kernels.attention(qkv, self.cache, window).clone()
        return list(torch.split(out, [size for _, _, size in spans]))

    def written_out(self, sequence: int, position: int, window: int | None = None) -> Tensor:
        keys, values = self.keys_values(sequence, position + 1)
        first = 0 if window is None else max(0, position + 1 - window)
        group = self.geometry.group_size
        query = self.queries[sequence][position].view(-1, group, self.geometry.head_dim).double()
        scores = query @ keys[:, first:].double().transpose(1, 2)
        weights = (scores / math.sqrt(self.geometry.head_dim)).softmax(-1)
        return (weights @ values[:, first:].double()).flatten().float()


SHAPES = [
    *((3, 3, 64, 16), (2, 1, 16, 16), (1, 7, 80, 24)),
    *((2, 8, 128, 5), (2, 2, 12, 256), (1, 30, 8, 1)),
]
"""KV heads, query heads for each, head_dim, block size."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_equals_attention_written_out(
    kernels: Kernels, shape: tuple[int, int, int, int], window: int | None
) -> None:
    paged = Paged(kernels, shape, [200, 65, 1])
    spans = [(1, 64, 1), (2, 0, 1), (0, 30, 170), (1, 0, 64)]
    for (sequence, start, length), rows in zip(spans, paged.attend(spans, window), strict=True):
        for at in {0, length // 2, length - 1}:
            wanted = paged.written_out(sequence, start + at, window)
            torch.testing.assert_close(rows[at], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 50])
def test_rows_are_the_same_bits_in_any_company(
    kernels: Kernels, shape: tuple[int, int, int, int], window: int | None
) -> None:
    lengths = [700, 300, 129, 128, 64, 3]
    paged = Paged(kernels, shape, lengths)
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


def test_stale_values_beyond_the_context_do_not_matter(kernels: Kernels) -> None:
    paged = Paged(kernels, (2, 2, 16, 16), [40, 40])
    before = paged.attend([(0, 39, 1)])[0]
    paged.planes[:, paged.tables[0][2], 8:] = 1e30
    assert torch.equal(paged.attend([(0, 39, 1)])[0], before)


def test_a_table_that_is_too_short_is_refused(kernels: Kernels) -> None:
    paged = Paged(kernels, (1, 1, 8, 4), [8])
    with pytest.raises(IndexError, match="block table"):
        paged.attend([(0, 8, 1)])


@pytest.mark.parametrize("width", [48, 576, 5, 33])
def test_rms_norm(kernels: Kernels, width: int) -> None:
    x, weight, delta = torch.randn(5, width), torch.randn(width), torch.randn(5, width)
    for add in (None, delta):
        total = x.clone() if add is None else x + add
        wanted = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        summed = x.clone()
        torch.testing.assert_close(kernels.rms_norm(summed, weight, 1e-5, add), wanted)
        assert torch.equal(summed, total)


def test_rms_norm_in_16_bits() -> None:
    x, weight = torch.randn(5, 48), torch.randn(48)
    wanted = ReferenceKernels(torch.float32, CPU).rms_norm(x, weight, 1e-5)
    half = ReferenceKernels(torch.bfloat16, CPU).rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), wanted, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_rotate_and_store(kernels: Kernels, normed: bool, rotary: bool) -> None:
    heads, kv_heads, dim, block = 4, 2, 12, 5
    geometry = Geometry(kv_heads, 2, dim, block, num_layers=2, total_blocks=5, item_bytes=4)
    memory = torch.zeros(5, 2, 2 * kv_heads, block, dim)
    layer = memory.view(-1, block * dim)[2 * kv_heads :]
    kernels.begin([Span(6, 1, [3, 1]), Span(3, 4, [0, 2])], geometry, {None})
    positions, places = [6, 3, 4, 5, 6], [(1, 1), (0, 3), (0, 4), (2, 0), (2, 1)]
    qkv, angles = torch.randn(5, heads + 2 * kv_heads, dim), torch.rand(9, dim // 2) * 3
    norms = HeadNorms(torch.randn(dim), torch.randn(dim), 1e-5) if normed else None

    wanted = qkv.clone()
    if norms is not None:
        turned = wanted[:, : heads + kv_heads]
        turned /= (turned.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        wanted[:, :heads] *= norms.query
        wanted[:, heads : heads + kv_heads] *= norms.key
    if rotary:
        pairs = torch.complex(wanted[..., : dim // 2], wanted[..., dim // 2 :])
        turn = torch.polar(torch.ones(5, 1, dim // 2), angles[positions][:, None])
        rotated = torch.cat([(pairs * turn).real, (pairs * turn).imag], -1)
        wanted[:, : heads + kv_heads] = rotated[:, : heads + kv_heads]

    tables = RopeTables(angles.cos(), angles.sin()) if rotary else None
    kernels.rotate_and_store(qkv, layer, tables, norms)
    torch.testing.assert_close(qkv, wanted)
    for row, (at, slot) in enumerate(places):
        assert torch.equal(memory[at, 1, :, slot], qkv[row, heads:])
        memory[at, 1, :, slot] = 0
    assert not memory.any(), "something else was written"


@pytest.mark.parametrize("width", [5, 64, 100])
def test_silu_mul(kernels: Kernels, width: int) -> None:
    x = torch.randn(3, 2 * width) * 5
    x[0, 0], x[1, 0], x[2, 0] = 100.0, -100.0, -1e30
    wanted = x[:, :width] * torch.sigmoid(x[:, :width]) * x[:, width:]
    torch.testing.assert_close(kernels.silu_mul(x), wanted)


def test_what_is_not_finite_shows(kernels: Kernels) -> None:
    """In its own row, and in no other."""
    bad = float("nan")
    x = torch.randn(3, 40)
    x[1, 7] = bad
    for out in (kernels.rms_norm(x.clone(), torch.ones(40), 1e-5), kernels.silu_mul(x)):
        assert out.isfinite().all(-1).tolist() == [True, False, True]
    paged = Paged(kernels, (1, 2, 16, 4), [9, 9])
    paged.queries[0][8, 1, 3] = bad
    first, second = paged.attend([(0, 8, 1), (1, 8, 1)])
    assert second.isfinite().all()
    assert first.view(2, 16).isfinite().all(-1).tolist() == [True, False]


def test_many_threads_give_the_same_bits(kernels: Kernels) -> None:
    threads = torch.get_num_threads()
    paged = Paged(kernels, (3, 3, 64, 16), [400, 77])
    x = torch.randn(64, 2 * 1536)
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            rows = paged.attend([(1, 76, 1), (0, 0, 400)])
            results.append([*rows, kernels.rms_norm(x.clone(), x[0], 1e-5).clone()])
    finally:
        torch.set_num_threads(threads)
    for one, many in zip(*results, strict=True):
        assert torch.equal(one, many)
