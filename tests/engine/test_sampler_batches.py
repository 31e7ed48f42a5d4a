"""A row's outcome depends on that row alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headrace.engine.base import Sampled
from headrace.engine.draw import _block_sums
from support.sampling import draw, make, noise, sampler, threads

MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "logprobs": 3},
    {"top_p": 0.9, "temperature": 1.3},
    {"top_p": 0.9999, "temperature": 5.0},
    {"top_k": 40, "logprobs": 0},
    {"min_p": 0.05, "top_k": 7, "top_p": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 20},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.95},
    {"logit_bias": ((5, -100.0), (9, 3.0))},
    {"min_tokens": 9, "stop_token_ids": (3,), "temperature": 0.0},
]


@pytest.mark.parametrize("vocab", [640, 1031, 49_152 + 3])
@pytest.mark.parametrize("count", [1, 2])
def test_a_row_alone_and_in_any_batch_is_the_same_bit_for_bit(vocab: int, count: int) -> None:
    rows = len(MIXED)
    logits = noise(rows, vocab, seed=3)
    sequences = [
        make(prompt=[1, 2, row], output=[4, row, 4], seed=row * 7 + 1, **params)
        for row, params in enumerate(MIXED)
    ]
    with threads(count):
        alone = [draw(logits[row : row + 1], sequences[row], eos=(2, 6))[0] for row in range(rows)]
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist()
        together = draw(logits[order], *(sequences[row] for row in order), eos=(2, 6))
        assert together == [alone[row] for row in order]
        for row in range(rows):
            neighbours = noise(4, vocab, seed=90 + row)
            others = [make(seed=900 + at + row, **MIXED[(row + at) % rows]) for at in range(4)]
            place = row % 5
            block = torch.cat((neighbours[:place], logits[row : row + 1], neighbours[place:]))
            batch = [*others[:place], sequences[row], *others[place:]]
            assert draw(block, *batch, eos=(2, 6))[place] == alone[row]
    assert all(result.error is None for result in alone)


@pytest.mark.parametrize("vocab", [100, 640, 1031, 49_152 + 3])
@pytest.mark.parametrize("count", [1, 2])
def test_sums_behind_a_draw_are_the_same_bits_in_any_batch(vocab: int, count: int) -> None:
    logits = noise(9, vocab)
    with threads(count):
        probs = logits.softmax(-1)
        sums = _block_sums(probs)
        for row in range(9):
            alone = logits[row : row + 1].softmax(-1)
            assert torch.equal(alone[0], probs[row])
            assert torch.equal(_block_sums(alone)[0], sums[row])


def test_a_batch_of_one_kind_is_the_same_as_its_rows() -> None:
    logits = noise(40, 2000)
    for params in MIXED:
        sequences = [make(prompt=[1, 2], output=[3], seed=row, **params) for row in range(40)]
        alone = [draw(logits[row : row + 1], sequences[row])[0] for row in range(40)]
        with threads(2):
            assert draw(logits, *sequences) == alone


def test_seeds_and_positions_make_choices_differ_and_repeat() -> None:
    logits = torch.zeros(64, 5000)
    first = [r.token_id for r in draw(logits, *(make(seed=s) for s in range(64)))]
    again = [r.token_id for r in draw(logits, *(make(seed=s) for s in range(64)))]
    later = [r.token_id for r in draw(logits, *(make(seed=s, output=[1]) for s in range(64)))]
    assert first == again
    assert len(set(first)) > 50
    assert sum(a != b for a, b in zip(first, later, strict=True)) > 60


def test_preemption_cannot_change_the_outcome() -> None:
    logits = noise(1, 1000)
    kept = make(prompt=[1, 2], output=[3, 4], seed=5, frequency_penalty=0.3, top_p=0.9)
    preempted = make(prompt=[1, 2], output=[3, 4], seed=5, frequency_penalty=0.3, top_p=0.9)
    kept.num_computed, kept.block_table = 3, [1]
    preempted.num_preemptions = 2
    assert draw(logits, kept) == draw(logits, preempted)


def test_the_callers_logits_are_left_as_they_were() -> None:
    logits = noise(len(MIXED), 700)
    before = logits.clone()
    draw(logits, *(make(output=[3, 4], **params) for params in MIXED), eos=(2,))
    draw(logits[:1], make(min_tokens=3, logit_bias=((1, 5.0),)), eos=(2,))
    assert torch.equal(logits, before)


# Rows that cannot be used


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {},
        {"top_p": 0.5},
        {"logprobs": 2},
        {"logit_bias": ((1, 2.0),), "min_tokens": 5},
    ],
)
def test_an_unusable_row_fails_alone(value: float, params: dict[str, Any]) -> None:
    logits = noise(3, 300)
    alone = draw(logits[:1], make(seed=1, **params))[0]
    logits[1] = value
    before, bad, after = draw(logits, *(make(seed=1, **params) for _ in range(3)), eos=(2,))
    assert bad.token_id is None
    assert bad.error
    assert before.error is None
    assert after.error is None
    if "min_tokens" not in params:
        assert before == alone


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_single_bad_value_spoils_its_row(value: float) -> None:
    logits = noise(1, 300)
    logits[0, 17] = value
    for params in ({"temperature": 0.0}, {}, {"min_tokens": 1, "stop_token_ids": (17,)}):
        assert draw(logits, make(**params))[0].error


def test_a_row_whose_every_token_is_held_back_fails_alone() -> None:
    stuck = make(min_tokens=3, stop_token_ids=(0, 1, 2))
    results = draw(torch.zeros(2, 3), stuck, make(temperature=0.0))
    assert results[0].error
    assert results[1] == Sampled(0)


def test_a_wrong_shape_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="logits"):
        draw(torch.zeros(2, 5), make())
    with pytest.raises(ValueError, match="logits"):
        sampler(5).score(torch.zeros(2, 5), [1], 0)
    assert sampler(5).sample(torch.zeros(0, 5), []) == []
