"""Computes plans with the PyTorch decoder: packs, launches, samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine.base import RawLogprob, Sampled
from headrace.engine.batch import Span
from headrace.engine.kernels.base import Kernels
from headrace.engine.kv_cache import KVCache
from headrace.engine.models.weights import LoadedModel
from headrace.engine.sequence import Chunk, Sequence, StepPlan

__all__ = ["Sampling", "TorchRunner"]

_FAILED = "The engine failed on this request."
_NOT_FINITE = "The model produced values that are not finite for this request."
_SCORED_ROWS = 64
"""Prompt positions whose logits are held at once."""
_log = logging.getLogger(__name__)


class Sampling(Protocol):
    """What the runner needs of a sampler; `headrace.engine.sampler.Sampler` is the one.

    A row that has no distribution gets an error of its own.
    """

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]: ...

    def score(
        self, logits: Tensor, next_token_ids: Many[int], k: int
    ) -> tuple[RawLogprob, ...]: ...


@dataclass(slots=True)
class _Step:
    """A step under way. `order` is the plan's chunks as packed, `hidden` their rows; `finite`
    has one flag a row. `error` is what the launch raised."""

    plan: StepPlan
    order: list[int]
    hidden: Tensor | None = None
    finite: Tensor | None = None
    refused: dict[int, Sampled] | None = None
    error: Exception | None = None


class TorchRunner:
    """Implements `ModelRunner`. All calls come from the engine loop's thread.

    One sequence's failure is its own: chunks of a step that raises are run again each alone, and
    a row that is not finite gives an error for its sequence. If all of them fail, the step's
    exception is raised by `collect`, for then the fault is not theirs.
    """

    def __init__(
        self, model: LoadedModel, sampler: Sampling, cache: KVCache, kernels: Kernels
    ) -> None:
        self._model = model
        self._decoder = model.decoder
        self._sampler = sampler
        self._cache = cache
        self._kernels = kernels
        self._tainted: set[int] = set()
        """Blocks that may hold values that are not finite."""

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    def launch(self, plan: StepPlan) -> _Step:
        """Starts the forward pass. Reads tokens and block tables now, not later."""
        refused = {}
        for index, chunk in enumerate(plan.chunks):
            fault = self._fault(chunk)
            if fault is not None:
                _log.error("sequence %d: %s", chunk.sequence.id, fault)
                refused[index] = Sampled(error=_FAILED)
        # Decodes first, longest context first, so that similar lengths are attended together.
        order = sorted(
            (index for index in range(len(plan.chunks)) if index not in refused),
            key=lambda index: _packing_key(plan.chunks[index]),
        )
        step = _Step(plan, order, refused=refused)
        try:
            self._forward(step)
        except Exception as error:  # noqa: BLE001 - sorted out by collect
            step.error = error
        return step

    def collect(self, handle: _Step) -> list[Sampled]:
        results = dict(handle.refused or {})
        try:
            if handle.error is not None:
                raise handle.error
            results.update(self._finish(handle))
        except Exception as error:
            if len(handle.order) < 2:
                raise
            _log.exception("a step of %d chunks failed; trying each alone", len(handle.order))
            results.update(self._each_alone(handle, error))
        return [results[index] for index in range(len(handle.plan.chunks))]

    @torch.inference_mode()
    def _forward(self, step: _Step) -> None:
        if not step.order:
            return
        chunks = [step.plan.chunks[index] for index in step.order]
        if self._tainted:
            self._clear_reused(chunks)
        tokens = [
            token
            for chunk in chunks
            for token in chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
        ]
        spans = [Span(chunk.start, chunk.length, chunk.sequence.block_table) for chunk in chunks]
        decoder = self._decoder
        self._kernels.begin(spans, self._cache.geometry, decoder.windows)
        step.hidden = decoder.forward(
            torch.tensor(tokens, device=decoder.device), self._cache, self._kernels
        )
        step.finite = step.hidden.isfinite().all(-1)

    def _clear_reused(self, chunks: list[Chunk]) -> None:
        """Clears tainted blocks that have a new owner: a weight of zero would not silence a NaN
        in a slot that is not written yet."""
        size = self.block_size
        begun = {
            block
            for chunk in chunks
            for block in chunk.sequence.block_table[-(-chunk.start // size) :]
        }
        reused = begun & self._tainted
        self._cache.clear(reused)
        self._tainted -= reused

    @torch.inference_mode()
    def _finish(self, step: _Step) -> dict[int, Sampled]:
        """Outcomes by place in the plan."""
        if step.hidden is None or step.finite is None:
            return {}
        chunks = step.plan.chunks
        results: dict[int, Sampled] = {}
        row = 0
        sampling: list[tuple[int, int]] = []
        finite = step.finite.tolist()
        for index in step.order:
            chunk = chunks[index]
            rows = range(row, row + chunk.length)
            row += chunk.length
            if not all(finite[rows.start : rows.stop]):
                self._tainted.update(chunk.sequence.block_table)
                results[index] = Sampled(error=_NOT_FINITE)
                continue
            scores = self._score(chunk, step.hidden[rows.start : rows.stop])
            results[index] = Sampled(prompt_logprobs=scores)
            if chunk.samples:
                sampling.append((index, rows[-1]))
        if sampling:
            indices = [index for index, _ in sampling]
            logits = self._logits(step.hidden[[last for _, last in sampling]])
            drawn = self._sampler.sample(logits, [chunks[index].sequence for index in indices])
            for index, outcome in zip(indices, drawn, strict=True):
                scores = results[index].prompt_logprobs
                results[index] = replace(outcome, prompt_logprobs=scores) if scores else outcome
        return results

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden, self._kernels)

    def _score(self, chunk: Chunk, hidden: Tensor) -> tuple[RawLogprob, ...]:
        """Scores of the prompt tokens that follow each of the chunk's positions."""
        sequence = chunk.sequence
        if not sequence.needs_prompt_logprobs:
            return ()
        scored = min(chunk.start + chunk.length, sequence.prompt_length - 1) - chunk.start
        scores: list[RawLogprob] = []
        for first in range(0, scored, _SCORED_ROWS):
            last = min(first + _SCORED_ROWS, scored)
            following = sequence.tokens[chunk.start + first + 1 : chunk.start + last + 1]
            logits = self._logits(hidden[first:last])
            scores += self._sampler.score(logits, following, sequence.sampling.prompt_logprobs or 0)
        return tuple(scores)

    def _each_alone(self, step: _Step, error: Exception) -> dict[int, Sampled]:
        """Computing a chunk again writes the same values to the same slots."""
        results: dict[int, Sampled] = {}
        for index in step.order:
            alone = self.launch(StepPlan((step.plan.chunks[index],)))
            try:
                results[index] = self.collect(alone)[0]
            except Exception:  # noqa: BLE001 - this sequence ends with it
                _log.exception("sequence %d failed", step.plan.chunks[index].sequence.id)
                results[index] = Sampled(error=_FAILED)
        if all(result.error is not None for result in results.values()):
            raise error
        return results

    def _fault(self, chunk: Chunk) -> str | None:
        """What is wrong with a chunk, for the log; checked here because on some devices an index
        out of range brings down the process."""
        sequence, end = chunk.sequence, chunk.start + chunk.length
        tokens = sequence.tokens[chunk.start : end]
        config = self._decoder.config
        if chunk.length < 1 or len(tokens) < chunk.length:
            return "the chunk reaches beyond the known tokens"
        if end > config.context_length:
            return "the chunk reaches beyond the context"
        if min(tokens) < 0 or max(tokens) >= config.vocab_size:
            return "a token id is outside the vocabulary"
        if end > len(sequence.block_table) * self.block_size:
            return "the block table is too short"
        return None


def _packing_key(chunk: Chunk) -> tuple[bool, int]:
    return (chunk.length > 1, -chunk.start if chunk.length == 1 else 0)
