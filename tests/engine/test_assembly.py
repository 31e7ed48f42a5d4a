"""The whole engine on a tiny random model: loaded from a folder, run in its own process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.core.health import Stage
from headrace.core.request import SamplingParams
from headrace.engine.assembly import build_engine
from headrace.engine.client import EngineClient
from headrace.engine.models.errors import ModelError
from headrace.engine.models.weights import LoadedModel, load_model
from headrace.engine.vocabulary import byte_alphabet
from headrace.engine.wire import EngineConfig, Output, Submit
from support.decoders import CONTEXT, VOCAB, prompt, reference_tokens, saved_model

LIMIT_S = 60.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A llama with one token a byte, for as many bytes as its vocabulary has."""
    folder = saved_model("llama", tmp_path / "model")
    vocab = {spelling: byte for byte, spelling in byte_alphabet().items() if byte < VOCAB}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def config(model: Path, **changes: Any) -> EngineConfig:
    values = {"dtype": "fp32", "device": "cpu", "kv_bytes": 4_000_000, "threads": 1, **changes}
    return EngineConfig(model_path=str(model), model_name="tiny", **values)


def greedy(seq: int, ids: list[int], tokens: int) -> Submit:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    return Submit(seq=seq, group=seq, prompt=list(ids), sampling=params, seed=0)


def quiet(_stage: str, _fraction: float, _detail: str) -> None:
    pass


def test_what_is_built(model: Path) -> None:
    said: list[tuple[str, float]] = []
    core, info = build_engine(
        config(model, max_context=200), lambda stage, fraction, _: said.append((stage, fraction))
    )
    stages = list(dict.fromkeys(stage for stage, _ in said))
    assert stages == [Stage.LOAD_WEIGHTS, Stage.RESERVE_KV, Stage.WARM_UP]
    for stage in stages:
        fractions = [fraction for name, fraction in said if name == stage]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
    assert core.idle
    assert core.max_length == info.context_length == 200
    assert (info.architecture, info.vocab_size, info.dtype) == ("llama", VOCAB, "fp32")
    assert info.kv_bytes <= 4_000_000 * 1.1
    assert info.parameters > 0


def test_the_warm_up_leaves_nothing(model: Path) -> None:
    core, _ = build_engine(config(model), quiet)
    ids = [0] * 64  # what the warm-up computed
    core.submit(greedy(1, ids, 8))
    outputs: list[Output] = []
    step = core.step()
    assert step is not None
    assert step.stats.blocks_used == 4
    while step is not None:
        outputs += step.outputs
        assert step.stats.prefix_hits_total == 0
        step = core.step()
    assert [token for output in outputs for token in output.token_ids] == (
        reference_tokens("llama", ids, 8)
    )


def test_the_context_is_what_memory_allows(model: Path) -> None:
    _, roomy = build_engine(config(model), quiet)
    assert roomy.context_length == CONTEXT
    _, tight = build_engine(config(model, kv_bytes=roomy.kv_bytes // roomy.num_blocks * 4), quiet)
    assert tight.context_length == tight.num_blocks * tight.block_size < CONTEXT


def test_the_revision_tells_models_apart(model: Path) -> None:
    _, first = build_engine(config(model), quiet)
    _, again = build_engine(config(model), quiet)
    _, other = build_engine(config(model, chat_template="{{ messages }}"), quiet)
    assert first.revision == again.revision != other.revision


@pytest.mark.parametrize("changes", [{"block_size": 1}, {"max_context": 2}, {"max_step_tokens": 1}])
def test_extremes_warm_up_too(model: Path, changes: dict[str, int]) -> None:
    core, _ = build_engine(config(model, **changes), quiet)
    core.submit(greedy(1, [5], 1))
    assert core.step() is not None
    assert core.idle


def test_a_model_of_nothing_but_nan_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(*args: Any, **options: Any) -> LoadedModel:
        loaded = load_model(*args, **options)
        loaded.decoder.norm.fill_(float("nan"))
        return loaded

    monkeypatch.setattr("headrace.engine.assembly.load_model", spoil)
    with pytest.raises(ModelError, match="does not work"):
        build_engine(config(model), quiet)


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        build_engine(config(tmp_path), quiet)


@pytest.mark.anyio
async def test_a_real_process_answers_like_transformers(model: Path) -> None:
    client = EngineClient(config(model, max_step_tokens=32))
    prompts = {length: prompt(length) for length in (1, 2, 15, 16, 17, 60, 100)}
    expected = {length: reference_tokens("llama", ids, 24) for length, ids in prompts.items()}

    async def ask(ids: list[int]) -> list[int]:
        box = await client.submit(ids, SamplingParams(temperature=0.0, max_tokens=24), [0])
        tokens: list[int] = []
        while True:
            for output in await box.take():
                assert output.error is None
                tokens += output.token_ids
                if output.finish is not None:
                    return tokens

    try:
        async with asyncio.timeout(LIMIT_S):
            await client.start()
            for _ in range(2):  # the second time from the prefix cache
                answers = await asyncio.gather(*(ask(ids) for ids in prompts.values()))
                assert dict(zip(prompts, answers, strict=True)) == expected
    finally:
        await client.close(0.0)
    assert client.stats.prefix_hits_total > 0
