"""Which kernels serve a model here, and whether they can be trusted."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.batch import Geometry, Span
from headrace.engine.kernels.base import HeadNorms, Kernels, RopeTables
from headrace.engine.kernels.native import NativeKernels, NativeUnavailable, compiled
from headrace.engine.kernels.reference import ReferenceKernels

__all__ = ["choose_kernels", "self_test"]

_TOLERANCE = 1e-4
_log = logging.getLogger(__name__)


def choose_kernels(kind: str, *, dtype: torch.dtype, device: torch.device, folder: Path) -> Kernels:
    """`kind` is auto, native or reference; compiled kernels are kept in `folder`.

    Raises NativeUnavailable if native ones are asked for and cannot be had; auto then takes the
    plain ones, which are slower, and says so once.
    """
    plain = ReferenceKernels(dtype, device)
    fits = dtype == torch.float32 and device.type == "cpu"
    if kind == "reference" or (kind == "auto" and not fits):
        return plain
    try:
        if not fits:
            raise NativeUnavailable("they compute in fp32 on CPU alone")
        native = NativeKernels(compiled(folder))
        self_test(native, plain)
    except NativeUnavailable as error:
        if kind == "native":
            raise
        _log.warning("the slower plain kernels are used: %s", error)
        return plain
    return native


@torch.inference_mode()
def self_test(kernels: Kernels, plain: Kernels) -> None:
    """Compares both on small random input. Raises NativeUnavailable where they differ: a compiler
    at fault must not become a model that talks nonsense."""
    for name, ours, wanted in zip(
        ("rms_norm", "keys and values", "attention", "silu_mul"),
        _results(kernels),
        _results(plain),
        strict=True,
    ):
        if not torch.allclose(ours, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise NativeUnavailable(f"{name} as compiled here is wrong")


def _results(kernels: Kernels) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    geometry = Geometry(
        num_kv_heads=2,
        group_size=3,
        head_dim=72,
        block_size=16,
        num_layers=1,
        total_blocks=9,
        item_bytes=4,
    )
    spans = [Span(40, 1, [5, 2, 7]), Span(7, 1, [1]), Span(3, 21, [0, 4])]
    layer = random(geometry.total_blocks * geometry.block_stride, 16 * 72)
    layer[-geometry.block_stride :] = 0
    x, delta = random(23, 100), random(23, 100)
    qkv = random(23, 6 + 2 * 2, 72)
    tables = RopeTables(random(64, 36), random(64, 36))
    norms = HeadNorms(random(72), random(72), 1e-5)

    kernels.begin(spans, geometry, (None, 11))
    normed = kernels.rms_norm(x, random(100), 1e-5, delta).clone()
    kernels.rotate_and_store(qkv, layer, tables, norms)
    attended = [kernels.attention(qkv, layer, window).clone() for window in (None, 11)]
    gated = kernels.silu_mul(random(23, 2 * 52)).clone()
    return torch.cat([normed, x]), layer, torch.cat(attended), gated
