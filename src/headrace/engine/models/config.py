"""What a decoder looks like, read from a Hugging Face config.json or from GGUF metadata.

Everything that the decoder does not compute is refused here by name, so that no model is served
with a feature silently left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.engine.models.errors import ModelError
from headrace.engine.models.rope import RopeConfig, rope_from_gguf, rope_from_hf

__all__ = ["ARCHITECTURES", "DecoderConfig", "ModelError", "config_from_gguf", "config_from_hf"]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
_QKV_BIAS = ("qwen2",)
_QK_NORM = ("qwen3",)
_SMOLLM3_NOPE_INTERVAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder-only transformer. Widths are in elements, lengths in tokens.

    `windows` holds one entry a layer: the number of last positions a query sees, or None for all.
    `rotary` says for each layer whether it rotates its queries and keys.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    rotary: tuple[bool, ...]
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool | None = False
    """None: tied if the checkpoint has no output matrix of its own."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token: str | None = None
    eos_token: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "context_length",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ModelError(f"{self.architecture}: {name} must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.architecture}: {self.num_heads} attention heads cannot share "
                f"{self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"{self.architecture}: head_dim {self.head_dim} is odd")

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads


def config_from_hf(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> DecoderConfig:
    """From the dicts of config.json, generation_config.json and tokenizer_config.json."""
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise ModelError(_unknown(architecture, ARCHITECTURES))
    _refuse_hf_features(config, architecture)
    try:
        layers = int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return DecoderConfig(
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or (hidden // heads)),
            context_length=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope_from_hf(config),
            rotary=_hf_rotary(config, architecture, layers),
            windows=_hf_windows(config, architecture, layers),
            qkv_bias=architecture in _QKV_BIAS or bool(config.get("attention_bias")),
            output_bias=architecture not in _QKV_BIAS and bool(config.get("attention_bias")),
            mlp_bias=bool(config.get("mlp_bias")),
            qk_norm=architecture in _QK_NORM,
            tied_embeddings=config.get("tie_word_embeddings"),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=_ids((generation or {}).get("eos_token_id"), config.get("eos_token_id")),
            bos_token=_token_text(tokenizer, "bos_token"),
            eos_token=_token_text(tokenizer, "eos_token"),
        )
    except KeyError as missing:
        raise ModelError(f"config.json of this {architecture} model lacks {missing}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"config.json of this {architecture} model is malformed: {error}"
        ) from None


def _refuse_hf_features(config: Mapping[str, Any], architecture: str) -> None:
    for name in config.get("architectures") or ():
        if not str(name).endswith("ForCausalLM"):
            raise ModelError(f"{name} is not a text generation model")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{architecture}: activation {activation!r} is not supported")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise ModelError(f"{architecture}: {method} quantised weights are not supported")


def _hf_rotary(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[bool, ...]:
    if architecture != "smollm3":
        return (True,) * layers
    flags = config.get("no_rope_layers")
    if not flags:
        interval = int(config.get("no_rope_layer_interval") or _SMOLLM3_NOPE_INTERVAL)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if len(flags) < layers:
        raise ModelError(f"{architecture}: no_rope_layers is shorter than the model is deep")
    return tuple(bool(flag) for flag in flags[:layers])


def _hf_windows(
    config: Mapping[str, Any], architecture: str, layers: int
) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if architecture == "llama" or not window:
        return (None,) * layers
    window = int(window)
    if architecture == "mistral":
        return (window,) * layers
    if not config.get("use_sliding_window"):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None and architecture == "smollm3":
        rotary = _hf_rotary(config, architecture, layers)
        return tuple(None if rotates else window for rotates in rotary)
    if kinds is None:
        first = int(config.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise ModelError(f"{architecture}: layer type {kind!r} is not supported")
    if len(kinds) < layers:
        raise ModelError(f"{architecture}: layer_types is shorter than the model is deep")
    return tuple(known[kind] for kind in kinds[:layers])


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    tensors: Mapping[str, Sequence[int]],
    frequency_factors: tuple[float, ...] | None = None,
) -> DecoderConfig:
    """From a GGUF file's metadata and its tensors' shapes, outermost dimension first.

    `frequency_factors` is the content of the tensor `rope_freqs.weight`, if the file has one.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _GGUF_ARCHITECTURES:
        raise ModelError(_unknown(architecture, _GGUF_ARCHITECTURES))
    _refuse_gguf_features(metadata, architecture)

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    try:
        layers = int(metadata[f"{architecture}.block_count"])
        heads = int(metadata[f"{architecture}.attention.head_count"])
        hidden = int(metadata[f"{architecture}.embedding_length"])
        head_dim = int(get("attention.key_length") or (hidden // heads))
        context = int(metadata[f"{architecture}.context_length"])
        eos = metadata.get("tokenizer.ggml.eos_token_id")
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        rotary = tuple(
            architecture != "smollm3" or (layer + 1) % _SMOLLM3_NOPE_INTERVAL != 0
            for layer in range(layers)
        )
        return DecoderConfig(
            architecture=architecture,
            vocab_size=int(tensors["token_embd.weight"][0]),
            hidden_size=hidden,
            intermediate_size=int(metadata[f"{architecture}.feed_forward_length"]),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(get("attention.head_count_kv") or heads),
            head_dim=head_dim,
            context_length=context,
            rms_norm_eps=float(metadata[f"{architecture}.attention.layer_norm_rms_epsilon"]),
            rope=rope_from_gguf(metadata, architecture, head_dim, context, frequency_factors),
            rotary=rotary,
            windows=(None,) * layers,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            tied_embeddings="output.weight" not in tensors,
            bos_token_id=bos,
            eos_token_ids=_ids(
                eos,
                metadata.get("tokenizer.ggml.eot_token_id"),
                metadata.get("tokenizer.ggml.eom_token_id"),
            ),
            bos_token=_vocabulary_entry(metadata, bos),
            eos_token=_vocabulary_entry(metadata, eos),
        )
    except KeyError as missing:
        raise ModelError(f"this {architecture} GGUF file lacks {missing}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"this {architecture} GGUF file is malformed: {error}") from None


def _refuse_gguf_features(metadata: Mapping[str, Any], architecture: str) -> None:
    for key, off in (
        ("expert_count", 0),
        ("attention.sliding_window", 0),
        ("attention.clamp_kqv", 0.0),
        ("attn_logit_softcapping", 0.0),
        ("logit_scale", 0.0),
        ("use_parallel_residual", False),
    ):
        name = f"{architecture}.{key}"
        if metadata.get(name, off) != off:
            raise ModelError(f"{architecture}: {name} is not supported")
    if int(metadata.get("split.count", 1) or 1) > 1:
        raise ModelError("split GGUF files are not supported: merge the parts into one file")


def _unknown(architecture: object, known: Sequence[str]) -> str:
    return f"architecture {architecture!r} is not supported; supported are {', '.join(known)}"


def _ids(*sources: Any) -> tuple[int, ...]:
    """End tokens of all sources, in order, each once. A source is None, an id or a list."""
    found: dict[int, None] = {}
    for source in sources:
        for token in source if isinstance(source, list | tuple) else [source]:
            if token is not None:
                found[int(token)] = None
    return tuple(found)


def _token_text(tokenizer: Mapping[str, Any] | None, name: str) -> str | None:
    token = (tokenizer or {}).get(name)
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _vocabulary_entry(metadata: Mapping[str, Any], token_id: int | None) -> str | None:
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else None
