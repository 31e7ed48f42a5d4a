"""GGUF files written from transformers' tiny models, laid out as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray

PERMUTED = ("llama", "smollm3")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Row 2i of a head is its row i, row 2i + 1 its row i + half."""
    half = rows.shape[0] // heads // 2
    out = np.empty_like(rows)
    for head in range(heads):
        first = 2 * half * head
        for pair in range(half):
            out[first + 2 * pair] = rows[first + pair]
            out[first + 2 * pair + 1] = rows[first + half + pair]
    return out


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str,
    metadata: dict[str, Any] | None = None,
    rope_factors: NDArray[np.float32] | None = None,
) -> Path:
    """All tensors as F32. `metadata` is added to, or replaces, what `model.config` says."""
    config = model.config
    entries: dict[str, Any] = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.tokens": [f"t{token}" for token in range(config.vocab_size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
    }
    tensors: dict[str, NDArray[Any]] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if architecture in PERMUTED and "q_proj" in name:
            array = permuted(array, config.num_attention_heads)
        if architecture in PERMUTED and "k_proj" in name:
            array = permuted(array, config.num_key_value_heads)
        tensors[gguf_name(name)] = array
    if rope_factors is not None:
        tensors["rope_freqs.weight"] = rope_factors
    return write_raw(path, architecture, {**entries, **(metadata or {})}, tensors)


def gguf_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{leaf}"
    return f"{_NAMES[stem]}.{leaf}"


def write_raw(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, NDArray[Any]],
    kinds: dict[str, Kind] | None = None,
) -> Path:
    """Tensors named in `kinds` are given as bytes, a row of blocks for each row."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        kind = (kinds or {}).get(name)
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_K_SCALES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
"""Where a block keeps its float16 scales."""


def random_blocks(kind: Kind, rows: int, width: int) -> NDArray[np.uint8]:
    """Valid blocks of any content, for kinds that `gguf` reads but does not write."""
    generator = np.random.default_rng(int(kind))
    block, size = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * width // block, size), dtype=np.uint8)
    for at in _K_SCALES[kind]:
        scales = generator.uniform(-0.01, 0.01, (blocks.shape[0], 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)
