"""An engine whose model is a hash: the next token depends on the whole history and nothing else.

Everything around the model is real. `build` has the signature that the engine process expects.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.core.request import SamplingParams
from headrace.engine.base import RawLogprob, Sampled
from headrace.engine.blocks import BlockPool
from headrace.engine.core import EngineCore
from headrace.engine.models.errors import ModelError
from headrace.engine.output import OutputProcessor
from headrace.engine.planner import Planner
from headrace.engine.sequence import Chunk, StepPlan
from headrace.engine.vocabulary import byte_alphabet
from headrace.engine.wire import EngineConfig, ModelInfo, Output, Submit

EOS = 256
VOCAB_SIZE = 257
NUM_BLOCKS = 256
LETTERS = b"abcdefghijklmnopqrstuvwxyz "

POISON = 1
"""In a prompt: this sequence cannot be computed, alone or in company."""
FAILED = "The engine failed on this request."
BAD_SCORES = 2
"""In a prompt: this sequence's own outcome is an error."""


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    """Token ids are bytes; EOS is special."""
    vocab = {spelling: byte for byte, spelling in byte_alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    assert tokenizer.token_to_id("<eos>") == EOS
    return tokenizer


def next_token(tokens: list[int], seed: int) -> int:
    data = b"%d:" % seed + b",".join(b"%d" % token for token in tokens)
    return LETTERS[zlib.crc32(data) % len(LETTERS)]


def answer(prompt: list[int], length: int, seed: int = 0) -> list[int]:
    """What `length` steps alone give."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class HashRunner:
    """Checks that each chunk has the memory it needs, and keeps what was planned."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.plans: list[StepPlan] = []
        self.broken = False

    def launch(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        for chunk in plan.chunks:
            blocks = len(chunk.sequence.block_table)
            assert blocks * self.block_size >= chunk.start + chunk.length
        return plan

    def collect(self, handle: StepPlan) -> list[Sampled]:
        outcomes = [self._sample(chunk) for chunk in handle.chunks]
        if all(outcome.error == FAILED for outcome in outcomes):
            raise RuntimeError("the model broke")
        return outcomes

    def _sample(self, chunk: Chunk) -> Sampled:
        seq = chunk.sequence
        if self.broken or POISON in seq.tokens[: seq.prompt_length]:
            return Sampled(error=FAILED)
        if BAD_SCORES in seq.tokens[: seq.prompt_length]:
            return Sampled(error="The model gave no usable scores.")
        scores: tuple[RawLogprob, ...] = ()
        if seq.needs_prompt_logprobs:
            positions = range(
                chunk.start + 1, min(chunk.start + chunk.length + 1, seq.prompt_length)
            )
            scores = tuple(RawLogprob(seq.tokens[p], -1.0, ()) for p in positions)
        if not chunk.samples:
            return Sampled(prompt_logprobs=scores)
        token = next_token(seq.tokens, seq.seed if seq.sampling.temperature > 0 else 0)
        logprob = (
            None if seq.sampling.logprobs is None else RawLogprob(token, -0.5, ((token, -0.5),))
        )
        return Sampled(token, logprob, scores)


def build_core(
    runner: HashRunner | None = None,
    *,
    max_running: int = 64,
    max_step_tokens: int = 64,
    max_context: int = 4096,
    prefix_cache: bool = True,
) -> tuple[EngineCore, HashRunner, BlockPool]:
    runner = runner or HashRunner()
    pool = BlockPool(runner.num_blocks, runner.block_size, prefix_cache=prefix_cache)
    core = EngineCore(
        runner,
        Planner(pool, max_running=max_running, max_step_tokens=max_step_tokens),
        OutputProcessor(byte_tokenizer(), [EOS]),
        pool,
        max_context=max_context,
        vocab_size=VOCAB_SIZE,
    )
    return core, runner, pool


def build(
    config: EngineConfig, progress: Callable[[str, float, str], None]
) -> tuple[EngineCore, ModelInfo]:
    """`model_path` "missing" fails for good, "broken" fails in a way that may pass."""
    if config.model_path == "missing":
        raise ModelError("the model is not there")
    if config.model_path == "broken":
        raise ValueError("the disk hiccups")
    for stage in ("load_weights", "reserve_kv", "warm_up"):
        progress(stage, 0.0, "")
        progress(stage, 1.0, stage)
    core, runner, _ = build_core(
        HashRunner(block_size=config.block_size),
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_context=config.max_context or 4096,
        prefix_cache=config.prefix_cache,
    )
    return core, ModelInfo(
        architecture="hash",
        parameters=0,
        context_length=core.max_length,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS],
        bos_token=None,
        eos_token="<eos>",
        tokenizer=byte_tokenizer().to_str().encode(),
        chat_template=None,
        dtype="fp32",
        device="cpu",
        weight_bytes=0,
        revision="hash",
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        kv_bytes=0,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
    )


def submit(
    seq: int,
    prompt: str | bytes | list[int] = "hello",
    *,
    echo: bool = False,
    salt: bytes = b"",
    **sampling: Any,
) -> Submit:
    """A greedy sequence unless told otherwise."""
    ids = list(prompt.encode() if isinstance(prompt, str) else prompt)
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    return Submit(seq=seq, group=seq, prompt=ids, sampling=params, seed=seq, echo=echo, salt=salt)


@pytest.fixture
def hash_builder(monkeypatch: pytest.MonkeyPatch) -> str:
    """The dotted name of `build`, which an engine process started now can import."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    return "support.hash_engine:build"


class Collected:
    """Outputs gathered by sequence; says if anything follows an end."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.ended: dict[int, Output] = {}
        self.started: dict[int, Output] = {}

    def add(self, output: Output) -> None:
        assert output.seq not in self.ended, "something follows the end"
        if output.started:
            assert output.seq not in self.started, "started twice"
            self.started[output.seq] = output
        self.text[output.seq] = self.text.get(output.seq, "") + output.text
        self.ids.setdefault(output.seq, []).extend(output.token_ids)
        if output.finish is not None or output.error is not None:
            self.ended[output.seq] = output

    def run(self, core: EngineCore, limit: int = 100_000) -> Collected:
        """Steps until idle."""
        for _ in range(limit):
            if core.idle:
                return self
            self.step(core)
        raise AssertionError("the engine does not come to rest")

    def step(self, core: EngineCore) -> None:
        step = core.step()
        if step is not None:
            for output in step.outputs:
                self.add(output)
