"""From logits to the next token of each sequence.

The order of operations is vLLM's. Log-probabilities are of the raw logits. Then, on the logits:
min_tokens masks the end ids, logit_bias adds, the repetition penalty weighs ids of prompt and
output, frequency and presence penalties weigh ids of the output. Temperature 0 takes the largest
(the lowest id among equals). Otherwise the softmax of logits / temperature is cut by min_p, then
top_k, then top_p over what those two left; among equal probabilities at a cut the lower ids stay.
The draw inverts the distribution function over ids in ascending order.

Nothing is remembered between calls: edits come from `Sequence.tokens`, and randomness is a hash
of (seed, output position). A row's outcome depends on that row alone, so every reduction here is
one whose order of summation does not change with the number of rows or threads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from headrace.core.request import SamplingParams
from headrace.engine.base import RawLogprob, Sampled
from headrace.engine.draw import Cut, apply_cut, argmax, invert, take, uniform
from headrace.engine.sequence import Sequence

__all__ = ["LOGPROB_FLOOR", "Sampler"]

LOGPROB_FLOOR = -9999.0
"""Reported instead of anything smaller, -inf included: OpenAI's word for "very unlikely"."""

_GREEDY_BELOW = 1e-5
"""A smaller temperature is taken for 0: dividing by it would leave one token anyway."""

_SCORED_ROWS = 64
_UNUSABLE = "The model gave no usable scores for the next token of this request."


class Sampler:
    """Draws and scores tokens on `device`. Stateless, so safe from any thread.

    `eos_token_ids` are the model's own end ids, which min_tokens holds back along with the
    request's stop_token_ids.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Many[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """The next token of each sequence from its row of `logits` [rows, vocab], left unchanged.

        A row with NaN, +inf or nothing but -inf gives an error for its own sequence.
        """
        if logits.shape != (len(sequences), self._vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)} for {len(sequences)} sequences")
        logits = logits.detach().float()
        plain = [row for row, seq in enumerate(sequences) if not _is_edited(seq)]
        edited = [row for row, seq in enumerate(sequences) if _is_edited(seq)]
        results = [Sampled(error=_UNUSABLE)] * len(sequences)
        if plain:
            self._choose(take(logits, plain), plain, sequences, results)
        if edited:
            raw = logits[edited]
            usable = raw.amax(-1).isfinite().tolist()
            for row, seq in zip(raw, (sequences[row] for row in edited), strict=True):
                self._edit(row, seq)
            self._choose(raw, edited, sequences, results)
            for row, good in zip(edited, usable, strict=True):
                if not good:
                    results[row] = Sampled(error=_UNUSABLE)
        self._add_logprobs(logits, sequences, results)
        return results

    @torch.inference_mode()
    def score(self, logits: Tensor, next_token_ids: Many[int], k: int) -> tuple[RawLogprob, ...]:
        """Scores each row's actual next token, with the `k` best. NaN logits give NaN scores."""
        if logits.shape != (len(next_token_ids), self._vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)} for {len(next_token_ids)} tokens")
        scored: list[RawLogprob] = []
        for start in range(0, len(next_token_ids), _SCORED_ROWS):
            ids = next_token_ids[start : start + _SCORED_ROWS]
            rows = logits[start : start + _SCORED_ROWS].detach().float()
            scored += _raw_logprobs(rows, ids, [k] * len(ids))
        return tuple(scored)

    def _add_logprobs(
        self, logits: Tensor, sequences: list[Sequence], results: list[Sampled]
    ) -> None:
        asking, ids, counts = [], [], []
        for row, (seq, result) in enumerate(zip(sequences, results, strict=True)):
            if seq.sampling.logprobs is not None and result.token_id is not None:
                asking.append(row)
                ids.append(result.token_id)
                counts.append(seq.sampling.logprobs)
        if asking:
            scores = _raw_logprobs(take(logits, asking), ids, counts)
            for row, score in zip(asking, scores, strict=True):
                results[row] = Sampled(score.token_id, score)

    def _choose(
        self, logits: Tensor, rows: list[int], sequences: list[Sequence], results: list[Sampled]
    ) -> None:
        """Fills `results[rows]` from the edited logits of these rows."""
        best = argmax(logits)
        peak = logits.gather(1, best.unsqueeze(1))
        usable = peak.isfinite().squeeze(1).tolist()
        drawn = [
            at
            for at, row in enumerate(rows)
            if usable[at] and sequences[row].sampling.temperature >= _GREEDY_BELOW
        ]
        if drawn:
            drawing = [sequences[rows[at]] for at in drawn]
            choice = self._draw(take(logits, drawn), take(peak, drawn), drawing)
            best[torch.tensor(drawn, device=best.device)] = choice
        for at, (row, token_id) in enumerate(zip(rows, best.tolist(), strict=True)):
            if usable[at]:
                results[row] = Sampled(token_id)

    def _edit(self, row: Tensor, seq: Sequence) -> None:
        """Applies what the request asks for to its row of logits, in place."""
        params = seq.sampling
        if seq.num_output < params.min_tokens:
            ends = self._known({*self._eos_token_ids, *params.stop_token_ids})
            row[self._ids(ends)] = -math.inf
        if params.logit_bias:
            bias = dict(params.logit_bias)
            known = self._known(bias)
            row[self._ids(known)] += self._floats([bias[token_id] for token_id in known])
        if params.repetition_penalty != 1.0:
            seen = self._ids(self._known(set(seq.tokens)))
            scores = row[seen]
            penalty = params.repetition_penalty
            row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
        if (params.presence_penalty or params.frequency_penalty) and seq.num_output:
            counts = Counter(seq.tokens[seq.prompt_length :])
            weights = [
                params.frequency_penalty * count + params.presence_penalty
                for count in counts.values()
            ]
            row[self._ids(list(counts))] -= self._floats(weights)

    def _draw(self, logits: Tensor, peak: Tensor, sequences: list[Sequence]) -> Tensor:
        """One random token id a row; `peak` is each row's largest logit, finite."""
        temperatures = self._floats([seq.sampling.temperature for seq in sequences]).unsqueeze(1)
        probs = (logits - peak).div_(temperatures).softmax(-1)
        cut = [at for at, seq in enumerate(sequences) if _is_cut(seq.sampling)]
        if cut:
            kept = take(probs, cut)
            apply_cut(kept, Cut.of([sequences[at].sampling for at in cut], kept))
            if kept is not probs:
                probs[torch.tensor(cut, device=probs.device)] = kept
        draws = [uniform(seq.seed, seq.num_output) for seq in sequences]
        return invert(probs, torch.tensor(draws, dtype=torch.float64, device=self._device))

    def _known(self, token_ids: Many[int] | set[int] | dict[int, float]) -> list[int]:
        return [token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]

    def _ids(self, token_ids: list[int]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self._device)

    def _floats(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)


def _is_edited(seq: Sequence) -> bool:
    params = seq.sampling
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1.0
        or seq.num_output < params.min_tokens
        or ((params.presence_penalty or params.frequency_penalty) and seq.num_output)
    )


def _is_cut(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _raw_logprobs(logits: Tensor, token_ids: Many[int], counts: list[int]) -> list[RawLogprob]:
    """Log-probabilities of one token a row and of the row's `counts` best, lowest id first
    among equals."""
    vocab = logits.shape[1]
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).tolist()
    width = min(max(counts) + 1, vocab)
    values, ids = logits.topk(width, -1)
    scores = logprobs.gather(1, ids).tolist()
    scored = []
    for row, (value, best) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
        count = min(counts[row], vocab)
        order = sorted(range(width), key=lambda at: (-value[at], best[at]))
        top = [(best[at], _floored(scores[row][at])) for at in order[:count]]
        if count and width < vocab and value[count - 1] == value[-1]:
            # equals lie beyond the candidates: the lowest ids among them are looked up
            level = values[row, -1]
            above = sum(item > value[-1] for item in value)
            equal = (logits[row] == level).nonzero().flatten()[: count - above].tolist()
            score = _floored(scores[row][-1])
            top[above:] = [(token_id, score) for token_id in equal]
        scored.append(RawLogprob(token_ids[row], _floored(own[row][0]), tuple(top)))
    return scored


def _floored(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR)  # in this order NaN stays NaN
