"""What the planner does with KV memory: sharing, running out of it, preemption."""

from __future__ import annotations

import pytest

from headrace.engine.sequence import SequenceState
from support.planning import BLOCK, PlannedEngine, solo


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_overflow_preempts_and_every_answer_is_as_alone(prefix_cache: bool) -> None:
    engine = PlannedEngine(blocks=40, prefix_cache=prefix_cache)
    answers = [engine.add(8, 100) for _ in range(4)]
    engine.drain()
    assert engine.planner.preemptions_total > 0
    assert engine.planner.preemptions_total == sum(seq.num_preemptions for seq in answers)
    for seq in answers:
        assert seq.tokens == solo(seq)
    assert answers[0].num_preemptions == 0


def test_the_last_in_place_is_preempted_and_goes_before_newer_ones() -> None:
    engine = PlannedEngine(blocks=6, running=2)
    first, second = engine.add(8, 15), engine.add(7, 16)
    newer = engine.add(4)
    while not engine.planner.preemptions_total:
        plan = engine.plan()
        if not plan.preempted:
            engine.commit(plan)
    assert plan.preempted == (second,)
    assert [chunk.sequence for chunk in plan.chunks] == [first]
    assert (second.block_table, second.num_computed) == ([], 0)
    assert second.num_output > 0
    assert engine.planner.waiting == (second, newer)
    engine.commit(plan)
    engine.drain()
    assert second.tokens == solo(second)


def test_preempted_on_demand_it_makes_room_for_the_more_urgent_and_comes_back() -> None:
    engine = PlannedEngine(running=2)
    first, second = engine.add(8, 15, priority=2), engine.add(7, 16, priority=2)
    for _ in range(4):
        engine.step()
    urgent = engine.add(5, 3, priority=0)
    assert urgent not in engine.step(), "no slot is free"
    known = len(second.tokens)
    assert engine.planner.preempt([second.id, urgent.id, 99]) == [second]
    assert (second.block_table, second.num_computed) == ([], 0)
    assert engine.planner.waiting == (urgent, second)
    assert urgent in engine.step()
    assert len(second.tokens) == known
    engine.drain()
    for seq in (first, second, urgent):
        assert seq.tokens == solo(seq)
    assert engine.planner.preemptions_total == second.num_preemptions == 1


def test_the_last_in_place_waits_a_step_rather_than_lose_its_blocks() -> None:
    engine = PlannedEngine(blocks=6)
    first, second = engine.add(8, 2), engine.add(8, 16)
    engine.step()
    engine.pool.allocate(engine.pool.num_free - 1)  # all but the one that `first` takes
    served = engine.step()
    assert served == {first: 1}
    assert second.state is SequenceState.RUNNING
    assert len(second.block_table) == 2
    assert engine.step() == {second: 1}  # `first` has ended and left its blocks


def test_nothing_admitted_causes_preemption_for_a_block_of_tokens() -> None:
    engine = PlannedEngine(blocks=9, budget=64)
    for _ in range(4):
        engine.add(8, 20)
    admissions: list[int] = []
    preemptions: list[int] = []
    while not engine.planner.idle:
        before = set(engine.planner.running)
        plan = engine.plan()
        if set(engine.planner.running) - before:
            admissions.append(engine.steps)
        if plan.preempted:
            preemptions.append(engine.steps)
        engine.commit(plan)
    assert preemptions
    assert all(not 0 < p - a <= BLOCK for p in preemptions for a in admissions)


def test_choices_of_one_prompt_compute_it_once() -> None:
    engine = PlannedEngine(budget=16)
    prompt = list(range(42))
    choices = [engine.add(prompt, 1) for _ in range(4)]
    other = engine.add(10)
    served = engine.step()
    assert set(served) == {choices[0], other}
    engine.drain()
    assert engine.computed[choices[0]] == 42
    assert [engine.computed[seq] for seq in choices[1:]] == [2, 2, 2]
    assert [seq.cached_tokens for seq in choices] == [0, 40, 40, 40]
    assert (engine.pool.queries_total, engine.pool.hits_total) == (4 * 42 + 10, 120)


def test_the_last_prompt_token_is_always_computed() -> None:
    engine = PlannedEngine()
    prompt = list(range(16))
    for _ in range(2):
        seq = engine.add(prompt)
        engine.drain()
    assert seq.cached_tokens == 12
    assert engine.computed[seq] == 4


def test_answers_are_found_again_in_the_next_turn() -> None:
    engine = PlannedEngine()
    first = engine.add(6, 11)
    engine.drain()
    again = engine.add([*first.tokens, 1, 2, 3])
    engine.drain()
    # Of 17 tokens 16 are computed: the last one drawn never is.
    assert again.cached_tokens == 16


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_the_wait_for_a_sibling_ends_with_it(end: str) -> None:
    engine = PlannedEngine(budget=8)
    prompt = list(range(40))
    leader, follower = engine.add(prompt, 5), engine.add(prompt, 5)
    assert engine.step() == {leader: 8}
    plan = engine.plan()
    if end == "abort":
        engine.planner.abort([leader.id])
        engine.commit(plan)
    else:
        engine.commit(plan, failing=[leader])
        assert leader.num_computed == 8
        engine.planner.finish(leader)
    assert engine.step() == {follower: 8}
    assert follower.cached_tokens == 8
    engine.drain()
    assert follower.tokens == solo(follower)


def test_a_short_prompt_that_waits_for_a_longer_one_lends_it_its_urgency() -> None:
    engine = PlannedEngine(budget=16)
    engine.add(400)
    shared = list(range(16))
    engine.add([*shared, *range(100, 500)])
    waits = engine.add([*shared, 7, 8])
    for _ in range(12):
        engine.add(40)  # shorter than the one that computes the shared part
        engine.step()
    assert engine.first_token[waits] <= 4


def test_salts_do_not_share() -> None:
    engine = PlannedEngine()
    prompt = list(range(20))
    engine.add(prompt, salt=b"a")
    engine.drain()
    stranger, friend = engine.add(prompt, salt=b"b"), engine.add(prompt, salt=b"a")
    engine.drain()
    assert (stranger.cached_tokens, friend.cached_tokens) == (0, 16)


def test_scored_prompts_are_computed_in_full_but_serve_others() -> None:
    engine = PlannedEngine()
    prompt = list(range(20))
    for _ in range(2):
        scored = engine.add(prompt, echo=True)
        engine.drain()
        assert (scored.cached_tokens, engine.computed[scored]) == (0, 20)
    assert engine.pool.queries_total == 0
    plain = engine.add(prompt)
    engine.drain()
    assert plain.cached_tokens == 16


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    engine = PlannedEngine(blocks=6, running=2)
    first, second = engine.add(8, 15), engine.add(7, 16)
    while not second.num_preemptions or second.state is SequenceState.WAITING:
        engine.step()
        first.cached_tokens = 0
    assert second.cached_tokens == 0
    assert engine.pool.queries_total == 15


def test_a_failed_chunk_is_neither_counted_nor_shared() -> None:
    engine = PlannedEngine()
    prompt = list(range(12))
    bad, good = engine.add(prompt, 4, salt=b"x"), engine.add(prompt, 4)
    plan = engine.plan()
    engine.commit(plan, failing=[bad])
    assert (bad.num_computed, bad.num_output) == (0, 0)
    engine.planner.finish(bad)
    engine.drain()
    retry = engine.add(prompt, 4, salt=b"x")
    engine.drain()
    assert retry.cached_tokens == 0
    assert good.tokens == solo(good)


def test_what_can_never_fit_is_refused_and_what_just_fits_ends() -> None:
    engine = PlannedEngine(blocks=5)
    assert engine.planner.fits(20)
    assert not engine.planner.fits(21)
    with pytest.raises(ValueError, match="never fit"):
        engine.add(10, 11)
    with pytest.raises(ValueError, match="empty"):
        engine.add([], 3)
    seqs = [engine.add(10, 10) for _ in range(3)]
    with pytest.raises(ValueError, match="already"):
        engine.planner.add(seqs[0])
    engine.drain()
    assert all(seq.tokens == solo(seq) for seq in seqs)


def test_hashes_added_and_evicted_are_reported() -> None:
    engine = PlannedEngine(blocks=4)
    first = engine.add(8)
    engine.drain()
    assert engine.pool.drain_changes() == (first.block_hashes, [])
    second = engine.add(15)
    engine.drain()
    added, evicted = engine.pool.drain_changes()
    assert added == second.block_hashes[:3]
    assert evicted == first.block_hashes[::-1]
