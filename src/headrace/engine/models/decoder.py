"""The one decoder: pre-norm attention and gated MLP blocks, shaped by DecoderConfig alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor

from headrace.engine.batch import AttentionBatch
from headrace.engine.kernels.reference import Workspace, paged_attention, rms_norm, rope_, silu_mul
from headrace.engine.kv_cache import KVCache
from headrace.engine.models.config import DecoderConfig
from headrace.engine.models.errors import ModelError
from headrace.engine.models.rope import rope_tables

__all__ = ["Decoder", "Linear"]

_PACK_BATCH = 64
"""Row count that oneDNN chooses a weight's memory layout for; results do not depend on it."""


class Linear:
    """x @ weight.T + bias. On CPU the weight is packed once for oneDNN.

    The packed product is faster than the plain one, and each row of it comes out the same, bit for
    bit, whatever the number of rows.
    """

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = weight.device.type == "cpu" and _packs(weight.dtype)
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_BATCH)
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return product
        return F.linear(x, self._weight, self._bias)


def _packs(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and torch._C._has_mkldnn


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one block. Q, K and V are one matrix, so are gate and up."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    rotary: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """Weights and forward pass. Stateless: keys and values live in the KVCache it is given."""

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    parameters: int
    weight_bytes: int
    embedding: Tensor
    layers: tuple[_Layer, ...]
    norm: Tensor
    head: Linear
    cosine: Tensor
    sine: Tensor

    @classmethod
    def build(
        cls,
        config: DecoderConfig,
        names: Collection[str],
        load: Callable[[str], Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float, str], None],
    ) -> Decoder:
        """Takes every tensor of a checkpoint. Raises ModelError naming one that is missing, left
        over, or of the wrong shape."""
        if config.tied_embeddings is None:
            config = replace(config, tied_embeddings="lm_head.weight" not in names)
        builder = _Builder(config, names, load, dtype, device)
        with torch.no_grad():
            return builder.build(progress)

    @property
    def windows(self) -> frozenset[int | None]:
        """The attention windows its layers use."""
        return frozenset(layer.window for layer in self.layers)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        work: Workspace,
    ) -> Tensor:
        """Computes packed rows and stores their keys and values; hidden states [rows, hidden]."""
        config = self.config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        cosine, sine = self._rotation(positions)
        x = F.embedding(tokens, self.embedding)
        for layer, stored in zip(self.layers, cache.layers, strict=True):
            normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
            qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, head_dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
                query.copy_(rms_norm(query, layer.query_norm, config.rms_norm_eps))
                key.copy_(rms_norm(key, layer.key_norm, config.rms_norm_eps))
            if layer.rotary:
                rope_(qkv[:, : heads + kv_heads], cosine, sine)
            cache.vectors(stored)[batch.slots] = qkv[:, heads:]
            attended = paged_attention(qkv[:, :heads], stored, batch, layer.window, work)
            x = layer.output(attended).add_(x)
            normed = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            x = layer.down(silu_mul(layer.gate_up(normed))).add_(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [rows, vocab] of rows that `forward` returned."""
        return self.head(rms_norm(hidden, self.norm, self.config.rms_norm_eps)).float()

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = self.cosine[positions], self.sine[positions]
        return (
            torch.cat([cosine, cosine], dim=-1)[:, None],
            torch.cat([-sine, sine], dim=-1)[:, None],
        )


class _Builder:
    """Checks a checkpoint against its config and moves it into a Decoder, layer by layer."""

    def __init__(
        self,
        config: DecoderConfig,
        names: Collection[str],
        load: Callable[[str], Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._load = load
        self._dtype = dtype
        self._device = device
        self._left = set(names)
        self._parameters = 0
        self._elements = 0

    def build(self, progress: Callable[[float, str], None]) -> Decoder:
        config = self._config
        embedding = self._take("embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = []
        for index in range(config.num_layers):
            progress((index + 1) / (config.num_layers + 2), f"layer {index + 1}")
            layers.append(self._layer(index))
        norm = self._take("norm.weight", config.hidden_size)
        progress((config.num_layers + 1) / (config.num_layers + 2), "output matrix")
        if config.tied_embeddings:
            self._left.discard("lm_head.weight")
            head_weight = embedding
            self._elements += embedding.numel()
        else:
            head_weight = self._take("lm_head.weight", config.vocab_size, config.hidden_size)
        if self._left:
            raise ModelError(f"{config.architecture}: weight {min(self._left)} is not supported")
        cosine, sine = rope_tables(config.rope, config.head_dim, config.context_length)
        return Decoder(
            config=config,
            dtype=self._dtype,
            device=self._device,
            parameters=self._parameters,
            weight_bytes=self._elements * self._dtype.itemsize,
            embedding=embedding,
            layers=tuple(layers),
            norm=norm,
            head=Linear(head_weight, None),
            cosine=cosine.to(self._device, self._dtype),
            sine=sine.to(self._device, self._dtype),
        )

    def _layer(self, index: int) -> _Layer:
        config, prefix = self._config, f"layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        norms = [
            self._take(f"{attention}{name}.weight", config.head_dim) if config.qk_norm else None
            for name in ("q_norm", "k_norm")
        ]
        return _Layer(
            input_norm=self._take(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._linear(
                [
                    (f"{attention}q_proj", queries),
                    (f"{attention}k_proj", keys),
                    (f"{attention}v_proj", keys),
                ],
                hidden,
                bias=config.qkv_bias,
            ),
            query_norm=norms[0],
            key_norm=norms[1],
            output=self._linear([(f"{attention}o_proj", hidden)], queries, bias=config.output_bias),
            mlp_norm=self._take(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._linear(
                [(f"{mlp}gate_proj", inner), (f"{mlp}up_proj", inner)],
                hidden,
                bias=config.mlp_bias,
            ),
            down=self._linear([(f"{mlp}down_proj", hidden)], inner, bias=config.mlp_bias),
            rotary=config.rotary[index],
            window=config.windows[index],
        )

    def _linear(self, parts: list[tuple[str, int]], width: int, *, bias: bool) -> Linear:
        weights = [self._take(f"{name}.weight", rows, width) for name, rows in parts]
        biases = [self._take(f"{name}.bias", rows) for name, rows in parts] if bias else []
        return Linear(torch.cat(weights), torch.cat(biases) if bias else None)

    def _take(self, name: str, *shape: int) -> Tensor:
        if name not in self._left:
            raise ModelError(f"{self._config.architecture}: weight {name} is missing")
        self._left.remove(name)
        tensor = self._load(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._config.architecture}: weight {name} has shape {tuple(tensor.shape)}, "
                f"the configuration says {shape}"
            )
        self._parameters += tensor.numel()
        self._elements += tensor.numel()
        return tensor.to(self._device, self._dtype)
