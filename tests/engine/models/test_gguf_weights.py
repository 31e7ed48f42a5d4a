from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from headrace.engine.models.errors import ModelError
from headrace.engine.models.gguf_weights import SUPPORTED_TYPES, GGUFWeights
from support.decoders import (
    Driver,
    load_quietly,
    prompt,
    reference_model,
    reference_tokens,
)
from support.gguf_files import random_blocks, write_gguf, write_raw

WIDTH = 256
HEADS, KV_HEADS = 4, 2
METADATA: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
K_QUANTS = {Kind.Q4_K, Kind.Q5_K, Kind.Q6_K}


def _stored(kind: Kind, rows: int, width: int) -> np.ndarray:
    values = np.random.default_rng(1).normal(size=(rows, width)).astype(np.float32)
    if kind is Kind.F32:
        return values
    if kind is Kind.F16:
        return values.astype(np.float16)
    if kind in K_QUANTS:
        return random_blocks(kind, rows, width)
    return np.asarray(gguf.quants.quantize(values, kind))


@pytest.mark.parametrize("kind", sorted(SUPPORTED_TYPES), ids=lambda kind: kind.name)
def test_every_supported_type_is_dequantised(tmp_path: Path, kind: Kind) -> None:
    """Many rows, so that they are read in several pieces, and Q rows out of order."""
    rows = 2500
    tensors = {
        "token_embd.weight": _stored(kind, rows, WIDTH),
        "blk.0.attn_q.weight": _stored(kind, WIDTH, WIDTH),
        "blk.0.attn_v.weight": _stored(kind, WIDTH // 2, WIDTH),
    }
    kinds = {} if kind in (Kind.F32, Kind.F16) else dict.fromkeys(tensors, kind)
    weights = GGUFWeights(write_raw(tmp_path / "m.gguf", "llama", METADATA, tensors, kinds))

    def wanted(name: str) -> np.ndarray:
        raw = np.ascontiguousarray(tensors[name])
        return np.asarray(gguf.quants.dequantize(raw.view(np.uint8), kind))

    embedding = weights.load("embed_tokens.weight")
    assert embedding.shape == (rows, WIDTH)
    assert embedding.dtype == torch.float32
    assert np.isfinite(embedding.numpy()).all()
    assert embedding.std() > 0
    np.testing.assert_array_equal(embedding.numpy(), wanted("token_embd.weight"))
    values = weights.load("layers.0.self_attn.v_proj.weight").numpy()
    np.testing.assert_array_equal(values, wanted("blk.0.attn_v.weight"))
    queries = weights.load("layers.0.self_attn.q_proj.weight").numpy()
    half = WIDTH // HEADS // 2
    interleaved = wanted("blk.0.attn_q.weight").reshape(HEADS, half, 2, WIDTH)
    np.testing.assert_array_equal(
        queries.reshape(HEADS, 2, half, WIDTH)[:, 0], interleaved[:, :, 0]
    )
    np.testing.assert_array_equal(
        queries.reshape(HEADS, 2, half, WIDTH)[:, 1], interleaved[:, :, 1]
    )


def _llama3_factors(head_dim: int) -> np.ndarray:
    """As llama.cpp's converter computes them from the config."""
    factors = []
    for exponent in range(0, head_dim, 2):
        wavelength = 2 * np.pi * 10_000.0 ** (exponent / head_dim)
        if wavelength < 32 / 4.0:
            factors.append(1.0)
        elif wavelength > 32 / 1.0:
            factors.append(8.0)
        else:
            smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(factors, dtype=np.float32)


_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"attention.key_length": 16, "rope.dimension_count": 16}),
    "llama-llama3-tied": ("llama", {}),
    "llama-linear-biased": (
        "llama",
        {
            "attention.key_length": 32,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 2.0,
        },
    ),
    "mistral": ("llama", {"attention.key_length": 20}),
    "qwen2-yarn": ("qwen2", _YARN),
    "qwen2-tied": ("qwen2", {}),
    "qwen3": ("qwen3", {"attention.key_length": 32}),
    "smollm3": ("smollm3", {}),
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_greedy_tokens_equal_the_reference(tmp_path: Path, name: str) -> None:
    architecture, extra = FILES[name]
    model = reference_model(name)
    factors = _llama3_factors(12) if "llama3" in name else None
    path = write_gguf(
        tmp_path / "m.gguf",
        model,
        architecture=architecture,
        metadata={f"{architecture}.{key}": value for key, value in extra.items()},
        rope_factors=factors,
    )
    loaded = load_quietly(path)
    assert loaded.config.eos_token_ids == (2, 3)
    assert (loaded.config.bos_token, loaded.config.eos_token) == ("t1", "t2")
    assert loaded.parameters == sum(value.numel() for value in model.parameters())
    driver = Driver(loaded)
    for length in (3, 60):
        answer = driver.generate(driver.sequence(prompt(length)), 12, 32)
        assert answer == reference_tokens(name, prompt(length), 12)


def test_the_permutation_matters(tmp_path: Path) -> None:
    """The same rows read as another architecture's give other answers: the check above is real."""
    model = reference_model("llama")
    path = write_gguf(tmp_path / "m.gguf", model, architecture="qwen2")
    rows = GGUFWeights(path).load("layers.0.self_attn.q_proj.weight")
    assert torch.equal(rows, model.state_dict()["model.layers.0.self_attn.q_proj.weight"])
    path = write_gguf(tmp_path / "p.gguf", model, architecture="llama")
    rows = GGUFWeights(path).load("layers.0.self_attn.q_proj.weight")
    assert torch.equal(rows, model.state_dict()["model.layers.0.self_attn.q_proj.weight"])
    raw = GGUFWeights(path)._file
    stored = raw.raw(raw.tensors["blk.0.attn_q.weight"]).view(np.float32)
    assert not np.array_equal(stored, rows.numpy())


def test_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    blocks = np.zeros((4, 66 * 1), dtype=np.uint8)
    path = write_raw(
        tmp_path / "m.gguf",
        "llama",
        METADATA,
        {"token_embd.weight": blocks},
        {"token_embd.weight": Kind.IQ2_XXS},
    )
    with pytest.raises(ModelError, match=r"token_embd\.weight is of tensor type IQ2_XXS"):
        GGUFWeights(path)
