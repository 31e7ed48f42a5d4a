from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engine.sampler import LOGPROB_FLOOR
from support.sampling import draw, make, noise, pick, sampler

SLOW = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])

# Greedy


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    assert pick([0.0, 5.0, 5.0, 1.0], temperature=0.0) == 1
    wide = torch.zeros(2, 1000)
    wide[0, [999, 500, 700]] = 2.0
    results = draw(wide, make(temperature=0.0), make(temperature=0.0))
    assert [result.token_id for result in results] == [500, 0]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-12},
        {"temperature": 1e-4},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"top_p": 0.0},
        {"min_p": 1.0},
    ],
)
def test_what_leaves_one_token_agrees_with_greedy(params: dict[str, Any]) -> None:
    logits = noise(8, 300)
    results = draw(logits, *(make(seed=row, **params) for row in range(8)))
    assert [result.token_id for result in results] == logits.argmax(-1).tolist()


def test_top_k_1_breaks_ties_as_greedy_does() -> None:
    logits = torch.zeros(32, 500)
    assert {r.token_id for r in draw(logits, *(make(seed=s, top_k=1) for s in range(32)))} == {0}


def test_extreme_logits_stay_drawable() -> None:
    logits = torch.full((3, 200), -math.inf)
    logits[0, 7], logits[0, 9] = 3e38, -3e38
    logits[1, 5] = -3e38
    logits[2, :2] = 1e30
    results = draw(logits, *(make(seed=s, temperature=0.5, logprobs=2) for s in range(3)))
    assert [result.token_id for result in results[:2]] == [7, 5]
    assert results[2].token_id in (0, 1)
    for result in results:
        assert result.logprob is not None
        for number in (result.logprob.logprob, *(n for _, n in result.logprob.top)):
            assert LOGPROB_FLOOR <= number <= 0


# Edits of the logits


def test_min_tokens_holds_back_every_end_id() -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0]] * 3)
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (2,)}
    results = draw(
        logits,
        make(output=[4], **params),
        make(output=[4, 4], **params),
        make(output=[4], ignore_eos=True, **params),
        eos=(0, 1),
    )
    assert [result.token_id for result in results] == [3, 0, 3]


def test_ignore_eos_alone_masks_nothing() -> None:
    result = draw(torch.tensor([[9.0, 1.0]]), make(temperature=0.0, ignore_eos=True), eos=(0,))
    assert result[0].token_id == 0


def test_logit_bias_reaches_its_own_row_only() -> None:
    logits = torch.zeros(3, 200)
    logits[:, 5] = 50.0
    logits[:, 8] = 40.0
    banned = make(temperature=0.0, logit_bias=((5, -100.0),))
    plain = make(temperature=0.0)
    assert [r.token_id for r in draw(logits, plain, banned, plain)] == [5, 8, 5]
    wanted = make(seed=4, logit_bias=((9, 100.0),))
    assert [r.token_id for r in draw(logits, banned, plain, wanted)] == [8, 5, 9]


def test_ids_outside_the_vocabulary_do_no_harm() -> None:
    logits = noise(2, 50)
    odd = make(
        temperature=0.0,
        logit_bias=((10**9, 5.0), (-1, 5.0)),
        stop_token_ids=(10**9, -3),
        min_tokens=4,
        repetition_penalty=1.5,
    )
    results = draw(logits, odd, make(temperature=0.0), eos=(10**6,))
    assert [result.token_id for result in results] == logits.argmax(-1).tolist()


@SLOW
@given(
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=8),
    output=st.lists(st.integers(0, 19), max_size=12),
    repetition=st.sampled_from([1.0, 0.5, 1.2, 2.0]),
    presence=st.sampled_from([0.0, -2.0, 0.7]),
    frequency=st.sampled_from([0.0, -0.5, 1.1]),
    seed=st.integers(0, 1000),
)
def test_penalties_follow_their_formulas(
    *,
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    seed: int,
) -> None:
    seq = make(
        prompt,
        output,
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=((3, 1.5),),
    )
    logits = noise(1, 20, seed)
    expected = logits[0].double().tolist()
    expected[3] += 1.5
    for token_id in set(prompt + output):
        score = expected[token_id]
        expected[token_id] = score / repetition if score > 0 else score * repetition
    for token_id in set(output):
        expected[token_id] -= frequency * output.count(token_id) + presence
    row = logits[0].clone()
    sampler(20)._edit(row, seq)
    assert row.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert draw(logits, seq)[0].token_id == int(row.argmax())


def test_repetition_penalty_agrees_with_transformers() -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = noise(1, 30)
    tokens = [1, 4, 4, 9, 28]
    row = logits[0].clone()
    sampler(30)._edit(row, make(tokens[:2], tokens[2:], repetition_penalty=1.7))
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())
    assert torch.allclose(row, wanted[0])


def test_presence_and_frequency_penalties_ignore_the_prompt() -> None:
    logits = torch.tensor([[3.0, 2.5, 0.0]])
    unseen = make(prompt=[0, 0, 0], temperature=0.0, presence_penalty=1.0, frequency_penalty=1.0)
    seen = make(prompt=[2], output=[0], temperature=0.0, presence_penalty=1.0)
    assert draw(logits, unseen)[0].token_id == 0
    assert draw(logits, seen)[0].token_id == 1


def test_penalties_are_the_same_in_any_order_of_admission() -> None:
    logits = noise(2, 400)
    best = [int(i) for i in logits[0].topk(3).indices]
    penalised = make(
        prompt=[1], output=best[:2], temperature=0.0, frequency_penalty=2.0, repetition_penalty=2.0
    )
    plain = make(prompt=best * 20, temperature=0.0)
    solo = draw(logits[:1], penalised)[0], draw(logits[1:], plain)[0]
    assert tuple(draw(logits, penalised, plain)) == solo
    assert tuple(reversed(draw(logits.flip(0), plain, penalised))) == solo


# Log-probabilities


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = noise(1, 300)
    seq = make(
        output=[3, 3],
        temperature=0.3,
        top_k=5,
        logprobs=4,
        logit_bias=((7, 100.0),),
        frequency_penalty=1.0,
    )
    result = draw(logits, seq)[0]
    raw = logits[0].double().log_softmax(-1)
    assert result.token_id == 7
    assert result.logprob is not None
    assert result.logprob.token_id == 7
    assert result.logprob.logprob == pytest.approx(float(raw[7]), abs=1e-5)
    best = raw.topk(4)
    assert [token_id for token_id, _ in result.logprob.top] == best.indices.tolist()
    values = [value for _, value in result.logprob.top]
    assert values == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_are_given_to_those_who_ask() -> None:
    logits = noise(3, 300)
    plain, none, two = draw(
        logits,
        make(temperature=0.0),
        make(temperature=0.0, logprobs=0),
        make(temperature=0.0, logprobs=2),
    )
    assert plain.logprob is None
    assert none.logprob is not None
    assert none.logprob.top == ()
    assert two.logprob is not None
    assert len(two.logprob.top) == 2
    assert two.logprob.top[0] == (two.token_id, two.logprob.logprob)


@pytest.mark.parametrize("vocab", [40, 3000])
def test_equal_logprobs_come_lowest_id_first(vocab: int) -> None:
    logits = torch.zeros(2, vocab)
    logits[0, [30, 20, 10]] = 1.0
    wide, flat = draw(logits, make(temperature=0.0, logprobs=5), make(temperature=0.0, logprobs=3))
    assert wide.logprob is not None
    assert flat.logprob is not None
    assert [token_id for token_id, _ in wide.logprob.top] == [10, 20, 30, 0, 1]
    assert [token_id for token_id, _ in flat.logprob.top] == [0, 1, 2]


def test_more_logprobs_than_tokens_and_impossible_ones() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    score = draw(logits, make(temperature=0.0, logprobs=20))[0].logprob
    assert score is not None
    assert score.top[2] == (1, LOGPROB_FLOOR)
    assert [value for _, value in score.top[:2]] == pytest.approx([math.log(0.5)] * 2)
    assert len(score.top) == 3


@pytest.mark.parametrize("k", [0, 5])
def test_prompt_scores_equal_those_of_single_rows_and_of_sampling(k: int) -> None:
    rows = 150
    logits = noise(rows, 400)
    ids = logits.argmax(-1).tolist()
    scores = sampler(400).score(logits, ids, k)
    assert len(scores) == rows
    single = [sampler(400).score(logits[r : r + 1], ids[r : r + 1], k)[0] for r in range(rows)]
    assert list(scores) == single
    drawn = draw(logits, *(make(temperature=0.0, logprobs=k) for _ in range(rows)))
    assert [result.logprob for result in drawn] == single


def test_prompt_scores_of_broken_logits_say_so() -> None:
    logits = noise(2, 50)
    logits[1, 4] = math.nan
    good, bad = sampler(50).score(logits, [1, 2], 3)
    assert math.isfinite(good.logprob)
    assert math.isnan(bad.logprob)
