from __future__ import annotations

import pytest

from headrace.engine.base import Sampled
from headrace.engine.sequence import Sequence, SequenceState
from support.planning import PlannedEngine, solo


def test_one_sequence_from_prompt_to_end() -> None:
    engine = PlannedEngine(budget=5)
    seq = engine.add(12, 3)
    assert engine.planner.waiting == (seq,)
    assert [engine.step()[seq] for _ in range(5)] == [5, 5, 2, 1, 1]
    assert seq.tokens == solo(seq)
    assert seq.num_output == 3
    assert seq.state is SequenceState.FINISHED
    assert engine.planner.idle
    assert engine.planner.plan() is None
    assert engine.pool.num_used == 0


def test_decodes_come_first_and_prompts_take_the_rest() -> None:
    engine = PlannedEngine(budget=8)
    talkers = [engine.add(2, 50) for _ in range(3)]
    engine.step()
    reader = engine.add(40)
    plan = engine.plan()
    assert [chunk.sequence for chunk in plan.chunks] == [*talkers, reader]
    assert [chunk.length for chunk in plan.chunks] == [1, 1, 1, 5]


def test_every_decode_is_served_however_small_the_budget() -> None:
    engine = PlannedEngine()
    talkers = [engine.add(2, 50) for _ in range(6)]
    engine.step()
    engine.planner.set_targets(2, 64)
    reader = engine.add(9)
    for _ in range(9):
        served = engine.step()
        assert served.pop(reader) == 1
        assert served == dict.fromkeys(talkers, 1)
    assert len(reader.tokens) == 10


def test_a_long_prompt_neither_stops_streams_nor_a_short_prompt() -> None:
    engine = PlannedEngine(budget=17)
    talker = engine.add(1, 200)
    engine.step()
    long = engine.add(800)
    engine.step()
    short = engine.add(24)
    while engine.computed[long] < 800:
        left = 800 - engine.computed[long]
        served = engine.step()
        assert served[talker] == 1
        assert served[long] >= min(left, 8)
        assert sum(served.values()) <= 17
    assert engine.first_token[short] <= 2 + 24 // 8
    assert engine.first_token[long] <= 2 + 800 // 16 + 24 // 8 + 1


def test_short_prompts_without_pause_do_not_stop_a_long_one() -> None:
    engine = PlannedEngine(budget=16, running=8)
    long = engine.add(400)
    while long not in engine.first_token:
        short = engine.add(20)
        assert engine.step()[long] >= 8
        engine.planner.abort([short.id] if len(engine.planner.waiting) > 3 else [])
    assert engine.first_token[long] <= 400 // 8


def test_long_prompts_without_pause_do_not_stop_a_short_one() -> None:
    engine = PlannedEngine(budget=16)
    for _ in range(5):
        engine.add(400)
        engine.step()
    short = engine.add(20)
    while short not in engine.first_token:
        engine.add(400)
        engine.step()
    assert engine.first_token[short] <= 5 + 3


def test_a_budget_of_one_token_is_shared_in_turns() -> None:
    engine = PlannedEngine(budget=1)
    long, short = engine.add(100), engine.add(10)
    for _ in range(6):
        engine.step()
    assert engine.computed == {long: 3, short: 3}


def test_equal_prompts_end_one_after_another() -> None:
    engine = PlannedEngine(budget=16)
    prompts = [engine.add(32) for _ in range(4)]
    engine.drain()
    assert [engine.first_token[seq] for seq in prompts] == [2, 4, 6, 8]


def test_everyone_is_served_in_bounded_time_under_continuous_arrivals() -> None:
    engine = PlannedEngine(blocks=24, budget=8, running=4)
    added: dict[Sequence, int] = {}
    ends: dict[Sequence, int] = {}
    sizes = [5, 60, 3, 9, 31, 2, 17]
    # At most 7 others are ahead of each. One that is first in place computes its prompt, or
    # recomputes all it had, at 4 tokens a step or more, and then a token of its answer a step.
    bound = 8 * (90 // 4 + 30)
    for turn in range(4 * bound):
        if len(engine.planner.waiting) < 3:
            added[engine.add(sizes[turn % len(sizes)], 30)] = engine.steps
        engine.step()
        for seq in added:
            if seq.state is SequenceState.FINISHED:
                ends.setdefault(seq, engine.steps)
    assert engine.planner.preemptions_total > 0
    assert max(ends[seq] - added[seq] for seq in ends) <= bound
    assert all(seq in ends for seq, start in added.items() if start < 3 * bound)


def test_cancel_in_every_state_leaves_the_others_alone() -> None:
    engine = PlannedEngine(running=3, budget=8)
    stays = engine.add(6, 30)
    ends_now = engine.add(4, 1)
    engine.step()
    engine.step()
    in_prefill = engine.add(40)
    engine.step()
    third = engine.add(6, 20)
    queued = engine.add(6, 20)
    plan = engine.plan()
    assert queued.state is SequenceState.WAITING
    assert 0 < in_prefill.num_computed < 40
    # In mid-prefill and in mid-step, twice named, unknown and already ended ones among them.
    dropped = engine.planner.abort([in_prefill.id, queued.id, 99, ends_now.id, in_prefill.id])
    assert dropped == [in_prefill, queued]
    computed = in_prefill.num_computed
    engine.commit(plan)
    assert in_prefill.num_computed == computed == 0
    assert queued.num_output == 0
    engine.drain()
    for seq in (stays, ends_now, third):
        assert seq.tokens == solo(seq)
    assert engine.planner.abort([stays.id, third.id]) == []


def test_cancel_at_the_very_step_that_ends_it() -> None:
    engine = PlannedEngine()
    stays, ends = engine.add(6, 9), engine.add(6, 2)
    engine.step()
    plan = engine.plan()
    assert engine.planner.abort([ends.id]) == [ends]
    engine.commit(plan)
    assert ends.num_output == 1
    engine.planner.finish(ends)
    engine.drain()
    assert stays.tokens == solo(stays)


def test_priority_orders_the_queue_and_picks_the_victim() -> None:
    engine = PlannedEngine(blocks=7, running=2)
    late = engine.add(8, 16, priority=1)
    engine.step()
    urgent = engine.add(7, 16, priority=-1)
    plain = engine.add(4)
    assert engine.planner.waiting == (urgent, plain)
    while not engine.planner.preemptions_total:
        engine.step()
    assert late.num_preemptions == 1
    assert engine.planner.running == (urgent,)
    assert engine.planner.waiting == (plain, late)
    engine.drain()
    assert urgent.num_preemptions == 0
    assert (late.tokens, urgent.tokens) == (solo(late), solo(urgent))


def test_an_urgent_prompt_gets_the_whole_share() -> None:
    engine = PlannedEngine(budget=8)
    engine.add(40)
    engine.step()
    urgent = engine.add(40, priority=-1)
    assert engine.step() == {urgent: 8}


def test_lower_targets_stop_nobody() -> None:
    engine = PlannedEngine()
    running = [engine.add(4, 20) for _ in range(4)]
    engine.step()
    engine.planner.set_targets(8, 2)
    late = engine.add(4)
    for _ in range(5):
        assert set(engine.step()) == set(running)
    engine.planner.abort([seq.id for seq in running[:2]])
    assert late not in engine.step()
    engine.planner.abort([running[2].id])
    assert late in engine.step()
    for targets in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            engine.planner.set_targets(*targets)


def test_an_outcome_that_is_not_the_plans_changes_nothing() -> None:
    engine = PlannedEngine()
    seqs = [engine.add(3, 3), engine.add(3, 3)]
    plan = engine.plan()
    for wrong in ([Sampled(1)], [Sampled(1), Sampled()], [Sampled(1)] * 3):
        with pytest.raises(ValueError, match=r"argument 2|no token"):
            engine.planner.commit(plan, wrong)
        assert [seq.num_computed for seq in seqs] == [0, 0]
    engine.commit(plan)
    engine.drain()
