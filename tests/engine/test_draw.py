from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.core.request import SamplingParams
from headrace.engine.draw import Cut, _locate, apply_cut, invert, uniform
from support.sampling import draw, kept_by_sorting, make, noise

SLOW = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
TEMPERATURE = 0.7

# Truncation against its definition


@SLOW
@given(
    vocab=st.sampled_from([1, 2, 7, 128, 129, 400]),
    levels=st.sampled_from([0, 2, 8]),
    seed=st.integers(0, 10**6),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 10_000]),
    top_p=st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_truncation_keeps_what_a_full_sort_keeps(
    *, vocab: int, levels: int, seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    logits = noise(1, vocab, seed)
    if levels:  # many equal probabilities
        logits = (logits * levels / 4).round() * 4 / levels
    check_truncation(logits, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.95),
        SamplingParams(top_p=0.999),
        SamplingParams(min_p=1e-3),
        SamplingParams(min_p=1e-9),
        SamplingParams(top_k=1023),
        SamplingParams(top_k=1024),
        SamplingParams(top_k=9000, top_p=0.999),
        SamplingParams(top_k=19_000),
    ],
)
@pytest.mark.parametrize("levels", [0, 8])
def test_cuts_deeper_than_the_candidates(params: SamplingParams, levels: int) -> None:
    logits = noise(1, 20_000) / 2
    if levels:
        logits = (logits * levels).round() / levels
    check_truncation(logits, params)


def check_truncation(logits: Tensor, params: SamplingParams) -> None:
    probs = logits.softmax(-1)
    expected = kept_by_sorting(probs[0], params)
    cut = probs.clone()
    apply_cut(cut, Cut.of([params], probs))
    kept = cut[0].nonzero().flatten().tolist()
    possible = [token_id for token_id in expected if probs[0, token_id] > 0]
    assert kept == possible
    assert torch.equal(cut[0, kept], probs[0, kept])


def test_rows_of_one_batch_are_cut_each_by_its_own_parameters() -> None:
    probs = noise(6, 3000).softmax(-1)
    params = [
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.9999),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=2000, top_p=0.999999),
        SamplingParams(top_p=0.3),
        SamplingParams(top_k=40, top_p=0.8, min_p=0.01),
    ]
    cut = probs.clone()
    apply_cut(cut, Cut.of(params, probs))
    for row, wanted in enumerate(params):
        assert cut[row].nonzero().flatten().tolist() == kept_by_sorting(probs[row], wanted)


def test_truncation_agrees_with_transformers() -> None:
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = noise(20, 500)
    none = torch.zeros(20, 1, dtype=torch.int64)
    warped = MinPLogitsWarper(0.001)(none, logits)
    warped = TopKLogitsWarper(60)(none, warped)
    warped = TopPLogitsWarper(0.9)(none, warped)
    probs = logits.softmax(-1)
    params = SamplingParams(min_p=0.001, top_k=60, top_p=0.9)
    apply_cut(probs, Cut.of([params] * 20, probs))
    assert torch.equal(probs > 0, warped.isfinite())


# The draw


@SLOW
@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 50),
    vocab=st.sampled_from([1, 5, 127, 128, 300, 1280]),
    params=st.sampled_from([{}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.05, "top_p": 0.9}]),
)
def test_a_draw_inverts_the_distribution_function(
    seed: int, position: int, vocab: int, params: dict[str, Any]
) -> None:
    logits = noise(1, vocab, seed % 1000)
    seq = make(output=[0] * position, seed=seed, temperature=TEMPERATURE, **params)
    token_id = draw(logits, seq)[0].token_id
    probs = ((logits - logits.amax()) / TEMPERATURE).softmax(-1)[0]
    kept = kept_by_sorting(probs, seq.sampling)
    assert token_id in kept
    weights = probs.double()
    total = weights[kept].sum()
    below = sum(weights[other] for other in kept if other < token_id) / total
    u = uniform(seed, position)
    assert below - 1e-6 <= u <= below + weights[token_id] / total + 1e-6


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.95}, {"top_k": 20}, {"temperature": 1.7, "min_p": 0.01}]
)
def test_drawn_tokens_follow_the_distribution(params: dict[str, Any]) -> None:
    vocab, positions = 300, 4000
    logits = noise(1, vocab, seed=5) / 2
    tokens = [0] * (positions + 1)
    counts: Counter[int] = Counter()
    drawn: list[int] = []
    for start in range(0, positions, 500):
        sequences = []
        for position in range(start, start + 500):
            seq = make(seed=1234, **params)
            seq.tokens, seq.prompt_length = tokens, len(tokens) - position
            assert seq.num_output == position
            sequences.append(seq)
        for result in draw(logits.expand(500, -1), *sequences):
            assert result.token_id is not None
            drawn.append(result.token_id)
    counts.update(drawn)
    sampling = SamplingParams(**params)
    probs = (logits / sampling.temperature).softmax(-1)[0]
    kept = kept_by_sorting(probs, sampling)
    weights = (probs[kept] / probs[kept].sum()).tolist()
    assert set(counts) <= set(kept)
    check_fit([counts[token_id] for token_id in kept], [positions * w for w in weights])
    # and one draw says nothing about the next
    likely = [p > 0.5 for p in torch.tensor(weights).cumsum(0).tolist()]
    half = {token_id for token_id, later in zip(kept, likely, strict=True) if later}
    share = sum(token_id in half for token_id in drawn) / positions
    pairs = Counter((a in half, b in half) for a, b in zip(drawn[::2], drawn[1::2], strict=True))
    expected = {True: share, False: 1 - share}
    cells = [(a, b) for a in (True, False) for b in (True, False)]
    check_fit(
        [pairs[cell] for cell in cells],
        [positions / 2 * expected[a] * expected[b] for a, b in cells],
    )


def check_fit(observed: list[int], expected: list[float]) -> None:
    """Pearson's test with rare outcomes pooled; a true null passes but once in 10,000."""
    pairs = sorted(zip(expected, observed, strict=True))
    rare = [pair for pair in pairs if pair[0] < 5]
    pairs = [pair for pair in pairs if pair[0] >= 5]
    if sum(e for e, _ in rare) >= 5:
        pairs.append((sum(e for e, _ in rare), sum(o for _, o in rare)))
    statistic = sum((o - e) ** 2 / e for e, o in pairs)
    freedom = len(pairs) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert freedom >= 3
    assert statistic < limit


def test_uniform_is_a_fixed_function_of_seed_and_position() -> None:
    assert uniform(42, 0) == uniform(42, 0)
    assert [uniform(42, 0), uniform(42, 1), uniform(-7, 0)] == [
        0.8257553219088898,
        0.21521194530070598,
        0.6043689138975195,
    ]
    draws = {uniform(seed, position) for seed in range(30) for position in range(30)}
    assert len(draws) == 900
    assert all(0 <= draw < 1 for draw in draws)
    assert uniform(1, 11) != uniform(11, 1) != uniform(111, 0)


@SLOW
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-8, 0.1, 0.5]), min_size=1, max_size=400),
    u=st.floats(0, 1, exclude_max=True),
)
@example(weights=[0.0] * 200 + [1.0] + [0.0] * 200, u=0.0)
@example(weights=[0.0] * 200 + [1.0] + [0.0] * 200, u=1 - 2.0**-53)
@example(weights=[1.0] * 128 + [0.0], u=1 - 2.0**-53)
@example(weights=[0.0] * 128 + [1e-45], u=0.5)
@example(weights=[0.1] * 385, u=1 - 2.0**-53)
def test_no_draw_picks_a_token_without_weight(weights: list[float], u: float) -> None:
    row = torch.tensor([weights])
    if not row.count_nonzero():
        return
    token_id = int(invert(row, torch.tensor([u], dtype=torch.float64)))
    assert row[0, token_id] > 0
    if u == 0:
        assert token_id == row[0].nonzero()[0]
    if u == 1 - 2.0**-53 and row[0].count_nonzero() == 1:
        assert token_id == row[0].nonzero()[-1]


def test_rounding_leaves_no_negative_rest() -> None:
    weights = torch.rand(200, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = weights.cumsum(1)[:, 20:21].contiguous()
    place, rest = _locate(weights, target)
    assert place.flatten().tolist() == [21] * 200
    assert rest.min() == 0
