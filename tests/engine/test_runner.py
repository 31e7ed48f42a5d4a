"""What the runner owes the loop: plan order, prompt scores, and one failure staying alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.engine.base import RawLogprob, Sampled
from headrace.engine.kernels.base import Kernels
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.weights import LoadedModel
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import StepPlan
from support.decoders import (
    VOCAB,
    Driver,
    loaded_model,
    prompt,
    reference_model,
    reference_tokens,
)

NAME = "llama"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded_model(NAME, tmp_path_factory.mktemp(NAME))


def test_outcomes_come_in_the_plans_order(model: LoadedModel) -> None:
    driver = Driver(model)
    half = driver.sequence(prompt(40))
    whole = [driver.sequence(prompt(length)) for length in (33, 1, 5)]
    outcomes = driver.step(
        driver.chunk(whole[0]),
        driver.chunk(half, 20),
        driver.chunk(whole[1]),
        driver.chunk(whole[2]),
    )
    assert outcomes[1] == Sampled()
    wanted = [reference_tokens(NAME, sequence.tokens[:-1], 1)[0] for sequence in whole]
    assert [outcomes[at].token_id for at in (0, 2, 3)] == wanted


def test_empty_plan(model: LoadedModel) -> None:
    assert Driver(model).step() == []


@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_prompt_scores(model: LoadedModel, size: int) -> None:
    """One score for each prompt token after the first, whatever the chunks; none beyond."""
    tokens = prompt(80)
    driver = Driver(model, sampler=Sampler(VOCAB, (), torch.device("cpu")))
    subject = driver.sequence(tokens, echo=True, prompt_logprobs=2)
    other = driver.sequence(prompt(9))
    scores: list[RawLogprob] = []
    sampled = []
    driver.step(driver.chunk(other))
    while subject.num_output < 3:
        outcomes = driver.step(driver.chunk(other), driver.chunk(subject, size))
        assert outcomes[0].prompt_logprobs == ()
        scores += outcomes[1].prompt_logprobs
        sampled.append(outcomes[1].token_id)
    assert sampled[-3:] == subject.tokens[80:]
    assert [score.token_id for score in scores] == tokens[1:]
    with torch.no_grad():
        logits = reference_model(NAME)(torch.tensor([tokens])).logits[0]
    wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor([score.logprob for score in scores]), wanted, rtol=1e-3, atol=1e-3
    )
    assert all(len(score.top) == 2 for score in scores)


@pytest.mark.parametrize("bad", [VOCAB, -1, 10**9])
def test_a_bad_token_ends_its_own_sequence(model: LoadedModel, bad: int) -> None:
    driver = Driver(model)
    good, guilty = driver.sequence(prompt(5)), driver.sequence([1, bad, 2])
    outcomes = driver.step(driver.chunk(guilty), driver.chunk(good))
    assert outcomes[0].error is not None
    assert outcomes[1].token_id == reference_tokens(NAME, prompt(5), 1)[0]
    assert driver.step(driver.chunk(driver.sequence([bad])))[0].error is not None


def test_a_short_block_table_ends_its_own_sequence(model: LoadedModel) -> None:
    driver = Driver(model)
    good, guilty = driver.sequence(prompt(5)), driver.sequence(prompt(40))
    chunk = driver.chunk(guilty)
    guilty.block_table.pop()
    outcomes = driver.step(chunk, driver.chunk(good))
    assert outcomes[0].error is not None
    assert outcomes[1].error is None


class Sabotage:
    """Makes the decoder fail whenever a step holds this token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token: int, how: str) -> None:
        forward = Decoder.forward

        def failing(decoder: Decoder, tokens: Tensor, *rest: Any) -> Tensor:
            if how == "raise" and token in tokens.tolist():
                raise RuntimeError("no memory")
            hidden = forward(decoder, tokens, *rest)
            hidden[tokens == token] = float("nan")
            return hidden

        monkeypatch.setattr(Decoder, "forward", failing)


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_failing_chunk_leaves_the_others_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    poison = 77
    clean = [token for token in prompt(30) if token != poison]
    wanted = reference_tokens(NAME, clean, 2)
    Sabotage(monkeypatch, poison, how)
    driver = Driver(model)
    good, also = driver.sequence(clean), driver.sequence(clean)
    guilty = driver.sequence([1, poison, 2])
    outcomes = driver.step(driver.chunk(good), driver.chunk(guilty), driver.chunk(also))
    assert [outcome.error is None for outcome in outcomes] == [True, False, True]
    driver.step(driver.chunk(good), driver.chunk(also))
    assert good.tokens[len(clean) :] == also.tokens[len(clean) :] == wanted


def test_if_everything_fails_it_is_the_engine(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sabotage(monkeypatch, 77, "raise")
    driver = Driver(model)
    pair = [driver.chunk(driver.sequence([77, 1])), driver.chunk(driver.sequence([77, 2]))]
    for plan in (StepPlan((pair[0],)), StepPlan(tuple(pair))):
        handle = driver.runner.launch(plan)
        with pytest.raises(RuntimeError, match="no memory"):
            driver.runner.collect(handle)


def test_logits_that_are_not_finite_fail_their_row(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Decoder.logits

    def spoilt(decoder: Decoder, hidden: Tensor, kernels: Kernels) -> Tensor:
        logits = head(decoder, hidden, kernels)
        logits[1, 5] = float("inf")
        return logits

    monkeypatch.setattr(Decoder, "logits", spoilt)
    driver = Driver(model, sampler=Sampler(model.config.vocab_size, [], model.decoder.device))
    outcomes = driver.step(*(driver.chunk(driver.sequence([token])) for token in (1, 2, 3)))
    assert [outcome.error is None for outcome in outcomes] == [True, False, True]


def test_values_that_are_not_finite_do_not_outlive_their_sequence(
    model: LoadedModel,
) -> None:
    """The next owner of a block is not touched by what was left in it, but who shares it as a
    prefix is told: zeros in its place would make a wrong answer."""
    clean = prompt(40)
    wanted = reference_tokens(NAME, clean[:5], 3)
    driver = Driver(model, num_blocks=2)
    guilty = driver.sequence(clean[:18])
    driver.step(driver.chunk(guilty))
    driver.cache.blocks[guilty.block_table] = float("nan")
    assert driver.step(driver.chunk(guilty))[0].error is not None
    sharer = driver.sequence(clean[:17])
    sharer.block_table, sharer.num_computed = list(guilty.block_table), 16
    assert driver.step(driver.chunk(sharer))[0].error is not None
    driver.drop(guilty)
    assert driver.generate(driver.sequence(clean[:5]), 3) == wanted
