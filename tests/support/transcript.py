"""Plays a list of sampled tokens through the output stage and writes down what the client gets."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer

from headrace.core.events import FinishReason, TokenLogprob
from headrace.core.request import SamplingParams
from headrace.engine.base import RawLogprob, Sampled
from headrace.engine.output import OutputProcessor
from headrace.engine.sequence import Chunk, Sequence
from headrace.engine.vocabulary import byte_alphabet
from headrace.engine.wire import Output
from support.text_models import byte_level

WORDS = ("ABC", "DEF", "HIJ", "xSTOPy", "bye", "\nUse", "\nUs", "ful tips", "r: hello", "<stop>")

_ALPHABET = byte_alphabet()


@cache
def words() -> Tokenizer:
    """A byte-level tokenizer that has each of WORDS as one ordinary token. Do not change it."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return tokenizer


def token(text: str) -> int:
    token_id = words().token_to_id(text)
    assert token_id is not None, text
    return token_id


def spell(text: str) -> list[int]:
    """The text byte by byte, one token each."""
    return [token(_ALPHABET[byte]) for byte in text.encode()]


END, TURN, END_OF_TURN = (token(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))


@dataclass
class Transcript:
    """What one client got."""

    outputs: list[Output] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for output in self.outputs for entry in output.logprobs or []]

    @property
    def finish(self) -> FinishReason | None:
        return self.outputs[-1].finish

    @property
    def stop(self) -> str | int | None:
        return self.outputs[-1].stop

    def add(self, output: Output | None) -> bool:
        """Whether the sequence goes on."""
        if output is not None:
            self.outputs.append(output)
        return output is None or (output.finish is None and output.error is None)


def make(
    prompt: Many[int] = (5, 6), number: int = 1, max_length: int = 1000, **params: Any
) -> Sequence:
    echo = params.pop("echo", False)
    return Sequence(
        id=number,
        group=number,
        prompt_length=len(prompt),
        tokens=list(prompt),
        sampling=SamplingParams(**params),
        seed=0,
        max_length=max_length,
        echo=echo,
    )


def processor(eos: Many[int] = (END, END_OF_TURN)) -> OutputProcessor:
    return OutputProcessor(words(), eos)


def score(token_id: int, *top: int) -> RawLogprob:
    return RawLogprob(token_id, -0.25, tuple((best, -0.5) for best in top))


def advance(
    stage: OutputProcessor, seq: Sequence, length: int, token_id: int | None, k: int | None = None
) -> Output | None:
    """Commits a chunk of `length` tokens, sampling `token_id` at its end, and processes it."""
    chunk = Chunk(seq, seq.num_computed, length, samples=token_id is not None)
    seq.num_computed += length
    logprob = None
    if token_id is not None:
        assert seq.num_computed == len(seq.tokens)
        seq.tokens.append(token_id)
        if seq.sampling.logprobs is not None:
            logprob = score(token_id, *range(seq.sampling.logprobs))
    scores: tuple[RawLogprob, ...] = ()
    if seq.needs_prompt_logprobs:
        last = min(chunk.start + length, seq.prompt_length - 1)
        positions = range(chunk.start + 1, last + 1)
        scores = tuple(score(seq.tokens[at], *range(k or 0)) for at in positions)
    return stage.process(chunk, Sampled(token_id, logprob, scores))


def play(
    sampled: Many[int],
    *,
    stage: OutputProcessor | None = None,
    seq: Sequence | None = None,
    **params: Any,
) -> Transcript:
    """The prompt in one chunk, then a token a step until the sequence ends."""
    stage = stage or processor()
    seq = seq or make(**params)
    stage.begin(seq)
    transcript = Transcript()
    goes_on = True
    for token_id in sampled:
        assert goes_on, "a token was sampled after the end"
        goes_on = transcript.add(advance(stage, seq, len(seq.tokens) - seq.num_computed, token_id))
    if not goes_on:
        assert stage.process(Chunk(seq, seq.num_computed, 1, samples=True), Sampled(5)) is None
    stage.forget(seq)
    for output in transcript.outputs:
        assert output.error is None
        if seq.sampling.logprobs is not None:
            assert [entry.token_id for entry in output.logprobs or []] == output.token_ids
        for entry in output.logprobs or []:
            assert all(
                one.logprob is not None and math.isfinite(one.logprob)
                for one in (entry, *entry.top)
            )
    assert transcript.token_ids == list(sampled)
    return transcript
