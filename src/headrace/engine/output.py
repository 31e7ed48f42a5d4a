"""From sampled tokens to what a client is told: text, log-probabilities and the end.

What ends a sequence, in this order:
- nothing, for its first `min_tokens` tokens;
- an end id: one of the model's, unless `ignore_eos`, or of `stop_token_ids`, always. The end token
  is in `token_ids` and counts as a completion token, but its text is not shown. With
  `include_stop_str_in_output` the text of a stop token that is ordinary text is;
- a stop string in the text that follows the first `min_tokens` tokens. The text is cut before it,
  or right after it with `include_stop_str_in_output`; the tokens that spelt it stay in `token_ids`;
- `max_tokens` or the sequence's `max_length`. A stop that is complete at the last token allowed
  is a stop.
Whatever text was held back, as half a character or the beginning of a stop string, comes with the
end.

In log-probabilities `raw` is what a token adds to the text, so joined they spell the text of an
answer that no stop string cut: special tokens and end tokens that are not shown have none.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from headrace.core.events import FinishReason, TokenLogprob
from headrace.engine.base import RawLogprob, Sampled
from headrace.engine.detokenizer import Detokenizer, token_bytes, token_text
from headrace.engine.sequence import Chunk, Sequence
from headrace.engine.stops import StopMatcher
from headrace.engine.vocabulary import vocabulary
from headrace.engine.wire import Output

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["OutputProcessor"]

_FAILED = "The server could not turn this request's tokens into text."
_log = logging.getLogger(__name__)


class _Progress:
    """What one sequence's client has been told."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer) -> None:
        params = seq.sampling
        self.detokenizer = Detokenizer(tokenizer, prompt_tail=seq.tokens[: seq.prompt_length])
        self.stops = StopMatcher(params.stop, include=params.include_stop_str_in_output)
        self.started = False
        self.echoed = not seq.echo
        self.prompt_scores: list[RawLogprob] = []
        """Of the prompt's tokens 1, 2, ..., as far as computed."""


class OutputProcessor:
    """Owned by the engine loop. Call `begin` once, `process` for each committed chunk, `forget`
    at the end, however it came. Nothing is said after an output with `finish` or `error`."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Many[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._special_ids = vocabulary(tokenizer).special_ids
        self._progress: dict[int, _Progress | None] = {}
        self._spellings: dict[int, tuple[str, bytes]] = {}

    def begin(self, sequence: Sequence) -> None:
        self._progress[sequence.id] = _Progress(sequence, self._tokenizer)

    def forget(self, sequence: Sequence) -> None:
        """Unknown sequences are ignored."""
        self._progress.pop(sequence.id, None)

    def process(self, chunk: Chunk, sampled: Sampled) -> Output | None:
        """What the client gains by this chunk, or None if that is nothing.

        The plan is committed: a sampled token is already the last of `sequence.tokens`. A chunk
        computed again after preemption says nothing twice. Never raises: a failure is an output
        with `error`, for this sequence alone.
        """
        seq = chunk.sequence
        progress = self._progress.get(seq.id)
        if progress is None:
            return None
        if sampled.error is not None:
            output: Output | None = Output(seq=seq.id, error=sampled.error)
        else:
            try:
                output = self._advance(chunk, sampled, progress)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this sequence's alone
                _report(seq.id, error)
                output = Output(seq=seq.id, error=_FAILED)
        if output is not None and (output.finish is not None or output.error is not None):
            self._progress[seq.id] = None
        return output

    def _advance(self, chunk: Chunk, sampled: Sampled, progress: _Progress) -> Output | None:
        seq = chunk.sequence
        params = seq.sampling
        started = not progress.started
        progress.started = True
        if seq.needs_prompt_logprobs:
            _keep_scores(chunk, sampled, progress)
        prompt_text, prompt_logprobs = None, None
        if not progress.echoed and chunk.start + chunk.length >= seq.prompt_length:
            progress.echoed = True
            prompt = seq.tokens[: seq.prompt_length]
            prompt_text = self._tokenizer.decode(prompt, skip_special_tokens=True)
            if seq.needs_prompt_logprobs:
                prompt_logprobs = self._prompt_logprobs(prompt, progress)
        text, token_ids, logprobs = "", [], None
        finish: FinishReason | None = None
        stop: str | int | None = None
        if chunk.samples and params.max_tokens == 0:
            finish = FinishReason.LENGTH
        elif sampled.token_id is not None:
            token_ids = [sampled.token_id]
            text, finish, stop, shown = self._read(seq, sampled.token_id, progress)
            if params.logprobs is not None:
                logprobs = [self._logprob(sampled.token_id, sampled.logprob, shown=shown)]
        if not (started or token_ids or finish or prompt_text is not None):
            return None
        return Output(
            seq=seq.id,
            started=started,
            cached_tokens=seq.cached_tokens if started else 0,
            prompt_text=prompt_text,
            prompt_logprobs=prompt_logprobs,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish=finish,
            stop=stop,
        )

    def _read(
        self, seq: Sequence, token_id: int, progress: _Progress
    ) -> tuple[str, FinishReason | None, str | int | None, bool]:
        """The text that the newest token sets free, whether and by what it is the last, and
        whether it is itself part of the text."""
        params = seq.sampling
        past_minimum = seq.num_output > params.min_tokens
        is_stop_token = past_minimum and token_id in params.stop_token_ids
        is_eos = past_minimum and token_id in self._eos_token_ids and not params.ignore_eos
        ends = is_stop_token or is_eos
        shown = not ends or (not is_eos and params.include_stop_str_in_output)
        last = ends or _is_full(seq)
        text = progress.detokenizer.push(token_id) if shown else ""
        if last:
            text += progress.detokenizer.flush()
        match: str | None = None
        if past_minimum:
            text, match = progress.stops.push(text)
        if match is not None:
            return text, FinishReason.STOP, match, shown
        if last:
            text += progress.stops.flush()
        if ends:
            return text, FinishReason.STOP, None if is_eos else token_id, shown
        return text, FinishReason.LENGTH if last else None, None, shown

    def _prompt_logprobs(self, prompt: Many[int], progress: _Progress) -> list[TokenLogprob]:
        if len(progress.prompt_scores) != len(prompt) - 1:
            raise ValueError(
                f"{len(progress.prompt_scores)} scores for {len(prompt)} prompt tokens"
            )
        text, raw = self._spelling(prompt[0])
        first = TokenLogprob(token_id=prompt[0], text=text, raw=raw, logprob=None)
        rest = zip(prompt[1:], progress.prompt_scores, strict=True)
        return [first, *(self._logprob(token_id, score) for token_id, score in rest)]

    def _logprob(
        self, token_id: int, score: RawLogprob | None, *, shown: bool = True
    ) -> TokenLogprob:
        if score is None or score.token_id != token_id:
            raise ValueError("a token came without its log-probability")
        if not all(map(math.isfinite, (score.logprob, *(logprob for _, logprob in score.top)))):
            raise ValueError("a log-probability is not finite")
        text, raw = self._spelling(token_id)
        top = tuple(TokenLogprob(best, *self._spelling(best), value) for best, value in score.top)
        return TokenLogprob(token_id, text, raw if shown else b"", score.logprob, top)

    def _spelling(self, token_id: int) -> tuple[str, bytes]:
        """A token's name and what it adds to a text; kept, one entry for each of the vocabulary
        at most."""
        known = self._spellings.get(token_id)
        if known is None:
            special = token_id in self._special_ids
            raw = b"" if special else token_bytes(self._tokenizer, token_id)
            known = self._spellings[token_id] = token_text(self._tokenizer, token_id), raw
        return known


def _is_full(seq: Sequence) -> bool:
    limit = seq.sampling.max_tokens
    return len(seq.tokens) >= seq.max_length or (limit is not None and seq.num_output >= limit)


def _keep_scores(chunk: Chunk, sampled: Sampled, progress: _Progress) -> None:
    """Adds the chunk's scores of prompt tokens start + 1, ..., except those already there."""
    missing_from = len(progress.prompt_scores) - chunk.start
    if sampled.prompt_logprobs and missing_from < 0:
        raise ValueError("prompt tokens were passed over without a score")
    progress.prompt_scores += sampled.prompt_logprobs[missing_from:]


def _report(sequence_id: int, error: Exception) -> None:
    """Says where it failed, never with the message, which may quote a prompt or an answer."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    _log.error(
        "output of sequence %d failed: %s in %s, line %s",
        sequence_id,
        type(error).__name__,
        frame.name,
        frame.lineno,
    )
