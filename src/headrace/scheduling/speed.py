"""How fast the backend is, as far as order and admission need to know."""

from __future__ import annotations

from headrace.scheduling.base import StepSample

__all__ = ["BackendSpeed"]

_PRIOR_PREFILL_TOKEN_S = 9.6e-5
_PRIOR_DECODE_TOKEN_S = 3.3e-4
"""Llama-3-8B on an A100; only the proportion matters until the machine's own are measured."""

_KEEP = 0.98
_RATE = 0.05


class BackendSpeed:
    """Learns from step reports, or where a backend has none from when tokens come. Seconds.

    `prefill_rate` is prompt tokens a second while prompts queue, beside whatever is decoding;
    `residence_s` how long a choice stays with the backend, `prompt_tokens` the usual uncached
    prompt. None before anything was measured. `step_s` is the usual time of a step.
    """

    def __init__(self) -> None:
        self.prefill_rate: float | None = None
        self.residence_s: float | None = None
        self.prompt_tokens: float | None = None
        self.step_s = 0.0
        self.reports_steps = False
        self._tokens = self._seconds = 0.0
        self._n = self._p = self._t = self._pp = self._pt = 0.0
        self._decoded = self._decodes = 0.0
        self._decode_share: float | None = None

    @property
    def prefill_token_s(self) -> float:
        """What one more prompt token costs: the slope of step time over prompt tokens."""
        if self._p <= 0.0:
            return _PRIOR_PREFILL_TOKEN_S if self.prefill_rate is None else 1 / self.prefill_rate
        whole = self._t / self._p
        spread = self._pp - self._p * self._p / self._n
        if spread <= 1e-6 * self._pp:
            return whole
        slope = (self._pt - self._p * self._t / self._n) / spread
        return min(max(slope, 0.2 * whole), whole)

    @property
    def decode_token_s(self) -> float:
        """What one more token of an answer costs: its share of the step beside the prompts."""
        if self._decode_share is not None:
            return self._decode_share
        if self.prefill_rate is not None:
            return _PRIOR_DECODE_TOKEN_S / _PRIOR_PREFILL_TOKEN_S / self.prefill_rate
        return _PRIOR_DECODE_TOKEN_S

    def observe_step(self, sample: StepSample, *, backlogged: bool) -> None:
        """`backlogged`: more prompt tokens were there than the step took."""
        if not sample.seconds > 0.0:
            return
        self.reports_steps = True
        p, t = float(sample.prefill_tokens), sample.seconds
        self.step_s += _RATE * (t - self.step_s) if self.step_s else t
        if sample.prefill_tokens:
            self._n = _KEEP * self._n + 1.0
            self._p = _KEEP * self._p + p
            self._t = _KEEP * self._t + t
            self._pp = _KEEP * self._pp + p * p
            self._pt = _KEEP * self._pt + p * t
        if sample.decode_tokens:
            beside = max(t - p * self.prefill_token_s, 0.05 * t) if p else t
            self._decoded = _KEEP * self._decoded + beside
            self._decodes = _KEEP * self._decodes + sample.decode_tokens
            self._decode_share = self._decoded / self._decodes
        if backlogged and sample.prefill_tokens:
            self._prefilled(p, t)

    def first_token(self, tokens: int, seconds: float) -> None:
        """Of a prompt of so many uncached tokens, which the backend had for itself so long."""
        if not self.reports_steps and tokens > 0 and seconds > 0.0:
            self._prefilled(float(tokens), seconds)

    def next_tokens(self, tokens: int, seconds: float, running: int) -> None:
        """A choice has grown by so many tokens in so many seconds, one of so many running."""
        if self.reports_steps or tokens < 1 or seconds <= 0.0:
            return
        share = seconds / tokens / max(1, running)
        self._decode_share = _ewma(self._decode_share, share, _RATE)

    def prompt(self, tokens: int) -> None:
        self.prompt_tokens = _ewma(self.prompt_tokens, float(tokens), _RATE)

    def resided(self, seconds: float) -> None:
        self.residence_s = _ewma(self.residence_s, seconds, _RATE)

    def work(self, tokens: float, answer: float) -> float:
        """Accelerator seconds of that many prompt tokens and answer tokens."""
        return tokens * self.prefill_token_s + answer * self.decode_token_s

    def _prefilled(self, tokens: float, seconds: float) -> None:
        self._tokens = _KEEP * self._tokens + tokens
        self._seconds = _KEEP * self._seconds + seconds
        self.prefill_rate = self._tokens / self._seconds


def _ewma(old: float | None, new: float, rate: float) -> float:
    return new if old is None else old + rate * (new - old)
