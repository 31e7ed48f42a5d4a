"""One sequence of tokens being computed: the unit of planning, KV memory and sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.core.request import SamplingParams

__all__ = ["Chunk", "Sequence", "SequenceState", "StepPlan"]


class SequenceState(Enum):
    """Where a sequence stands; FINISHED is final."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the engine loop.

    Invariant: `num_computed < len(tokens)` while unfinished; KV for `tokens[:num_computed]` lies
    in `block_table`, and a step that reaches `len(tokens)` samples the next token.
    `tokens` is the prompt followed by the sampled tokens. After preemption `num_computed` is 0
    (or what the prefix cache still holds), `block_table` empty, `tokens` kept.
    """

    id: int
    group: int
    prompt_length: int
    tokens: list[int]
    sampling: SamplingParams
    seed: int
    max_length: int
    """Total tokens, prompt included, at which the sequence ends with `length`."""
    salt: bytes = b""
    echo: bool = False
    priority: int = 0
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    cached_tokens: int = 0
    """Prompt tokens that its first admission found in the prefix cache."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of the full blocks of `tokens`, as far as computed yet."""
    num_preemptions: int = 0
    started: bool = False

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def needs_prompt_logprobs(self) -> bool:
        return self.echo and self.sampling.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of `sequence`, to be computed in this step.

    `samples` is true when the chunk reaches the last known token, so the next one is drawn.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, decodes before prompt chunks. `preempted` lost their blocks."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)
