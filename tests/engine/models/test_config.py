from __future__ import annotations

from typing import Any

import pytest

from headrace.engine.models.config import (
    DecoderConfig,
    ModelError,
    config_from_gguf,
    config_from_hf,
)

HF: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}


def hf(**changes: Any) -> DecoderConfig:
    return config_from_hf({**HF, **changes})


def test_defaults() -> None:
    config = hf()
    assert (config.num_kv_heads, config.head_dim, config.group_size) == (8, 8, 1)
    assert config.rotary == (True,) * 4
    assert config.windows == (None,) * 4
    assert config.tied_embeddings is None


def test_end_tokens_of_both_files_and_texts() -> None:
    config = config_from_hf(
        {**HF, "eos_token_id": 7, "bos_token_id": 1},
        {"eos_token_id": [9, 7, 8]},
        {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    )
    assert config.eos_token_ids == (9, 7, 8)
    assert (config.bos_token, config.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 5}, (5, 5, 5, 5)),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 5}, (None,) * 4),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 5),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (5, None, 5, None),
        ),
        (
            {"model_type": "smollm3", "sliding_window": 5, "use_sliding_window": True},
            (None, None, None, 5),
        ),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert hf(**changes).windows == windows


def test_layers_without_rope() -> None:
    assert hf(model_type="smollm3").rotary == (True, True, True, False)
    assert hf(model_type="smollm3", no_rope_layers=[0, 1, 1, 0]).rotary == (
        False,
        True,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "None"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"hidden_size": "wide"}, "malformed"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["linear_attention"] * 4,
            },
            "linear_attention",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        hf(**changes)


@pytest.mark.parametrize("key", ["vocab_size", "num_attention_heads", "max_position_embeddings"])
def test_missing_entries_are_named(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        config_from_hf({name: value for name, value in HF.items() if name != key})


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def gguf(**changes: Any) -> DecoderConfig:
    return config_from_gguf({**GGUF, **changes}, tensors={"token_embd.weight": (100, 64)})


def test_gguf_defaults() -> None:
    config = gguf()
    assert (config.vocab_size, config.num_kv_heads, config.head_dim) == (100, 8, 8)
    assert config.tied_embeddings
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"general.architecture": "mistral3"}, "mistral3"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.dimension_count": 4}, "dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.attention.sliding_window": 128}, "sliding_window"),
        ({"split.count": 3}, "split"),
    ],
)
def test_gguf_features_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        gguf(**changes)


def test_gguf_missing_entry_is_named() -> None:
    with pytest.raises(ModelError, match="block_count"):
        config_from_gguf(
            {key: value for key, value in GGUF.items() if "block_count" not in key},
            tensors={"token_embd.weight": (100, 64)},
        )
