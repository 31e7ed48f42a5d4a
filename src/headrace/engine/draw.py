"""The arithmetic of a random draw: uniforms, truncation, inversion.

Works on rows of probabilities [rows, vocab]. Each row's result depends on that row alone, bit for
bit: comparisons and sorts are exact, and sums run in an order that the row count does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from headrace.core.request import SamplingParams

__all__ = ["Cut", "apply_cut", "argmax", "invert", "take", "uniform"]

_CANDIDATES = (1024, 8192)
"""How many of the largest probabilities are ranked, step by step; a row whose cut lies deeper
still is sorted as a whole."""

_BLOCK = 128


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) for the output token at `position`: 53 bits of a hash, no state."""
    digest = blake2b(b"%d:%d" % (seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def take(rows: Tensor, which: list[int]) -> Tensor:
    """These rows, in ascending order: a copy, or `rows` itself when it is all of them."""
    if len(which) == rows.shape[0]:
        return rows
    return rows[torch.tensor(which, device=rows.device)]


def argmax(rows: Tensor) -> Tensor:
    """Lowest id of the largest value; NaN counts as the largest."""
    if rows.is_cpu:  # NumPy's is vectorised, PyTorch's takes ten times as long
        return torch.from_numpy(rows.numpy().argmax(-1))
    return rows.argmax(-1)


def _largest(rows: Tensor, width: int) -> Tensor:
    """The `width` largest values of each row, descending."""
    if rows.is_cpu:
        values = rows.numpy()
        if width < values.shape[1]:
            values = np.partition(values, values.shape[1] - width, axis=-1)[:, -width:]
        return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())
    return rows.topk(width, -1).values


@dataclass(frozen=True, slots=True)
class Cut:
    """The truncation parameters of some rows, as columns."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, params: list[SamplingParams], probs: Tensor) -> Cut:
        vocab = probs.shape[1]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=probs.device).unsqueeze(1)

        return cls(
            column([float(min(p.top_k, vocab) if p.top_k > 0 else vocab) for p in params]).long(),
            column([p.top_p for p in params]),
            column([p.min_p for p in params]),
        )

    def take(self, which: list[int]) -> Cut:
        return Cut(take(self.top_k, which), take(self.top_p, which), take(self.min_p, which))


def apply_cut(probs: Tensor, cut: Cut) -> None:
    """Zeroes, in place, the probabilities that each row's truncation leaves out."""
    vocab = probs.shape[1]
    widths = [width for width in _CANDIDATES if width < vocab]
    threshold, ties, deeper = _thresholds(probs, cut, widths[0] if widths else vocab)
    for width in [*widths[1:], vocab]:
        rest = deeper.nonzero().flatten()
        if not len(rest):
            break
        which = rest.tolist()
        found = _thresholds(take(probs, which), cut.take(which), width)
        threshold[rest], ties[rest], deeper[rest] = found
    below = threshold.nextafter(threshold.new_tensor(-1.0)).tolist()
    for row, level, bound, count in zip(probs, threshold, below, ties.tolist(), strict=True):
        if count >= 0:
            equal = (row == level).nonzero().flatten()
            row[equal[count:]] = 0.0
        torch.threshold_(row, bound, 0.0)  # one pass; a batched mask takes five times as long


def _thresholds(probs: Tensor, cut: Cut, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: the smallest probability kept; how many of those equal to it stay, or -1 for all;
    and whether `width` candidates were too few to tell."""
    candidates = _largest(probs, width)
    ranked = candidates.double()
    rising = -ranked
    total = ranked.cumsum(1)
    limited = (cut.top_k < probs.shape[1]) | (cut.min_p > 0)
    passing = torch.searchsorted(rising, cut.min_p * rising[:, :1], right=True)
    limit = torch.minimum(passing, cut.top_k).clamp_(min=1)
    mass = torch.where(limited, total.gather(1, limit - 1), 1.0)
    nucleus = torch.searchsorted(total, cut.top_p * mass) + 1
    kept = torch.where(cut.top_p < 1, torch.minimum(limit, nucleus), limit)
    threshold = candidates.gather(1, kept - 1)
    above = torch.searchsorted(rising, -threshold.double())
    split = (kept < width) & (candidates.gather(1, kept.clamp(max=width - 1)) == threshold)
    ties = torch.where(split & (threshold > 0), kept - above, -1)
    deeper = (torch.where(limited, limit, kept) == width) & (width < probs.shape[1])
    return threshold.squeeze(1), ties.squeeze(1), deeper.squeeze(1)


def invert(weights: Tensor, draws: Tensor) -> Tensor:
    """The id at which the running sum over ids passes draw * total; never one of weight zero.

    Sums are taken in blocks: see `_block_sums` inside one, float64 across them and inside the
    chosen one.
    """
    rows, vocab = weights.shape
    sums = _block_sums(weights).double()
    block, residual = _locate(sums, draws.unsqueeze(1) * sums.cumsum(1)[:, -1:])
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device).expand(rows, -1)
    inside = weights.gather(1, ids.clamp(max=vocab - 1)).double().masked_fill_(ids >= vocab, 0.0)
    place, _ = _locate(inside, residual)
    return ids.gather(1, place).squeeze(1)


def _block_sums(weights: Tensor) -> Tensor:
    """Sums of consecutive weights, the last block perhaps shorter. In float64 where the device
    may group the terms by the number of rows, so that it shows in no draw."""
    rows, vocab = weights.shape
    whole = vocab // _BLOCK
    dtype = torch.float32 if weights.is_cpu else torch.float64
    sums = weights[:, : whole * _BLOCK].view(rows, whole, _BLOCK).sum(-1, dtype=dtype)
    if vocab % _BLOCK == 0:
        return sums
    tail = weights[:, whole * _BLOCK :].sum(-1, keepdim=True, dtype=dtype)
    return torch.cat((sums, tail), 1)


def _locate(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of each row first passes `target`, and the rest of the target there.

    A target at or past the total gives the last positive weight, so rounding picks no zero.
    """
    running = weights.cumsum(1)
    first = torch.searchsorted(running, target, right=True)
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    place = torch.minimum(first, last)
    before = running.gather(1, place) - weights.gather(1, place)
    return place, (target - before).clamp_(min=0.0)
