"""Step times of known machines, as functions of the work of a step, in seconds."""

from __future__ import annotations

from collections.abc import Callable

Machine = Callable[..., float]


def a100(prefill: float, decodes: float, decode_context: float, prefill_context: float) -> float:
    """Llama-3-8B on an A100, by published coefficients; they jump at 512 tokens."""
    n = prefill + decodes
    context = prefill_context if prefill else 0
    if n <= 512:
        return (
            0.014936
            + 5.882475e-5 * n
            + 2.247956e-5 * prefill
            + 3.634519e-5 * decodes
            + 1.111258e-7 * decode_context
            + 7.554773e-7 * context
        )
    return (
        0.005004
        + 2.71905e-5 * n
        + 6.863043e-5 * prefill
        - 4.143993e-5 * decodes
        + 1.663409e-7 * decode_context
        + 2.727223e-6 * context
    )


def small_cpu(
    prefill: float, decodes: float, decode_context: float, prefill_context: float
) -> float:
    """Two cores: 500 prompt tokens a second, a step 50 ms for one sequence and 250 ms for 64."""
    return (
        0.047
        + 0.0031 * decodes
        + 0.002 * prefill
        + 1e-6 * decode_context
        + 4e-9 * prefill * prefill_context
    )
