"""Tiny random decoders of every family, and a hand-driven runner for them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.request import SamplingParams
from headrace.engine.base import RawLogprob, Sampled
from headrace.engine.kernels.base import Kernels
from headrace.engine.kernels.choose import choose_kernels
from headrace.engine.kernels.reference import ReferenceKernels
from headrace.engine.kv_cache import KVCache
from headrace.engine.models.store import cache_folder
from headrace.engine.models.weights import LoadedModel, load_model
from headrace.engine.runner import Sampling, TorchRunner
from headrace.engine.sequence import Chunk, Sequence, StepPlan

VOCAB = 160
CONTEXT = 1024

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


_LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-llama3-tied": ("Llama", {**_LLAMA3, "tie_word_embeddings": True}),
    "llama-linear-biased": (
        "Llama",
        {**_rope("linear", factor=2.0), "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "llama-mha": ("Llama", {"num_key_value_heads": 4, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 20}),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_attention_heads": 6}),
    "qwen2-yarn": ("Qwen2", {**_YARN, "num_attention_heads": 6}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-yarn-tied": (
        "Qwen3",
        {
            **_rope(
                "yarn",
                factor=8.0,
                original_max_position_embeddings=64,
                beta_fast=16.0,
                attention_factor=1.1,
                truncate=False,
            ),
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3-nope": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 0], "num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
}


@cache
def reference_model(name: str) -> Any:
    """transformers' own model, float32, the same at each call."""
    import transformers

    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**_BASE, **options})
    torch.manual_seed(len(name) + sum(map(ord, name)))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                value.add_(torch.randn_like(value) * 0.2)
    return model


def saved_model(name: str, folder: Path) -> Path:
    """The folder, with config.json and model.safetensors in it."""
    reference_model(name).save_pretrained(folder)
    return folder


def loaded_model(name: str, folder: Path) -> LoadedModel:
    return load_quietly(saved_model(name, folder))


def load_quietly(path: Path, dtype: str = "fp32") -> LoadedModel:
    return load_model(path, dtype=dtype, device="cpu", progress=lambda _fraction, _what: None)


def reference_tokens(name: str, prompt: list[int], count: int) -> list[int]:
    """What transformers' greedy generate answers."""
    answer = reference_model(name).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=count,
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


@dataclass
class Greedy:
    """Takes the largest logit, and keeps each row under (sequence id, tokens known)."""

    seen: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        for row, sequence in zip(logits, sequences, strict=True):
            self.seen[sequence.id, len(sequence.tokens)] = row.clone()
        return [Sampled(token_id) for token_id in logits.argmax(-1).tolist()]

    def score(self, logits: Tensor, next_token_ids: Many[int], k: int) -> tuple[RawLogprob, ...]:
        logprobs = logits.log_softmax(-1)
        best, ids = logprobs.topk(k, -1) if k else (logprobs[:, :0], logprobs[:, :0])
        return tuple(
            RawLogprob(
                token,
                float(row[token]),
                tuple(
                    (int(token_id), float(value))
                    for token_id, value in zip(ids[at], best[at], strict=True)
                ),
            )
            for at, (row, token) in enumerate(zip(logprobs, next_token_ids, strict=True))
        )


def make_kernels(kind: str) -> Kernels:
    """Plain or compiled ones, float32 on CPU."""
    if kind == "native" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    return choose_kernels(
        kind, dtype=torch.float32, device=torch.device("cpu"), folder=cache_folder() / "kernels"
    )


class Driver:
    """Plays planner: hands out blocks in no particular order and makes plans."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        sampler: Sampling | None = None,
        kernels: Kernels | None = None,
        block_size: int = 16,
        num_blocks: int = 256,
    ) -> None:
        self.greedy = Greedy()
        self.cache = KVCache(
            model.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.decoder.dtype,
            device=model.decoder.device,
        )
        self.runner = TorchRunner(
            model,
            sampler or self.greedy,
            self.cache,
            kernels or ReferenceKernels(model.decoder.dtype, model.decoder.device),
        )
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))
        self._free: list[int] = order.tolist()
        self._next_id = 0

    def sequence(self, tokens: list[int], *, echo: bool = False, **sampling: Any) -> Sequence:
        self._next_id += 1
        return Sequence(
            id=self._next_id,
            group=self._next_id,
            prompt_length=len(tokens),
            tokens=list(tokens),
            sampling=SamplingParams(temperature=0.0, **sampling),
            seed=0,
            max_length=CONTEXT,
            echo=echo,
        )

    def chunk(self, sequence: Sequence, length: int | None = None) -> Chunk:
        """The next `length` tokens that are not computed, all of them by default."""
        known = len(sequence.tokens)
        start = sequence.num_computed
        end = known if length is None else min(known, start + length)
        size = self.cache.block_size
        while len(sequence.block_table) * size < end:
            sequence.block_table.append(self._free.pop())
        return Chunk(sequence, start, end - start, samples=end == known)

    def step(self, *chunks: Chunk) -> list[Sampled]:
        """Runs a step and takes its tokens into the sequences."""
        outcomes = self.runner.collect(self.runner.launch(StepPlan(chunks)))
        assert len(outcomes) == len(chunks)
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            chunk.sequence.num_computed = chunk.start + chunk.length
            if outcome.token_id is not None:
                chunk.sequence.tokens.append(outcome.token_id)
        return outcomes

    def drop(self, sequence: Sequence) -> None:
        """What preemption does."""
        self._free[:0] = sequence.block_table
        sequence.block_table = []
        sequence.num_computed = 0

    def generate(self, sequence: Sequence, count: int, chunk: int | None = None) -> list[int]:
        """Alone, up to `count` tokens, computing at most `chunk` tokens a step."""
        while sequence.num_output < count:
            self.step(self.chunk(sequence, chunk))
        return sequence.tokens[sequence.prompt_length :]
