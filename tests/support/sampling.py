"""Sequences and logits for tests of sampling, and truncation by its definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headrace.core.request import SamplingParams
from headrace.engine.base import Sampled
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import Sequence

CPU = torch.device("cpu")


def make(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    seed: int = 1,
    **params: Any,
) -> Sequence:
    prompt = [0] if prompt is None else prompt
    return Sequence(
        id=1,
        group=1,
        prompt_length=len(prompt),
        tokens=prompt + (output or []),
        sampling=SamplingParams(**params),
        seed=seed,
        max_length=1000,
    )


def sampler(vocab: int, *eos: int) -> Sampler:
    return Sampler(vocab, eos, CPU)


def draw(logits: Tensor, *sequences: Sequence, eos: tuple[int, ...] = ()) -> list[Sampled]:
    return sampler(logits.shape[1], *eos).sample(logits, list(sequences))


def noise(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def pick(logits: list[float], **params: Any) -> int | None:
    return draw(torch.tensor([logits]), make(**params))[0].token_id


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kept_by_sorting(probs: Tensor, params: SamplingParams) -> list[int]:
    """Truncation as its definition reads, by sorting everything, in double precision."""
    ranked = sorted(enumerate(probs.tolist()), key=lambda item: (-item[1], item[0]))
    limited = params.min_p > 0 or 0 < params.top_k < len(ranked)
    ranked = [item for item in ranked if item[1] >= params.min_p * ranked[0][1]]
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        *_, mass = accumulate(p for _, p in ranked)
        if not limited:
            mass = 1.0
        kept: list[int] = []
        before = 0.0
        for token_id, p in ranked:
            if kept and before >= params.top_p * mass:
                break
            kept.append(token_id)
            before += p
        return sorted(kept)
    return sorted(token_id for token_id, _ in ranked)
