"""Rotary position embedding: the kinds of frequency scaling and their tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.engine.models.errors import ModelError

__all__ = ["RopeConfig", "inverse_frequencies", "rope_from_gguf", "rope_from_hf", "rope_tables"]

Kind = Literal["default", "linear", "llama3", "yarn"]
_DEFAULT_THETA = {"smollm3": 2_000_000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Fields beyond `factor` matter only to the kind they are named for.

    `original_context` is the length the model was trained on before scaling. `attention_factor`
    multiplies both tables. `frequency_factors` divide each frequency (llama.cpp stores llama3
    scaling that way).
    """

    kind: Kind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_context: int = 0
    llama3_low: float = 1.0
    llama3_high: float = 4.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] | None = None


def rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    parameters = dict(config.get("rope_scaling") or {})
    parameters.update(config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError("RoPE parameters that differ between layer types are not supported")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {partial} is not supported")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = parameters.get("rope_theta") or config.get("rope_theta")
    theta = float(theta or _DEFAULT_THETA.get(str(config.get("model_type")), 10_000.0))
    context = int(config["max_position_embeddings"])
    original = (
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or context
    )
    original = int(original)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=float(parameters["factor"]))
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=float(parameters["factor"]),
            original_context=original,
            llama3_low=float(parameters["low_freq_factor"]),
            llama3_high=float(parameters["high_freq_factor"]),
        )
    if kind == "yarn":
        factor = float(parameters.get("factor") or context / original)
        return RopeConfig(
            kind="yarn",
            theta=theta,
            factor=factor,
            original_context=original,
            yarn_beta_fast=float(parameters.get("beta_fast") or 32),
            yarn_beta_slow=float(parameters.get("beta_slow") or 1),
            yarn_truncate=bool(parameters.get("truncate", True)),
            attention_factor=_yarn_attention_factor(parameters, factor),
        )
    raise ModelError(f"RoPE scaling of kind {kind!r} is not supported")


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scale and scale_all:
        return _yarn_scale(factor, float(scale)) / _yarn_scale(factor, float(scale_all))
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def rope_from_gguf(
    metadata: Mapping[str, Any],
    architecture: str,
    head_dim: int,
    context: int,
    frequency_factors: tuple[float, ...] | None,
) -> RopeConfig:
    """Reads the `rope.*` keys of `architecture`."""
    prefix = f"{architecture}.rope."

    def get(key: str, default: Any) -> Any:
        return metadata.get(prefix + key, default)

    rotated = int(get("dimension_count", head_dim))
    if rotated != head_dim:
        raise ModelError(f"{prefix}dimension_count {rotated} of {head_dim} is not supported")
    if frequency_factors is not None and len(frequency_factors) != head_dim // 2:
        raise ModelError("rope_freqs.weight does not match the head size")
    for key in ("scaling.yarn_log_multiplier", "scaling.alpha"):
        if get(key, 0):
            raise ModelError(f"{prefix}{key} is not supported")
    theta = float(get("freq_base", 10_000.0))
    kind = str(get("scaling.type", "none"))
    factor = float(get("scaling.factor", metadata.get(f"{prefix}scale_linear", 1.0)) or 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta, frequency_factors=frequency_factors)
    if kind == "linear":
        return RopeConfig(
            kind="linear", theta=theta, factor=factor, frequency_factors=frequency_factors
        )
    if kind == "yarn":
        if float(get("scaling.yarn_ext_factor", 1.0)) != 1.0:
            raise ModelError(f"{prefix}scaling.yarn_ext_factor is not supported")
        scale = float(get("scaling.attn_factor", 1.0)) * float(get("scaling.yarn_attn_factor", 1.0))
        return RopeConfig(
            kind="yarn",
            theta=theta,
            factor=factor,
            original_context=int(get("scaling.original_context_length", context)),
            yarn_beta_fast=float(get("scaling.yarn_beta_fast", 32.0)),
            yarn_beta_slow=float(get("scaling.yarn_beta_slow", 1.0)),
            attention_factor=scale * _yarn_scale(factor, 1.0),
            frequency_factors=frequency_factors,
        )
    raise ModelError(f"RoPE scaling of kind {kind!r} is not supported")


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, one for each pair of a head's elements: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers = rope.theta**exponents
    frequencies = 1.0 / powers
    if rope.frequency_factors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, head_dim)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_context / rope.llama3_high
    shortest_stretched = rope.original_context / rope.llama3_low
    smooth = (rope.original_context / wavelengths - rope.llama3_low) / (
        rope.llama3_high - rope.llama3_low
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > shortest_stretched, frequencies / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, scaled)


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """Ramps from kept to stretched between the pairs that turn `beta_fast` and `beta_slow` times
    over the original context."""

    def pair_turning(turns: float) -> float:
        ratio = rope.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.yarn_beta_fast), pair_turning(rope.yarn_beta_slow)
    if rope.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = torch.clamp((pairs - low) / (high - low), 0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def rope_tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, float32 [positions, head_dim / 2].

    Computed once, so that a position's values never depend on what else a step holds.
    """
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim)
    )
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
