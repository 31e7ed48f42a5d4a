"""What the front and the engine process say to each other, as msgpack over a socket pair."""

from __future__ import annotations

import msgspec

from headrace.core.events import FinishReason, TokenLogprob
from headrace.core.request import SamplingParams

__all__ = [
    "Abort",
    "Alive",
    "EngineConfig",
    "EngineMessage",
    "Failed",
    "Fault",
    "FrontMessage",
    "ModelInfo",
    "Output",
    "Preempt",
    "Progress",
    "Ready",
    "SetTargets",
    "Shutdown",
    "Step",
    "StepStats",
    "Submit",
]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process is started with.

    `model_path` is a local .gguf file or a folder with config.json and safetensors. `kv_bytes`
    None budgets from free memory. `max_context` None takes the model's own. `dtype` is auto, bf16
    or fp32; `device` auto, cpu or cuda; `kernels` auto, native or reference. `alive_interval` is
    the longest silence of an idle engine in seconds. `fault_hooks` lets tests break the engine on
    purpose.
    """

    model_path: str
    model_name: str
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    threads: int | None = None
    kv_bytes: int | None = None
    block_size: int = 16
    max_running: int = 64
    max_step_tokens: int = 256
    max_context: int | None = None
    prefix_cache: bool = True
    chat_template: str | None = None
    alive_interval: float = 1.0
    fault_hooks: bool = False


class Submit(msgspec.Struct, frozen=True, tag=True):
    """One sequence: one choice of one request. `seq` is unique in the engine's life.

    `group` is equal for the choices of one request. `seed` is already drawn, and differs between
    the choices. `salt` separates prefix caches: only equal salts share blocks.
    """

    seq: int
    group: int
    prompt: list[int]
    sampling: SamplingParams
    seed: int
    salt: bytes = b""
    echo: bool = False
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop these sequences; unknown or finished ones are ignored. Nothing is answered."""

    seqs: list[int]


class SetTargets(msgspec.Struct, frozen=True, tag=True):
    """Change the per-step token budget and the cap on running sequences from the next step on."""

    max_step_tokens: int
    max_running: int


class Preempt(msgspec.Struct, frozen=True, tag=True):
    """Put these sequences back into the engine's queue, in their place there, to be computed again
    when more urgent ones have had their turn; those that do not run are passed over."""

    seqs: list[int]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop now; running sequences get no further word."""


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Test hook, honoured only with `EngineConfig.fault_hooks`: raise | hang | exit."""

    kind: str


FrontMessage = Submit | Abort | SetTargets | Preempt | Shutdown | Fault


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front needs to know of the loaded model. `tokenizer` is tokenizer.json as bytes.

    `revision` is a hash over weights' identity, tokenizer and template; `kernels` is native or
    reference.
    """

    architecture: str
    parameters: int
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    bos_token: str | None
    eos_token: str | None
    tokenizer: bytes
    chat_template: str | None
    dtype: str
    device: str
    weight_bytes: int
    revision: str
    block_size: int
    num_blocks: int
    kv_bytes: int
    max_running: int
    max_step_tokens: int
    kernels: str = "reference"


class Progress(msgspec.Struct, frozen=True, tag=True):
    """`stage` is a value of core.health.Stage; `fraction` in 0..1."""

    stage: str
    fraction: float
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests from now on."""

    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on and will exit. `fatal` means a restart would fail the same way."""

    message: str
    fatal: bool = False


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Sent every `EngineConfig.alive_interval` while idle, so that silence means a hang."""


class Output(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What one sequence gained in one step.

    `started` marks the step in which its first tokens are computed; then `cached_tokens` counts
    prompt tokens taken from the prefix cache. `prompt_text` and `prompt_logprobs` come once, for
    echo, the latter with one entry a prompt token, the first without a logprob. `token_ids` are
    the newly sampled ones, the end token included, and `logprobs`, when asked for, has one entry
    each. `text` may lag behind the ids; nothing follows `finish` or `error`. `error` is a
    sentence for the client; `invalid` says the request itself is at fault.
    """

    seq: int
    started: bool = False
    cached_tokens: int = 0
    prompt_text: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop: str | int | None = None
    error: str | None = None
    invalid: bool = False


class StepStats(msgspec.Struct, frozen=True, gc=False):
    """One step in numbers. Counters ending in `_total` run over the engine's life.

    `seconds` is the whole step; `decode_context` and `prefill_context` are sums, over the
    sequences that decoded and over those whose prompts advanced, of the tokens they attended to
    and had computed before. `prefix_queries_total` and `prefix_hits_total` count tokens.
    """

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    preemptions_total: int
    prefix_queries_total: int
    prefix_hits_total: int
    decode_context: int = 0
    prefill_context: int = 0


class Step(msgspec.Struct, frozen=True, tag=True):
    """All that one step produced, in one message. Block hashes are those newly reusable and
    those evicted, for the front's estimate of uncached tokens."""

    outputs: list[Output]
    stats: StepStats
    blocks_added: list[bytes] = []
    blocks_evicted: list[bytes] = []


EngineMessage = Progress | Ready | Failed | Alive | Step
