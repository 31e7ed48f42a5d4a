"""Frequencies of every scaling kind, against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.engine.models.rope import inverse_frequencies, rope_from_hf, rope_tables

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 24,
        "beta_slow": 2,
    },
    "yarn-given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
        "truncate": False,
    },
    "yarn-shrinking": {
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("case", sorted(CASES))
def test_against_transformers(case: str, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**CASES[case], "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=16384,
        rope_parameters=dict(parameters),
    )
    theirs = LlamaRotaryEmbedding(config)
    ours = rope_from_hf(
        {"max_position_embeddings": 16384, "rope_parameters": parameters, "model_type": "llama"}
    )
    torch.testing.assert_close(inverse_frequencies(ours, 128), theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-7)
    cosine, sine = rope_tables(ours, 128, 64)
    wanted_cosine, wanted_sine = theirs(torch.zeros(1), torch.arange(64)[None])
    torch.testing.assert_close(cosine, wanted_cosine[0, :, :64], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sine, wanted_sine[0, :, :64], rtol=1e-5, atol=1e-5)


def test_old_spelling_means_the_same() -> None:
    new = {
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    }
    old = {
        "max_position_embeddings": 512,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    assert rope_from_hf(old) == rope_from_hf(new)


def test_smollm3_has_its_own_default_base() -> None:
    config = {"max_position_embeddings": 512, "model_type": "smollm3"}
    assert rope_from_hf(config).theta == 2_000_000.0
