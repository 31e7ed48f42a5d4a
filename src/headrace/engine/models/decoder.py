"""The one decoder: pre-norm attention and gated MLP blocks, shaped by DecoderConfig alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor

from headrace.engine.kernels.base import HeadNorms, Kernels, RopeTables
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
    head_norms: HeadNorms | None
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
    rope: RopeTables

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

    def forward(self, tokens: Tensor, cache: KVCache, kernels: Kernels) -> Tensor:
        """Computes the rows that `kernels` began and stores their keys and values; hidden states
        [rows, hidden]."""
        eps, planes = self.config.rms_norm_eps, self.config.num_heads + 2 * self.config.num_kv_heads
        x = F.embedding(tokens, self.embedding)
        delta: Tensor | None = None
        for layer, stored in zip(self.layers, cache.layers, strict=True):
            normed = kernels.rms_norm(x, layer.input_norm, eps, delta)
            qkv = layer.qkv(normed).view(-1, planes, self.config.head_dim)
            tables = self.rope if layer.rotary else None
            kernels.rotate_and_store(qkv, stored, tables, layer.head_norms)
            delta = layer.output(kernels.attention(qkv, stored, layer.window))
            normed = kernels.rms_norm(x, layer.mlp_norm, eps, delta)
            delta = layer.down(kernels.silu_mul(layer.gate_up(normed)))
        return x if delta is None else x.add_(delta)

    def logits(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """Float32 [rows, vocab] of rows that `forward` returned, which stay as they are."""
        return self.head(kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps)).float()


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
            rope=RopeTables(
                cosine.to(self._device, self._dtype), sine.to(self._device, self._dtype)
            ),
        )

    def _layer(self, index: int) -> _Layer:
        config, prefix = self._config, f"layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        norms = (
            HeadNorms(
                self._take(f"{attention}q_norm.weight", config.head_dim),
                self._take(f"{attention}k_norm.weight", config.head_dim),
                config.rms_norm_eps,
            )
            if config.qk_norm
            else None
        )
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
            head_norms=norms,
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
