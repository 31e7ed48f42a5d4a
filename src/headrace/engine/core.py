"""The engine loop's one turn: plan, launch, collect, commit, say what came of it.

Synchronous and free of I/O, so that a test drives it like the process does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from headrace.engine.base import ModelRunner, Sampled
from headrace.engine.blocks import BlockPool
from headrace.engine.planner import Planner
from headrace.engine.sequence import Chunk, Sequence, SequenceState, StepPlan
from headrace.engine.wire import Output, Step, StepStats, Submit

__all__ = ["EngineCore", "OutputStage"]

_FAILED = "The engine failed on this request."
_MAX_FAILED_STEPS = 3
_log = logging.getLogger(__name__)


class OutputStage(Protocol):
    """From sampled tokens to what the client is told; keeps state between begin and forget."""

    def begin(self, sequence: Sequence) -> None: ...

    def process(self, chunk: Chunk, sampled: Sampled) -> Output | None:
        """Called after the step is committed. An output with `finish` or `error` ends it."""
        ...

    def forget(self, sequence: Sequence) -> None: ...


class EngineCore:
    """Owned by the engine loop.

    A step never raises because of one sequence: that one ends with an error and the others go on.
    It raises when the runner fails on all of them, which only a restart can mend.
    """

    def __init__(
        self,
        runner: ModelRunner,
        planner: Planner,
        outputs: OutputStage,
        pool: BlockPool,
        *,
        max_context: int,
        vocab_size: int,
        rest: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._planner = planner
        self._outputs = outputs
        self._pool = pool
        self._max_length = min(max_context, pool.num_blocks * pool.block_size)
        self._vocab_size = vocab_size
        self._rest = rest
        self._clock = clock
        self._refused: list[Output] = []
        self._changed = False
        self._failed_steps = 0

    @property
    def max_length(self) -> int:
        """Most tokens, prompt included, that one sequence can have."""
        return self._max_length

    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing to report."""
        return self._planner.idle and not self._changed

    def submit(self, message: Submit) -> None:
        """Queues a sequence, taking over the message's prompt; one that can never run is answered
        by the next step."""
        self._changed = True
        problem = self._problem(message)
        if problem is not None:
            self._refused.append(Output(seq=message.seq, error=problem, invalid=True))
            return
        length = len(message.prompt)
        wanted = message.sampling.max_tokens
        limit = self._max_length
        sequence = Sequence(
            id=message.seq,
            group=message.group,
            prompt_length=length,
            tokens=message.prompt,
            sampling=message.sampling,
            seed=message.seed,
            max_length=limit if wanted is None else min(length + wanted, limit),
            salt=message.salt,
            echo=message.echo,
            priority=message.priority,
        )
        try:
            self._outputs.begin(sequence)
            self._planner.add(sequence)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's alone
            # Never the message, which may quote a prompt; the same below.
            _log.error("sequence %d cannot be queued: %s", message.seq, type(error).__name__)
            self._outputs.forget(sequence)
            self._refused.append(Output(seq=message.seq, error=_FAILED))

    def abort(self, seqs: Iterable[int]) -> None:
        """Drops these sequences and frees their blocks before the next step."""
        for sequence in self._planner.abort(seqs):
            self._outputs.forget(sequence)
            self._changed = True

    def set_targets(self, max_step_tokens: int, max_running: int) -> None:
        """From the next step on."""
        self._planner.set_targets(max_step_tokens, max_running)

    def preempt(self, seqs: Iterable[int]) -> None:
        """Takes running sequences' blocks before the next step; they wait again, in their place."""
        self._planner.preempt(seqs)

    def rest(self) -> bool:
        """A few milliseconds of the work that can wait until the engine is idle; true while there
        is more."""
        return self._rest is not None and self._rest()

    def step(self) -> Step | None:
        """One turn. None if there was nothing to compute and nothing to report."""
        begun = self._clock()
        plan = self._planner.plan()
        if plan is None and not self._changed:
            return None
        outputs, self._refused = self._refused, []
        self._changed = False
        if plan is not None:
            sampled = self._compute(plan)
            self._planner.commit(plan, sampled)
            for chunk, outcome in zip(plan.chunks, sampled, strict=True):
                output = self._take(chunk, outcome)
                if output is not None:
                    outputs.append(output)
        added, evicted = self._pool.drain_changes()
        return Step(outputs, self._stats(plan, begun), added, evicted)

    def _problem(self, message: Submit) -> str | None:
        """Why this request could never run, for its client."""
        length = len(message.prompt)
        wanted = message.sampling.max_tokens
        if not length:
            return "The prompt is empty."
        if length + (0 if wanted == 0 else 1) > self._max_length:
            return (
                f"The prompt has {length} tokens; at most {self._max_length} tokens fit, "
                "prompt and answer together."
            )
        if min(message.prompt) < 0 or max(message.prompt) >= self._vocab_size:
            return f"The prompt holds a token id outside 0..{self._vocab_size - 1}."
        return None

    def _compute(self, plan: StepPlan) -> list[Sampled]:
        """The outcome of each chunk. The runner sorts out whose fault a failure is; only where
        all chunks are one request's it cannot tell, so that is blamed, until it happens again."""
        try:
            outcomes = self._runner.collect(self._runner.launch(plan))
        except Exception:
            self._failed_steps += 1
            groups = {chunk.sequence.group for chunk in plan.chunks}
            if len(groups) > 1 or self._failed_steps >= _MAX_FAILED_STEPS:
                raise
            _log.exception("sequence %d failed", plan.chunks[0].sequence.id)
            return [Sampled(error=_FAILED) for _ in plan.chunks]
        self._failed_steps = 0
        return [
            Sampled(error=_FAILED)
            if chunk.samples and outcome.token_id is None and outcome.error is None
            else outcome
            for chunk, outcome in zip(plan.chunks, outcomes, strict=True)
        ]

    def _take(self, chunk: Chunk, outcome: Sampled) -> Output | None:
        """What the client of one chunk is told; ends the sequence where it ends."""
        sequence = chunk.sequence
        if sequence.state is SequenceState.FINISHED:
            return None
        if outcome.error is not None:
            output: Output | None = Output(seq=sequence.id, error=outcome.error)
        else:
            try:
                output = self._outputs.process(chunk, outcome)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's alone
                _log.error("output of sequence %d failed: %s", sequence.id, type(error).__name__)
                output = Output(seq=sequence.id, error=_FAILED)
        if output is not None and (output.finish is not None or output.error is not None):
            self._planner.finish(sequence)
            self._outputs.forget(sequence)
        return output

    def _stats(self, plan: StepPlan | None, begun: float) -> StepStats:
        prefill = decode = prefill_context = decode_context = 0
        for chunk in () if plan is None else plan.chunks:
            if chunk.length == 1 and chunk.start >= chunk.sequence.prompt_length:
                decode += 1
                decode_context += chunk.start
            else:
                prefill += chunk.length
                prefill_context += chunk.start
        return StepStats(
            seconds=0.0 if plan is None else self._clock() - begun,
            prefill_tokens=prefill,
            decode_tokens=decode,
            running=len(self._planner.running),
            waiting=len(self._planner.waiting),
            blocks_used=self._pool.num_used,
            blocks_total=self._pool.num_blocks,
            preemptions_total=self._planner.preemptions_total,
            prefix_queries_total=self._pool.queries_total,
            prefix_hits_total=self._pool.hits_total,
            decode_context=decode_context,
            prefill_context=prefill_context,
        )
