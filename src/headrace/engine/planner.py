"""Which tokens of which sequences the next step computes.

There are no prefill and decode phases: every sequence has `num_computed < len(tokens)`, and each
step hands out a budget of tokens, by counts alone (how many, never which):

1. Decodes. Every running sequence with one token to go gets it, even where they are more than the
   budget, so no stream stops for another's prompt or for a budget set low.
2. Prompts share what is left, and never less than one token. Half of it goes to the first in
   place, the other half to the shortest. So the long prompt advances at half speed at worst,
   however many short ones follow it; and a short one needs twice its own time at worst, however
   long the prompts before it. Splitting evenly between all of them would make equal prompts all
   end at the time of the last one.

Place is (priority, order of arrival). Sequences are admitted in that order and only with memory
for all their known tokens, so only decodes ask for blocks later. When none is free, the running
sequence last in place loses its blocks and waits again, in its old place; when that is the asker
itself, it keeps its blocks and sits the step out. So the first in place always advances, and
with equal priorities everyone becomes first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable

from headrace.engine.base import Sampled
from headrace.engine.blocks import BlockPool, hash_block
from headrace.engine.sequence import Chunk, Sequence, SequenceState, StepPlan

__all__ = ["Planner"]

_Urgency = tuple[int, int]
"""(priority, prompt tokens to go): the order in which prompts get the second half."""


class Planner:
    """Owned by the engine loop. Deterministic, without a clock.

    `plan` and `commit` alternate; `add`, `abort`, `finish` and `set_targets` may come between
    them in any order. Blocks freed between plan and commit are handed out by the next plan at the
    earliest, when the step that may still write to them is over.
    """

    def __init__(self, pool: BlockPool, *, max_running: int, max_step_tokens: int) -> None:
        self._pool = pool
        self.set_targets(max_step_tokens, max_running)
        self.preemptions_total = 0
        self._arrivals = 0
        self._turn = 0
        self._sequences: dict[int, Sequence] = {}
        self._place: dict[Sequence, tuple[int, int]] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        # Full blocks that a running sequence will compute, and who waits for which of them.
        self._coming: dict[bytes, Sequence] = {}
        self._awaited: dict[Sequence, tuple[bytes, _Urgency]] = {}

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def idle(self) -> bool:
        return not self._sequences

    def set_targets(self, max_step_tokens: int, max_running: int) -> None:
        """From the next plan on. Nobody is stopped where more are running already."""
        if max_step_tokens < 1 or max_running < 1:
            raise ValueError("a step needs at least one token and one sequence")
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running

    def fits(self, max_length: int) -> bool:
        """Whether a sequence of that many tokens can be computed, if need be alone."""
        return self._pool.blocks_for(max_length) <= self._pool.num_blocks

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence. Raises ValueError for one that could never run."""
        if seq.id in self._sequences:
            raise ValueError(f"sequence {seq.id} is already here")
        if not seq.tokens or not self.fits(max(seq.max_length, len(seq.tokens))):
            raise ValueError(f"sequence {seq.id} is empty or can never fit")
        self._arrivals += 1
        self._sequences[seq.id] = seq
        self._place[seq] = (seq.priority, self._arrivals)
        self._enqueue(seq)

    def abort(self, ids: Iterable[int]) -> list[Sequence]:
        """Drops these sequences and frees their blocks; returns those that were still here."""
        dropped = [self._sequences[i] for i in dict.fromkeys(ids) if i in self._sequences]
        for seq in dropped:
            self.finish(seq)
        return dropped

    def preempt(self, ids: Iterable[int]) -> list[Sequence]:
        """Puts running sequences back into the queue, in their place; returns those that were.

        Only between a commit and the next plan.
        """
        found = [self._sequences[i] for i in dict.fromkeys(ids) if i in self._sequences]
        running = [seq for seq in found if seq.state is SequenceState.RUNNING]
        for seq in running:
            self._preempt(seq)
        return running

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence and frees its blocks. Does nothing if it has ended already."""
        if self._sequences.get(seq.id) is not seq:
            return
        if seq.state is SequenceState.RUNNING:
            self._stop(seq)
        else:
            del self._waiting[self._index(self._waiting, seq)]
            self._awaited.pop(seq, None)
        seq.state = SequenceState.FINISHED
        del self._sequences[seq.id]
        del self._place[seq]

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute."""
        decodes: list[Chunk] = []
        prompts: list[Sequence] = []
        preempted: list[Sequence] = []
        index = 0
        while index < len(self._running):  # shrinks from its end, behind `index`, by preemption
            seq = self._running[index]
            index += 1
            if len(seq.tokens) - seq.num_computed > 1:
                prompts.append(seq)
            elif self._grow(seq, preempted):
                decodes.append(Chunk(seq, seq.num_computed, 1, samples=True))
        if not preempted:
            prompts += self._admit()
            prompts.sort(key=self._place.__getitem__)
        self._turn ^= 1
        budget = max(self._max_step_tokens - len(decodes), 1)
        chunks = (*decodes, *self._share(prompts, budget))
        return StepPlan(chunks, tuple(preempted)) if chunks else None

    def commit(self, plan: StepPlan, sampled: Collection[Sampled]) -> None:
        """Takes in a step's outcome: tokens count as computed, full blocks become shareable.

        Chunks of sequences that ended meanwhile are passed over, and so are failed ones, which
        the caller must `finish`. Raises ValueError, changing nothing, if the outcome is not one
        of this plan.
        """
        outcomes = list(zip(plan.chunks, sampled, strict=True))
        for chunk, outcome in outcomes:
            if chunk.samples and outcome.token_id is None and outcome.error is None:
                raise ValueError(f"no token for sequence {chunk.sequence.id}")
        for chunk, outcome in outcomes:
            seq = chunk.sequence
            if seq.state is not SequenceState.RUNNING or outcome.error is not None:
                continue
            if chunk.samples and outcome.token_id is not None:
                seq.tokens.append(outcome.token_id)
            seq.num_computed = chunk.start + chunk.length
            if self._pool.prefix_cache:
                self._publish(seq, chunk.start)

    def _index(self, queue: list[Sequence], seq: Sequence) -> int:
        return bisect_left(queue, self._place[seq], key=self._place.__getitem__)

    def _enqueue(self, seq: Sequence) -> None:
        seq.state = SequenceState.WAITING
        insort(self._waiting, seq, key=self._place.__getitem__)

    def _grow(self, seq: Sequence, preempted: list[Sequence]) -> bool:
        """Makes room for the next token; false if that would be at a better-placed one's cost."""
        if seq.num_computed < len(seq.block_table) * self._pool.block_size:
            return True
        while not self._pool.num_free:
            victim = self._running[-1]
            if victim is seq:
                return False
            self._preempt(victim)
            preempted.append(victim)
        seq.block_table += self._pool.allocate(1)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._stop(seq)
        seq.num_preemptions += 1
        self._enqueue(seq)
        self.preemptions_total += 1

    def _stop(self, seq: Sequence) -> None:
        """Takes a sequence out of the running ones, with all that it holds."""
        del self._running[self._index(self._running, seq)]
        for digest in seq.block_hashes[seq.num_computed // self._pool.block_size :]:
            if self._coming.get(digest) is seq:
                del self._coming[digest]
        self._pool.release(seq.block_table)
        seq.block_table = []
        seq.num_computed = 0

    def _admit(self) -> list[Sequence]:
        """Starts waiting sequences in place, as far as slots and memory go.

        One whose next block is just being computed by a running sequence is passed by until that
        block can be shared, so that n choices of a prompt compute it once. The wait ends: the one
        that computes inherits the urgency of the one that waits (see `_share`), and when it stops
        short of the block, the wait is over too.
        """
        admitted: list[Sequence] = []
        passed_by: list[Sequence] = []
        growing = sum(map(self._can_grow, self._running)) if self._waiting else 0
        for seq in self._waiting:
            if len(self._running) + len(admitted) >= self._max_running:
                break
            hits = self._lookup(seq)
            if hits is None:
                passed_by.append(seq)
                continue
            # One spare block for each that may need it: nothing admitted now can cause
            # preemption before every running sequence has gained a block's worth of tokens.
            growing += self._can_grow(seq)
            need = self._pool.blocks_for(len(seq.tokens)) - len(hits)
            revived = sum(map(self._pool.is_free, hits))
            spare = self._pool.num_free - need - revived
            if spare < 0 or (spare < growing and (self._running or admitted)):
                break
            self._start(seq, hits, need)
            admitted.append(seq)
        if admitted:
            del self._waiting[: len(admitted) + len(passed_by)]
            self._waiting[:0] = passed_by
            for seq in admitted:
                insort(self._running, seq, key=self._place.__getitem__)
        return admitted

    def _can_grow(self, seq: Sequence) -> bool:
        return max(self._pool.blocks_for(len(seq.tokens)), len(seq.block_table)) < (
            self._pool.blocks_for(seq.max_length)
        )

    def _lookup(self, seq: Sequence) -> list[int] | None:
        """Blocks that the prefix cache has for this sequence; None while one more is coming.

        The last known token is never among them: computing it gives the logits to go on from. Nor
        is thereby a block that will be written to.
        """
        if not self._pool.prefix_cache:
            return []
        waits = self._awaited.pop(seq, None)
        if waits is not None and waits[0] in self._coming:
            self._awaited[seq] = waits
            return None
        self._extend_hashes(seq)
        if seq.needs_prompt_logprobs:
            return []
        limit = (len(seq.tokens) - 1) // self._pool.block_size
        hits = self._pool.match(seq.block_hashes[:limit])
        if len(hits) < limit and (digest := seq.block_hashes[len(hits)]) in self._coming:
            to_go = len(seq.tokens) - len(hits) * self._pool.block_size
            self._awaited[seq] = (digest, (seq.priority, to_go))
            return None
        return hits

    def _start(self, seq: Sequence, hits: list[int], need: int) -> None:
        self._pool.acquire(hits)
        seq.block_table = hits + self._pool.allocate(need)
        seq.num_computed = len(hits) * self._pool.block_size
        seq.state = SequenceState.RUNNING
        if not self._pool.prefix_cache:
            return
        for digest in seq.block_hashes[len(hits) :]:
            self._coming.setdefault(digest, seq)
        if not seq.num_preemptions and not seq.needs_prompt_logprobs:
            seq.cached_tokens = seq.num_computed
            self._pool.count_query(len(seq.tokens), seq.num_computed)

    def _share(self, prompts: list[Sequence], budget: int) -> list[Chunk]:
        """Splits the prompts' budget as the module says; an odd token goes to each half in turn."""
        if not prompts:
            return []
        to_go = {seq: len(seq.tokens) - seq.num_computed for seq in prompts}
        urgency = {seq: (seq.priority, tokens) for seq, tokens in to_go.items()}
        for digest, urgent in self._awaited.values():
            owner = self._coming.get(digest)
            if owner in urgency:
                urgency[owner] = min(urgency[owner], urgent)
        shares = dict.fromkeys(prompts, 0)
        shares[prompts[0]] = min(to_go[prompts[0]], (budget + self._turn) // 2)
        left = budget - shares[prompts[0]]
        for seq in sorted(prompts, key=urgency.__getitem__):
            extra = min(to_go[seq] - shares[seq], left)
            shares[seq] += extra
            left -= extra
        return [
            Chunk(seq, seq.num_computed, share, samples=share == to_go[seq])
            for seq, share in shares.items()
            if share
        ]

    def _extend_hashes(self, seq: Sequence) -> None:
        """Brings `block_hashes` up to all full blocks of the known tokens."""
        size = self._pool.block_size
        hashes = seq.block_hashes
        for index in range(len(hashes), len(seq.tokens) // size):
            tokens = seq.tokens[index * size : (index + 1) * size]
            hashes.append(hash_block(hashes[-1] if hashes else b"", tokens, seq.salt))

    def _publish(self, seq: Sequence, start: int) -> None:
        """Makes the blocks shareable that the tokens from `start` on have filled."""
        size = self._pool.block_size
        first, end = start // size, seq.num_computed // size
        if first == end:
            return
        self._extend_hashes(seq)
        for index in range(first, end):
            digest = seq.block_hashes[index]
            self._pool.publish(seq.block_table[index], digest)
            if self._coming.get(digest) is seq:
                del self._coming[digest]
