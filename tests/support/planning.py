"""Planner and pool under a model whose next token is a function of the whole history."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable

from headrace.core.request import SamplingParams
from headrace.engine.base import Sampled
from headrace.engine.blocks import BlockPool
from headrace.engine.planner import Planner
from headrace.engine.sequence import Sequence, StepPlan

BLOCK = 4


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(repr(tokens).encode()) % 1000


class PlannedEngine:
    """Takes steps and keeps count of them."""

    def __init__(
        self,
        *,
        blocks: int = 1000,
        budget: int = 16,
        running: int = 64,
        prefix_cache: bool = True,
    ) -> None:
        self.pool = BlockPool(blocks, BLOCK, prefix_cache=prefix_cache)
        self.planner = Planner(self.pool, max_running=running, max_step_tokens=budget)
        self.steps = 0
        self.computed: Counter[Sequence] = Counter()
        self.first_token: dict[Sequence, int] = {}

    def add(
        self,
        prompt: int | list[int],
        output: int = 1,
        *,
        salt: bytes = b"",
        priority: int = 0,
        echo: bool = False,
    ) -> Sequence:
        """A prompt given by its length is like no other."""
        number = self.planner._arrivals + 1
        tokens = [1000 * number + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        seq = Sequence(
            id=number,
            group=0,
            prompt_length=len(tokens),
            tokens=list(tokens),
            sampling=SamplingParams(prompt_logprobs=0 if echo else None),
            seed=0,
            max_length=len(tokens) + output,
            salt=salt,
            echo=echo,
            priority=priority,
        )
        self.planner.add(seq)
        return seq

    def plan(self) -> StepPlan:
        plan = self.planner.plan()
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan, *, failing: Iterable[Sequence] = ()) -> None:
        failed = set(failing)
        sampled = [
            Sampled(error="broken")
            if chunk.sequence in failed
            else Sampled(next_token(chunk.sequence.tokens) if chunk.samples else None)
            for chunk in plan.chunks
        ]
        self.planner.commit(plan, sampled)
        self.steps += 1
        for chunk in plan.chunks:
            seq = chunk.sequence
            self.computed[seq] += chunk.length
            if chunk.samples:
                self.first_token.setdefault(seq, self.steps)
            if len(seq.tokens) >= seq.max_length:
                self.planner.finish(seq)

    def step(self) -> dict[Sequence, int]:
        """Tokens of each sequence served."""
        plan = self.plan()
        self.commit(plan)
        return {chunk.sequence: chunk.length for chunk in plan.chunks}

    def drain(self, limit: int = 10_000) -> None:
        while not self.planner.idle:
            self.step()
            assert self.steps < limit
        assert self.pool.num_used == 0
        self.pool.check([])


def solo(seq: Sequence) -> list[int]:
    tokens = seq.tokens[: seq.prompt_length]
    while len(tokens) < seq.max_length:
        tokens.append(next_token(tokens))
    return tokens
