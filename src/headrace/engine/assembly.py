"""Puts the engine together from a model on disk. The only place that knows every part."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tokenizers import Tokenizer

from headrace.core.health import Stage
from headrace.core.request import SamplingParams
from headrace.engine.base import ModelRunner
from headrace.engine.blocks import BlockPool
from headrace.engine.core import EngineCore
from headrace.engine.kernels.base import Kernels
from headrace.engine.kernels.choose import choose_kernels
from headrace.engine.kernels.native import NativeUnavailable
from headrace.engine.kv_cache import KVCache, plan_num_blocks
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.errors import ModelError
from headrace.engine.models.store import cache_folder
from headrace.engine.models.tokenizer import TokenizerBundle, load_tokenizer
from headrace.engine.models.weights import LoadedModel, load_model
from headrace.engine.output import OutputProcessor
from headrace.engine.planner import Planner
from headrace.engine.process import ProgressReport
from headrace.engine.runner import TorchRunner
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import Chunk, Sequence, StepPlan
from headrace.engine.wire import EngineConfig, ModelInfo

__all__ = ["build_engine"]

_WARM_UP_BUDGET_S = 1.0
_WARM_UP_PROMPT = 64
_SAMPLERS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9),
)


def build_engine(config: EngineConfig, progress: ProgressReport) -> tuple[EngineCore, ModelInfo]:
    """Loads, reserves and warms up. Raises ModelError where the model cannot be served."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    path = Path(config.model_path)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(load_tokenizer, path, chat_template=config.chat_template)
        model = load_model(
            path,
            dtype=config.dtype,
            device=config.device,
            progress=lambda fraction, detail: progress(Stage.LOAD_WEIGHTS, fraction, detail),
        )
        bundle = reading.result()

    progress(Stage.RESERVE_KV, 0.0, "")
    decoder = model.decoder
    context = min(
        config.max_context or decoder.config.context_length, decoder.config.context_length
    )
    num_blocks = plan_num_blocks(
        decoder.config,
        block_size=config.block_size,
        dtype=decoder.dtype,
        device=decoder.device,
        kv_bytes=config.kv_bytes,
        max_running=config.max_running,
        context_length=context,
    )
    cache = KVCache(
        decoder.config,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=decoder.dtype,
        device=decoder.device,
    )
    progress(Stage.RESERVE_KV, 1.0, f"{num_blocks} blocks of {config.block_size} tokens")

    eos = list(dict.fromkeys((*bundle.eos_token_ids, *decoder.config.eos_token_ids)))
    vocab_size = decoder.config.vocab_size
    kernels = _kernels(config, decoder)
    runner = TorchRunner(model, Sampler(vocab_size, eos, decoder.device), cache, kernels)
    blocks = BlockPool(num_blocks, config.block_size, prefix_cache=config.prefix_cache)
    core = EngineCore(
        runner,
        Planner(blocks, max_running=config.max_running, max_step_tokens=config.max_step_tokens),
        OutputProcessor(Tokenizer.from_buffer(bundle.tokenizer_json), eos),
        blocks,
        max_context=context,
        vocab_size=vocab_size,
        rest=cache.populate,
    )
    _warm_up(runner, config, core.max_length, progress)
    return core, _describe(
        config,
        model,
        bundle,
        eos_token_ids=eos,
        cache=cache,
        max_length=core.max_length,
        kernels=kernels.name,
    )


def _kernels(config: EngineConfig, decoder: Decoder) -> Kernels:
    folder = cache_folder() / "kernels"
    try:
        return choose_kernels(
            config.kernels, dtype=decoder.dtype, device=decoder.device, folder=folder
        )
    except NativeUnavailable as error:
        raise ModelError(f"the native kernels cannot be used: {error}") from None


def _warm_up(
    runner: ModelRunner, config: EngineConfig, max_length: int, progress: ProgressReport
) -> None:
    """Runs steps of the shapes to come, so that no first request pays for memory and code
    generation. The pool does not know of it, so nothing is left in the prefix cache."""
    progress(Stage.WARM_UP, 0.0, "")
    end = time.monotonic() + _WARM_UP_BUDGET_S
    plans = list(_warm_up_plans(runner, config, max_length))
    for done, plan in enumerate(plans):
        outcomes = runner.collect(runner.launch(plan))
        error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        if error is not None:
            raise ModelError(f"the model does not work: {error}")
        progress(Stage.WARM_UP, (done + 1) / len(plans), f"{plan.num_tokens} tokens")
        if time.monotonic() >= end:
            break
    progress(Stage.WARM_UP, 1.0, "")


def _warm_up_plans(
    runner: ModelRunner, config: EngineConfig, max_length: int
) -> Iterator[StepPlan]:
    """One prompt chunk, then decodes of one sequence, two, four, ..."""
    prompt = min(_WARM_UP_PROMPT, config.max_step_tokens, max_length)
    blocks = range(-(-prompt // runner.block_size))
    yield StepPlan((Chunk(_dummy(prompt, list(blocks), 0), 0, prompt, samples=True),))
    size = 1
    while size <= config.max_running:
        rows = (_dummy(1, [row % runner.num_blocks], row) for row in range(size))
        yield StepPlan(tuple(Chunk(sequence, 0, 1, samples=True) for sequence in rows))
        size *= 2


def _dummy(length: int, table: list[int], row: int) -> Sequence:
    return Sequence(
        id=-1 - row,
        group=-1,
        prompt_length=length,
        tokens=[0] * length,
        sampling=_SAMPLERS[row % len(_SAMPLERS)],
        seed=0,
        max_length=length + 1,
        block_table=table,
    )


def _describe(
    config: EngineConfig,
    model: LoadedModel,
    bundle: TokenizerBundle,
    *,
    eos_token_ids: list[int],
    cache: KVCache,
    max_length: int,
    kernels: str,
) -> ModelInfo:
    revision = hashlib.blake2b(digest_size=16)
    for part in (
        model.revision.encode(),
        bundle.tokenizer_json,
        (bundle.chat_template or "").encode(),
    ):
        revision.update(len(part).to_bytes(8, "little") + part)
    return ModelInfo(
        architecture=model.config.architecture,
        parameters=model.parameters,
        context_length=max_length,
        vocab_size=model.config.vocab_size,
        eos_token_ids=eos_token_ids,
        bos_token=bundle.bos_token,
        eos_token=bundle.eos_token,
        tokenizer=bundle.tokenizer_json,
        chat_template=bundle.chat_template,
        dtype=model.dtype,
        device=model.device,
        weight_bytes=model.weight_bytes,
        revision=revision.hexdigest(),
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        kv_bytes=cache.bytes,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        kernels=kernels,
    )
