"""Weights from one GGUF file, dequantised to float32 as they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.models.config import DecoderConfig, config_from_gguf
from headrace.engine.models.errors import ModelError
from headrace.engine.models.gguf_file import GGUFTensor, read_gguf

__all__ = ["SUPPORTED_TYPES", "GGUFWeights"]

SUPPORTED_TYPES = frozenset(
    {
        Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1,
        Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
    }
)  # fmt: skip
_PERMUTED = ("llama", "smollm3")
"""Architectures whose Q and K rows llama.cpp reorders, so that RoPE turns neighbouring rows."""
_ROPE_FACTORS = "rope_freqs.weight"
_ELEMENTS_A_PIECE = 1 << 18
"""Dequantisation makes several temporaries; pieces of this size keep them in cache."""

_GLOBAL_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFWeights:
    """Maps the file; tensors are dequantised when asked for."""

    def __init__(self, path: Path) -> None:
        self._file = read_gguf(path)
        self.files = (path,)
        for tensor in self._file.tensors.values():
            if tensor.type not in SUPPORTED_TYPES:
                raise ModelError(
                    f"{tensor.name} is of tensor type {tensor.type.name}, which is not supported"
                )
        factors = self._file.tensors.get(_ROPE_FACTORS)
        self._config = config_from_gguf(
            self._file.metadata,
            tensors={name: tensor.shape for name, tensor in self._file.tensors.items()},
            frequency_factors=(
                None
                if factors is None
                else tuple(map(float, _floats(self._file.raw(factors), factors).reshape(-1)))
            ),
        )
        self._stored = {
            _logical_name(name): tensor
            for name, tensor in self._file.tensors.items()
            if name != _ROPE_FACTORS
        }

    @property
    def config(self) -> DecoderConfig:
        return self._config

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def load(self, name: str) -> Tensor:
        tensor = self._stored[name]
        raw = self._file.raw(tensor)
        if len(tensor.shape) == 1:
            values = _floats(raw, tensor).reshape(-1)
            order = self._row_order(name, values.shape[0])
            return torch.from_numpy(values if order is None else values[order])
        order = self._row_order(name, raw.shape[0])
        if order is not None:
            raw = raw[order]
        return torch.from_numpy(_floats(raw, tensor).reshape(tensor.shape))

    def _row_order(self, name: str, rows: int) -> NDArray[np.intp] | None:
        """Which stored row each row of a permuted Q or K comes from."""
        config = self._config
        if config.architecture not in _PERMUTED:
            return None
        if "self_attn.q_proj." in name:
            heads = config.num_heads
        elif "self_attn.k_proj." in name:
            heads = config.num_kv_heads
        else:
            return None
        if rows != heads * config.head_dim:
            raise ModelError(f"{name} has {rows} rows, not {heads} heads of {config.head_dim}")
        stored = np.arange(rows).reshape(heads, config.head_dim // 2, 2)
        return stored.swapaxes(1, 2).reshape(-1)


def _logical_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _floats(raw: NDArray[np.uint8], tensor: GGUFTensor) -> NDArray[np.float32]:
    """The rows as float32, in memory of their own."""
    width = tensor.shape[-1]
    values = np.empty((raw.shape[0], width), dtype=np.float32)
    step = max(1, _ELEMENTS_A_PIECE // width)
    for row in range(0, raw.shape[0], step):
        piece = np.ascontiguousarray(raw[row : row + step])
        values[row : row + step] = dequantize(piece, tensor.type)
    return values
