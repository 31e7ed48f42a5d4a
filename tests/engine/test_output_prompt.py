"""Starting, echo, recomputation after preemption, and failures of the output stage."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.events import FinishReason
from headrace.engine.base import Sampled
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.sequence import Chunk
from support.transcript import END, TURN, advance, make, play, processor, spell, token

LENGTH = FinishReason.LENGTH
BYE, USE = token("bye"), token("\nUse")

# The prompt


def test_a_chunk_says_something_only_when_there_is_something_to_say() -> None:
    stage, seq = processor(), make(prompt=spell("abcdef"))
    seq.num_computed = seq.cached_tokens = 2
    stage.begin(seq)
    first = advance(stage, seq, 1, None)
    assert first is not None
    assert (first.started, first.cached_tokens, first.token_ids) == (True, 2, [])
    assert advance(stage, seq, 2, None) is None
    last = advance(stage, seq, 1, BYE)
    assert last is not None
    assert (last.started, last.cached_tokens, last.text) == (False, 0, "bye")


@pytest.mark.parametrize("chunks", [[5], [1, 1, 1, 1, 1], [2, 3], [4, 1]])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_tells_the_prompt_once_with_its_scores(chunks: list[int], max_tokens: int) -> None:
    prompt = spell("A Bé")
    stage = processor()
    seq = make(
        prompt=prompt, echo=True, max_tokens=max_tokens, max_length=5 + max_tokens,
        logprobs=1, prompt_logprobs=1,
    )  # fmt: skip
    stage.begin(seq)
    outputs = [advance(stage, seq, length, None, 1) for length in chunks[:-1]]
    outputs.append(advance(stage, seq, chunks[-1], BYE, 1))
    told = [output for output in outputs if output is not None]
    assert all(output.prompt_text is None for output in told[:-1])
    last = told[-1]
    assert last.prompt_text == "A Bé"
    assert last.finish is LENGTH
    assert (last.text, last.token_ids) == (("bye", [BYE]) if max_tokens else ("", []))
    scores = last.prompt_logprobs
    assert scores is not None
    assert [entry.token_id for entry in scores] == prompt
    assert [entry.logprob for entry in scores] == [None, -0.25, -0.25, -0.25, -0.25]
    assert [len(entry.top) for entry in scores] == [0, 1, 1, 1, 1]
    assert b"".join(entry.raw for entry in scores).decode() == "A Bé"


def test_echo_without_logprobs_hides_special_tokens() -> None:
    got = play([BYE, BYE], prompt=[END, *spell("hi"), TURN], echo=True)
    assert [output.prompt_text for output in got.outputs] == ["hi", None]
    assert got.outputs[0].prompt_logprobs is None
    assert got.outputs[0].started


def test_a_prompt_of_one_token_has_no_score() -> None:
    got = play([BYE], prompt=spell("a"), echo=True, prompt_logprobs=0)
    scores = got.outputs[0].prompt_logprobs
    assert scores is not None
    assert [(entry.text, entry.logprob) for entry in scores] == [("a", None)]


def test_a_prompt_computed_again_after_preemption_is_told_once() -> None:
    stage, seq = processor(), make(prompt=spell("abcdef"), echo=True, prompt_logprobs=0)
    stage.begin(seq)
    outputs = [advance(stage, seq, 4, None)]
    seq.num_computed = 0
    outputs += [advance(stage, seq, 3, None), advance(stage, seq, 3, BYE)]
    seq.num_computed = 0
    outputs += [advance(stage, seq, 5, None), advance(stage, seq, 2, USE)]
    told = [output for output in outputs if output is not None]
    assert [output.started for output in told] == [True, False, False]
    assert [output.prompt_text for output in told] == [None, "abcdef", None]
    assert len(told[1].prompt_logprobs or []) == 6
    assert "".join(output.text for output in told) == "bye\nUse"


def test_prompt_tokens_without_scores_are_an_error_not_silence() -> None:
    stage, seq = processor(), make(prompt=spell("abcdef"), echo=True, prompt_logprobs=0)
    stage.begin(seq)
    seq.num_computed = 3
    output = advance(stage, seq, 3, BYE)
    assert output is not None
    assert output.error


def test_a_stop_pending_at_preemption_is_still_found() -> None:
    stage, seq = processor(), make(stop=("\nUser:",))
    stage.begin(seq)
    outputs = [advance(stage, seq, 2, BYE), advance(stage, seq, 1, USE)]
    seq.num_computed = 0
    outputs.append(advance(stage, seq, 4, token("r: hello")))
    texts = [output.text for output in outputs if output is not None]
    assert texts == ["bye", "", ""]
    assert outputs[-1] is not None
    assert outputs[-1].stop == "\nUser:"


# Failures


def test_a_failure_ends_its_own_sequence_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push = Detokenizer.push

    def breaks(self: Detokenizer, token_id: int) -> str:
        if token_id == USE:
            raise RuntimeError("quotes what the client wrote")
        return push(self, token_id)

    monkeypatch.setattr(Detokenizer, "push", breaks)
    stage, bad, good = processor(), make(number=1), make(number=2)
    stage.begin(bad)
    stage.begin(good)
    broken = advance(stage, bad, 2, USE)
    assert broken is not None
    assert broken.seq == 1
    assert broken.error
    assert "quotes" not in broken.error
    assert "RuntimeError" in caplog.text
    assert "quotes" not in caplog.text
    assert advance(stage, bad, 1, BYE) is None
    fine = advance(stage, good, 2, BYE)
    assert fine is not None
    assert (fine.seq, fine.text, fine.error) == (2, "bye", None)


def test_an_error_of_the_model_is_passed_on_and_ends_the_sequence() -> None:
    stage, seq = processor(), make()
    stage.begin(seq)
    output = stage.process(Chunk(seq, 0, 2, samples=True), Sampled(error="No."))
    assert output is not None
    assert output.error == "No."
    assert advance(stage, seq, 2, BYE) is None


def test_forgotten_sequences_are_silent() -> None:
    stage, seq = processor(), make()
    stage.begin(seq)
    stage.forget(seq)
    stage.forget(seq)
    assert advance(stage, seq, 2, BYE) is None


def test_sequences_do_not_share_text_that_is_held_back() -> None:
    stage = processor()
    first, second = make(number=1, stop=("\nUser:",)), make(number=2, stop=("\nUser:",))
    stage.begin(first)
    stage.begin(second)
    steps: list[Any] = [
        advance(stage, first, 2, USE),
        advance(stage, second, 2, token("r: hello")),
        advance(stage, first, 1, END),
    ]
    assert [(step.seq, step.text) for step in steps] == [(1, ""), (2, "r: hello"), (1, "\nUse")]
