"""The engine's turn with real planner, pool and output stage around a model that is a hash."""

from __future__ import annotations

import random

import msgspec
import pytest

from headrace.core.events import FinishReason
from headrace.engine.blocks import BlockPool
from headrace.engine.core import EngineCore
from support.hash_engine import (
    BAD_SCORES,
    POISON,
    VOCAB_SIZE,
    Collected,
    HashRunner,
    answer,
    build_core,
    submit,
)

LONG = "a long prompt that takes several chunks to compute, at sixteen tokens a step. " * 4


def solo(prompt: str, tokens: int) -> str:
    return bytes(answer(list(prompt.encode()), tokens)).decode()


def assert_at_rest(core: EngineCore, pool: BlockPool) -> None:
    """Nothing runs, nothing waits, every block is free, and the last word said so."""
    assert core.idle
    assert pool.num_used == 0
    pool.check([])
    assert core.step() is None


def test_one_sequence_gives_the_model_answer() -> None:
    core, _, pool = build_core()
    core.submit(submit(1, "hello", max_tokens=20))
    got = Collected().run(core)
    assert got.text == {1: solo("hello", 20)}
    assert got.ended[1].finish is FinishReason.LENGTH
    assert_at_rest(core, pool)


@pytest.mark.parametrize("budget", [1, 3, 16, 1000])
def test_a_mixed_batch_gives_each_its_solo_answer(budget: int) -> None:
    core, _, pool = build_core(max_step_tokens=budget)
    prompts = {seq: LONG[: 7 + 13 * seq] for seq in range(20)}
    for seq, prompt in prompts.items():
        core.submit(submit(seq, prompt, max_tokens=1 + seq))
    got = Collected().run(core)
    assert got.text == {seq: solo(prompt, 1 + seq) for seq, prompt in prompts.items()}
    assert_at_rest(core, pool)


def test_the_end_is_at_the_step_of_the_stop() -> None:
    core, runner, pool = build_core()
    text = solo("stop here", 40)
    core.submit(submit(1, "stop here", max_tokens=40, stop=(text[10:14],)))
    got = Collected().run(core)
    assert got.text == {1: text[: text.index(text[10:14])]}
    assert got.ended[1].stop == text[10:14]
    assert len(runner.plans) == text.index(text[10:14]) + 4
    assert_at_rest(core, pool)


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "fits"),
        [
            (127, 1, True),
            (128, 1, False),
            (128, 0, True),
            (129, 0, False),
            (128, None, False),
            (127, None, True),
        ],
    )
    def test_context_limit(self, prompt: int, max_tokens: int | None, fits: bool) -> None:
        core, runner, pool = build_core(max_context=128)
        core.submit(submit(1, "x" * prompt, max_tokens=max_tokens))
        got = Collected().run(core)
        assert (got.ended[1].error is None) is fits
        assert got.ended[1].invalid is not fits
        if not fits:
            assert "128" in str(got.ended[1].error)
            assert str(prompt) in str(got.ended[1].error)
            assert not runner.plans
        assert_at_rest(core, pool)

    def test_what_is_asked_beyond_the_context_is_cut_to_it(self) -> None:
        core, _, _ = build_core(max_context=128)
        core.submit(submit(1, "x" * 120, max_tokens=20))
        got = Collected().run(core)
        assert len(got.ids[1]) == 8
        assert got.ended[1].finish is FinishReason.LENGTH

    def test_memory_limit(self) -> None:
        core, _, pool = build_core(HashRunner(num_blocks=4, block_size=16), max_context=10_000)
        assert core.max_length == 64
        core.submit(submit(1, "x" * 64, max_tokens=1))
        core.submit(submit(2, "x" * 60, max_tokens=100))
        got = Collected().run(core)
        assert got.ended[1].invalid
        assert len(got.ids[2]) == 4
        assert got.ended[2].finish is FinishReason.LENGTH
        assert_at_rest(core, pool)

    @pytest.mark.parametrize("prompt", [[], [-1], [VOCAB_SIZE], [5, 2**40]])
    def test_prompts_that_are_none(self, prompt: list[int]) -> None:
        core, runner, pool = build_core()
        core.submit(submit(1, "neighbour", max_tokens=5))
        core.submit(submit(2, prompt, max_tokens=5))
        got = Collected().run(core)
        assert got.ended[2].invalid
        assert got.text[1] == solo("neighbour", 5)
        assert all(chunk.sequence.id == 1 for plan in runner.plans for chunk in plan.chunks)
        assert_at_rest(core, pool)


class TestIsolation:
    def test_a_sequence_that_breaks_the_step_ends_alone(self) -> None:
        core, _, pool = build_core()
        for seq in range(4):
            core.submit(submit(seq, f"neighbour {seq}", max_tokens=20))
        core.submit(submit(9, [65, POISON], max_tokens=20))
        got = Collected().run(core)
        assert got.ended[9].error
        assert not got.ended[9].invalid
        assert got.text == {9: "", **{seq: solo(f"neighbour {seq}", 20) for seq in range(4)}}
        assert_at_rest(core, pool)

    def test_a_sequence_without_usable_scores_ends_alone(self) -> None:
        core, _, pool = build_core()
        core.submit(submit(1, "neighbour", max_tokens=20))
        core.submit(submit(2, [BAD_SCORES], max_tokens=20))
        got = Collected().run(core)
        assert got.ended[2].error == "The model gave no usable scores."
        assert got.text[1] == solo("neighbour", 20)
        assert_at_rest(core, pool)

    def test_a_bad_sequence_alone_does_not_stop_the_engine(self) -> None:
        core, _, pool = build_core()
        core.submit(submit(1, [POISON], max_tokens=20))
        assert Collected().run(core).ended[1].error
        core.submit(submit(2, "next", max_tokens=20))
        assert Collected().run(core).text[2] == solo("next", 20)
        assert_at_rest(core, pool)

    def test_nor_do_the_choices_of_one_bad_request(self) -> None:
        core, _, pool = build_core()
        for seq in (1, 2):
            core.submit(msgspec.structs.replace(submit(seq, [POISON], max_tokens=20), group=1))
        got = Collected().run(core)
        assert got.ended[1].error
        assert got.ended[2].error
        core.submit(submit(3, "next", max_tokens=20))
        assert Collected().run(core).text[3] == solo("next", 20)
        assert_at_rest(core, pool)

    def test_a_runner_that_fails_on_everything_is_not_hidden(self) -> None:
        core, runner, _ = build_core()
        runner.broken = True
        core.submit(submit(1))
        core.submit(submit(2))
        with pytest.raises(RuntimeError):
            core.step()

    def test_nor_is_one_that_fails_on_each_request_in_turn(self) -> None:
        core, runner, _ = build_core()
        runner.broken = True
        for seq in range(2):
            core.submit(submit(seq))
            assert Collected().run(core).ended[seq].error
        core.submit(submit(2))
        with pytest.raises(RuntimeError):
            core.step()

    def test_an_output_stage_that_raises_ends_one_sequence(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core, _, pool = build_core()
        process = core._outputs.process

        def fail(chunk: object, sampled: object) -> object:
            if chunk.sequence.id == 2:  # type: ignore[attr-defined]  # a Chunk
                raise ValueError("bad text")
            return process(chunk, sampled)  # type: ignore[arg-type]  # handed through

        monkeypatch.setattr(core._outputs, "process", fail)
        core.submit(submit(1, "neighbour", max_tokens=20))
        core.submit(submit(2, "bad", max_tokens=20))
        got = Collected().run(core)
        assert "bad text" not in str(got.ended[2].error)
        assert got.text[1] == solo("neighbour", 20)
        assert_at_rest(core, pool)


class TestAbort:
    """A runs all the while; its answer must be its solo answer."""

    def test_queued(self) -> None:
        core, runner, pool = build_core(max_running=1)
        core.submit(submit(1, "A", max_tokens=50))
        core.submit(submit(2, "B", max_tokens=50))
        got = Collected()
        got.step(core)
        core.abort([2])
        got.run(core)
        assert got.text == {1: solo("A", 50)}
        assert all(chunk.sequence.id == 1 for plan in runner.plans for chunk in plan.chunks)
        assert_at_rest(core, pool)

    def test_before_the_first_step(self) -> None:
        core, runner, pool = build_core()
        core.submit(submit(1))
        core.abort([1])
        step = core.step()
        assert step is not None
        assert step.outputs == []
        assert not runner.plans
        assert_at_rest(core, pool)

    def test_in_mid_prefill(self) -> None:
        core, _, pool = build_core(max_step_tokens=16)
        core.submit(submit(1, "A", max_tokens=50))
        core.submit(submit(2, LONG, max_tokens=50))
        got = Collected()
        got.step(core)
        got.step(core)
        assert pool.num_used > 1
        core.abort([2])
        assert pool.num_used == 1
        got.run(core)
        assert got.text[1] == solo("A", 50)
        assert 2 not in got.ended
        assert_at_rest(core, pool)

    def test_in_decode_frees_blocks_before_the_next_step_and_says_so(self) -> None:
        core, _, pool = build_core()
        core.submit(submit(2, LONG, max_tokens=1000))
        for _ in range(20):
            core.step()
        core.abort([2])
        assert pool.num_used == 0
        assert not core.idle
        step = core.step()
        assert step is not None
        assert (step.stats.running, step.stats.waiting, step.stats.blocks_used) == (0, 0, 0)
        assert step.stats.seconds == 0
        assert_at_rest(core, pool)

    def test_on_the_very_step_it_ends(self) -> None:
        core, _, pool = build_core()
        core.submit(submit(1, "A", max_tokens=50))
        core.submit(submit(2, "C", max_tokens=3))
        got = Collected()
        while 2 not in got.ended:
            got.step(core)
        core.abort([2])
        got.run(core)
        assert got.text == {1: solo("A", 50), 2: solo("C", 3)}
        assert_at_rest(core, pool)

    def test_while_preempted(self) -> None:
        core, runner, pool = build_core(HashRunner(num_blocks=8), prefix_cache=False)
        core.submit(submit(1, "A" * 30, max_tokens=90))
        core.submit(submit(2, "B" * 30, max_tokens=90))
        got = Collected()
        while not any(plan.preempted for plan in runner.plans):
            got.step(core)
        core.abort([2])
        got.run(core)
        assert got.text[1] == solo("A" * 30, 90)
        assert 2 not in got.ended
        assert_at_rest(core, pool)

    def test_unknown_and_twice(self) -> None:
        core, _, pool = build_core()
        core.abort([7, 7])
        assert core.idle
        core.submit(submit(1))
        core.abort([1, 1])
        core.abort([1])
        Collected().run(core)
        assert_at_rest(core, pool)

    def test_two_hundred_at_random(self) -> None:
        core, _, pool = build_core(HashRunner(num_blocks=64), max_running=8, max_step_tokens=32)
        rng = random.Random(20)
        core.submit(submit(0, "A", max_tokens=400))
        got = Collected()
        open_seqs: list[int] = []
        for seq in range(1, 201):
            core.submit(submit(seq, LONG[: rng.randrange(1, 200)], max_tokens=rng.randrange(1, 99)))
            open_seqs.append(seq)
            for _ in range(rng.randrange(3)):
                got.step(core)
            if rng.random() < 0.9:
                core.abort([open_seqs.pop(rng.randrange(len(open_seqs)))])
        got.run(core)
        assert got.text[0] == solo("A", 400)
        assert {0, *open_seqs} <= got.ended.keys()
        assert_at_rest(core, pool)


class TestPreemption:
    def test_answers_equal_solo_runs(self) -> None:
        core, _, pool = build_core(HashRunner(num_blocks=12), prefix_cache=False)
        for seq in range(4):
            core.submit(submit(seq, f"prompt {seq}", max_tokens=100))
        got = Collected()
        preemptions = 0
        while not core.idle:
            step = core.step()
            assert step is not None
            preemptions = step.stats.preemptions_total
            for output in step.outputs:
                got.add(output)
        assert preemptions > 0
        assert got.text == {seq: solo(f"prompt {seq}", 100) for seq in range(4)}
        assert all(len(got.ids[seq]) == 100 for seq in range(4))
        assert_at_rest(core, pool)

    def test_with_a_stop_string_half_said(self) -> None:
        """Whenever preemption comes, the stop is found and nothing of it leaks."""
        texts = {seq: solo(f"prompt {seq}", 100) for seq in range(4)}
        stops = {seq: text[60:85] for seq, text in texts.items()}
        for num_blocks in range(7, 20):
            core, runner, pool = build_core(HashRunner(num_blocks=num_blocks))
            for seq in range(4):
                core.submit(submit(seq, f"prompt {seq}", max_tokens=100, stop=(stops[seq],)))
            got = Collected().run(core)
            assert got.text == {seq: text[:60] for seq, text in texts.items()}
            if num_blocks == 7:
                assert any(plan.preempted for plan in runner.plans)
            assert_at_rest(core, pool)


class TestStats:
    def test_tokens_of_each_kind_add_up(self) -> None:
        core, runner, _ = build_core(max_step_tokens=16, prefix_cache=False)
        ticks = iter(range(1_000_000))
        core._clock = lambda: float(next(ticks))
        core.submit(submit(1, "x" * 40, max_tokens=5))
        core.submit(submit(2, "y" * 8, max_tokens=3))
        prefill = decode = 0
        while not core.idle:
            step = core.step()
            assert step is not None
            stats = step.stats
            assert stats.seconds == 1.0
            assert stats.prefill_tokens + stats.decode_tokens == runner.plans[-1].num_tokens
            assert stats.blocks_total == runner.num_blocks
            prefill += stats.prefill_tokens
            decode += stats.decode_tokens
        assert prefill == 40 + 8
        assert decode == (5 - 1) + (3 - 1)

    def test_running_waiting_and_blocks(self) -> None:
        core, _, _ = build_core(max_running=2)
        for seq in range(5):
            core.submit(submit(seq, "x" * 17, max_tokens=10, stop=()))
        step = core.step()
        assert step is not None
        assert step.stats.running + step.stats.waiting == 5
        assert step.stats.running <= 2
        assert step.stats.blocks_used >= 2

    def test_prefix_hits_are_counted_and_told(self) -> None:
        core, _, _ = build_core(max_step_tokens=1000)
        core.submit(submit(1, LONG, max_tokens=2, salt=b"a"))
        first = Collected().run(core)
        assert first.started[1].cached_tokens == 0
        core.submit(submit(2, LONG, max_tokens=2, salt=b"a"))
        core.submit(submit(3, LONG, max_tokens=2, salt=b"b"))
        second = Collected()
        added: list[bytes] = []
        while not core.idle:
            step = core.step()
            assert step is not None
            added += step.blocks_added
            for output in step.outputs:
                second.add(output)
            stats = step.stats
        hits = (len(LONG) - 1) // 16 * 16
        assert second.started[2].cached_tokens == hits
        assert second.started[3].cached_tokens == 0
        assert stats.prefix_hits_total == hits
        assert stats.prefix_queries_total == 3 * len(LONG)
        assert len(added) == len(LONG) // 16
        assert second.text[2] == second.text[3] == first.text[1]

    def test_an_idle_engine_says_nothing(self) -> None:
        core, _, _ = build_core()
        assert core.idle
        assert core.step() is None


def test_targets_take_effect_at_the_next_step() -> None:
    core, runner, _ = build_core(max_step_tokens=64, max_running=8)
    for seq in range(6):
        core.submit(submit(seq, LONG[seq:], max_tokens=5))
    core.step()
    assert runner.plans[-1].num_tokens == 64
    core.set_targets(10, 8)
    core.step()
    assert runner.plans[-1].num_tokens == 10


def test_echo_with_scores_covers_the_prompt() -> None:
    core, _, _ = build_core(max_step_tokens=16)
    core.submit(submit(1, LONG, echo=True, max_tokens=0, logprobs=1, prompt_logprobs=1))
    got = Collected()
    outputs = []
    while not core.idle:
        step = core.step()
        assert step is not None
        outputs += step.outputs
        for output in step.outputs:
            got.add(output)
    (echoed,) = [output for output in outputs if output.prompt_text is not None]
    assert echoed.prompt_text == LONG
    assert echoed.prompt_logprobs is not None
    assert len(echoed.prompt_logprobs) == len(LONG)
    assert echoed.prompt_logprobs[0].logprob is None
    assert all(entry.logprob == -1.0 for entry in echoed.prompt_logprobs[1:])
    assert got.ended[1].finish is FinishReason.LENGTH
    assert got.ids[1] == []
