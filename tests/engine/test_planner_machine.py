"""Random traffic against planner and pool, over a KV store that remembers what was written where.

The fake runner writes each token's whole history into its slot and reads all slots back as
attention would, so two writers, a stale or foreign prefix hit and a wrong block table all show.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.request import SamplingParams
from headrace.engine.base import Sampled
from headrace.engine.blocks import BlockPool, hash_block
from headrace.engine.planner import Planner
from headrace.engine.sequence import Chunk, Sequence, SequenceState, StepPlan

STOP = 0
VOCABULARY = 5

History = tuple[bytes, tuple[int, ...]]
"""Salt and tokens up to and including the one whose KV this is."""


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def solo(prompt: list[int], max_length: int) -> list[int]:
    """What a sequence must come to, alone or not."""
    tokens = list(prompt)
    while len(tokens) < max_length:
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP:
            break
    return tokens


@dataclass
class FakeRunner:
    block_size: int
    slots: dict[tuple[int, int], History] = field(default_factory=dict)

    def slot(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.block_table[position // self.block_size], position % self.block_size

    def run(self, plan: StepPlan) -> list[Sampled]:
        written = set()
        for chunk in plan.chunks:
            seq = chunk.sequence
            for position in range(chunk.start, chunk.start + chunk.length):
                slot = self.slot(seq, position)
                assert slot not in written, "two writers of one slot"
                written.add(slot)
                self.slots[slot] = (seq.salt, tuple(seq.tokens[: position + 1]))
        for chunk in plan.chunks:
            self.read(chunk.sequence, chunk.start + chunk.length)
        return [
            Sampled(next_token(chunk.sequence.tokens) if chunk.samples else None)
            for chunk in plan.chunks
        ]

    def spoil(self, chunk: Chunk) -> None:
        if chunk.sequence.block_table:
            for position in range(chunk.start, chunk.start + chunk.length):
                self.slots[self.slot(chunk.sequence, position)] = (b"garbage", ())

    def read(self, seq: Sequence, length: int) -> None:
        for position in range(length):
            expected = (seq.salt, tuple(seq.tokens[: position + 1]))
            assert self.slots[self.slot(seq, position)] == expected, "foreign or stale KV"


class PlannerMachine(RuleBasedStateMachine):
    """Rules in any order; between `plan` and `commit` a step is being computed."""

    @initialize(
        num_blocks=st.integers(3, 16),
        block_size=st.integers(1, 4),
        prefix_cache=st.sampled_from([True, True, False]),
        max_running=st.integers(1, 5),
        max_step_tokens=st.integers(1, 16),
    )
    def start(
        self,
        *,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool,
        max_running: int,
        max_step_tokens: int,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_cache=prefix_cache)
        self.planner = Planner(self.pool, max_running=max_running, max_step_tokens=max_step_tokens)
        self.max_running, self.max_step_tokens = max_running, max_step_tokens
        self.runner = FakeRunner(block_size)
        self.everyone: list[tuple[Sequence, list[int]]] = []
        self.live: set[Sequence] = set()
        self.ended: set[Sequence] = set()
        self.in_flight: tuple[StepPlan, list[Sampled]] | None = None
        self.mirror: set[bytes] = set()
        self.steps_since_admission = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=14),
        shared=st.integers(0, 8),
        extra=st.integers(1, 12),
        choices=st.integers(1, 3),
        salt=st.sampled_from([b"", b"a"]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        echo=st.sampled_from([False, False, False, True]),
    )
    def add(
        self,
        *,
        prompt: list[int],
        shared: int,
        extra: int,
        choices: int,
        salt: bytes,
        priority: int,
        echo: bool,
    ) -> None:
        prompt = [1] * shared + prompt
        max_length = len(prompt) + extra
        group = len(self.everyone)
        for _ in range(choices):
            seq = Sequence(
                id=len(self.everyone),
                group=group,
                prompt_length=len(prompt),
                tokens=list(prompt),
                sampling=SamplingParams(prompt_logprobs=0 if echo else None),
                seed=0,
                max_length=max_length,
                salt=salt,
                echo=echo,
                priority=priority,
            )
            if not self.planner.fits(max_length):
                assert max_length > self.pool.num_blocks * self.pool.block_size
                return
            self.planner.add(seq)
            self.everyone.append((seq, list(prompt)))
            self.live.add(seq)

    @precondition(lambda self: self.everyone)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, len(self.everyone)), max_size=3))
        dropped = self.planner.abort(ids)
        assert {seq.id for seq in dropped} == {seq.id for seq in self.live if seq.id in ids}
        assert len(dropped) == len(set(dropped))
        self.live.difference_update(dropped)

    @precondition(lambda self: self.in_flight is None and self.everyone)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, len(self.everyone)), max_size=3))
        running = {seq for seq in self.planner.running if seq.id in ids}
        before = self.planner.preemptions_total
        assert set(self.planner.preempt(ids)) == running
        assert self.planner.preemptions_total == before + len(running)
        assert running <= set(self.planner.waiting)

    @rule(max_step_tokens=st.integers(1, 16), max_running=st.integers(1, 5))
    def set_targets(self, max_step_tokens: int, max_running: int) -> None:
        self.planner.set_targets(max_step_tokens, max_running)
        self.max_running, self.max_step_tokens = max_running, max_step_tokens

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self) -> None:
        before = self.planner.running
        plan = self.planner.plan()
        admitted = set(self.planner.running) - set(before)
        if plan is None:
            assert self.planner.idle
            return
        self.check_plan(plan, before)
        if admitted:
            assert len(self.planner.running) <= self.max_running
            self.steps_since_admission = 0
        else:
            self.steps_since_admission += 1
        if plan.preempted:
            assert not admitted
            assert self.steps_since_admission > self.pool.block_size
        self.in_flight = (plan, self.runner.run(plan))

    def check_plan(self, plan: StepPlan, before: tuple[Sequence, ...]) -> None:
        served = [chunk.sequence for chunk in plan.chunks]
        assert len(served) == len(set(served))
        kinds = []
        for chunk in plan.chunks:
            seq = chunk.sequence
            assert seq.state is SequenceState.RUNNING
            assert chunk.start == seq.num_computed
            assert chunk.length > 0
            if seq.needs_prompt_logprobs and seq not in before:
                assert chunk.start == 0
            end = chunk.start + chunk.length
            assert end <= len(seq.tokens)
            assert end <= len(seq.block_table) * self.pool.block_size
            assert chunk.samples == (end == len(seq.tokens))
            kinds.append(seq in before and len(seq.tokens) - seq.num_computed == 1)
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        decodes = sum(kinds)
        assert plan.num_tokens <= max(self.max_step_tokens, decodes + 1)
        for seq in set(self.planner.running) & set(before) - set(served):
            if len(seq.tokens) - seq.num_computed == 1:  # a decode without a token
                assert seq is self.planner.running[-1]
                assert self.pool.num_free == 0
        if self.max_step_tokens - decodes > 1:
            assert self.planner.running[0] in served
        for seq in plan.preempted:
            assert seq in before
            assert seq in self.planner.waiting
            assert seq not in served
            assert seq.num_preemptions
            better = [other for other in served if other in before]
            assert all(other.priority <= seq.priority for other in better)

    @precondition(lambda self: self.in_flight is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.in_flight is not None
        plan, sampled = self.in_flight
        self.in_flight = None
        unlucky = data.draw(st.integers(0, 9).map(lambda n: n - 7))
        if 0 <= unlucky < len(sampled):
            sampled[unlucky] = Sampled(error="bad luck")
            self.runner.spoil(plan.chunks[unlucky])
        computed = {chunk.sequence: chunk.sequence.num_computed for chunk in plan.chunks}
        self.planner.commit(plan, sampled)
        for chunk, outcome in zip(plan.chunks, sampled, strict=True):
            seq = chunk.sequence
            if seq not in self.live:
                continue
            failed = outcome.error is not None
            assert seq.num_computed == computed[seq] + (0 if failed else chunk.length)
            if failed or self.over(chunk):
                self.end(seq, failed=failed)
                assert self.planner.abort([seq.id]) == []

    def over(self, chunk: Chunk) -> bool:
        tokens = chunk.sequence.tokens
        ending = len(tokens) == chunk.sequence.max_length or tokens[-1] == STOP
        return chunk.samples and ending

    def end(self, seq: Sequence, *, failed: bool) -> None:
        self.planner.finish(seq)
        self.planner.finish(seq)
        assert seq.state is SequenceState.FINISHED
        self.live.remove(seq)
        if not failed:
            self.ended.add(seq)

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        running, waiting = self.planner.running, self.planner.waiting
        assert {*running, *waiting} == self.live
        assert len(running) + len(waiting) == len(self.live)
        self.pool.check([seq.block_table for seq in running])
        assert not any(seq.block_table or seq.num_computed for seq in waiting)
        for queue in (running, waiting):
            assert list(queue) == sorted(queue, key=lambda seq: (seq.priority, seq.id))
        for seq in running:
            assert seq.num_computed < len(seq.tokens)
            if self.in_flight is None:
                self.runner.read(seq, seq.num_computed)
        for seq in self.ended:
            assert seq.num_computed == 0
            assert seq.block_table == []

    @invariant()
    def published_blocks_hold_what_their_hash_says(self) -> None:
        if not hasattr(self, "pool"):
            return
        size = self.pool.block_size
        for digest, block in self.pool._by_hash.items():
            salt, tokens = self.runner.slots[block, size - 1]
            parent = b""
            for start in range(0, len(tokens), size):
                parent = hash_block(parent, tokens[start : start + size], salt)
            assert parent == digest
            for offset in range(size):
                prefix = tokens[: len(tokens) - size + offset + 1]
                assert self.runner.slots[block, offset] == (salt, prefix)
        added, evicted = self.pool.drain_changes()
        assert self.mirror.isdisjoint(added)
        assert self.mirror.issuperset(evicted)
        self.mirror = self.mirror.union(added).difference(evicted)
        assert self.mirror == set(self.pool._by_hash)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        if self.in_flight is not None:
            self.planner.commit(*self.in_flight)
            self.finish_ended(self.in_flight[0])
        # Each step serves at least every second time a token of the first in place.
        bound = 2 * sum(seq.max_length + seq.max_length**2 for seq in self.live) + 2
        while not self.planner.idle:
            bound -= 1
            assert bound > 0, "no end in sight"
            plan = self.planner.plan()
            assert plan is not None
            self.planner.commit(plan, self.runner.run(plan))
            self.finish_ended(plan)
        assert not self.live
        self.pool.check([])
        assert self.pool.num_used == 0
        assert not self.planner._coming
        assert not self.planner._awaited
        assert not self.planner._place
        for seq, prompt in self.everyone:
            expected = solo(prompt, seq.max_length)
            if seq in self.ended:
                assert seq.tokens == expected
            else:  # aborted or failed: whatever it got is right
                assert seq.tokens == expected[: len(seq.tokens)]
            assert seq.cached_tokens < seq.prompt_length
            assert not (seq.cached_tokens and seq.needs_prompt_logprobs)

    def finish_ended(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            if chunk.sequence in self.live and self.over(chunk):
                self.end(chunk.sequence, failed=False)


PlannerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestPlannerMachine = PlannerMachine.TestCase
