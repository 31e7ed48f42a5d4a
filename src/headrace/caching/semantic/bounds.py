"""Exact bounds of a rate, from how often something went right and wrong."""

from __future__ import annotations

import math

__all__ = ["beta_quantile", "rate_interval", "rate_lower"]

_TINY = 1e-30
_STEPS = 300


def rate_lower(right: float, wrong: float, confidence: float = 0.95) -> float:
    """What the rate of `right` is above, one-sided (C. J. Clopper and E. S. Pearson, Biometrika 26,
    1934: the 1 - confidence quantile of Beta(right, wrong + 1)). Counts may be fractions."""
    return 0.0 if right <= 0 else beta_quantile(1.0 - confidence, right, wrong + 1.0)


def rate_interval(right: float, wrong: float, confidence: float = 0.95) -> tuple[float, float]:
    """The two-sided interval of Clopper and Pearson for the rate of `right`."""
    each = (1.0 + confidence) / 2.0
    return rate_lower(right, wrong, each), 1.0 - rate_lower(wrong, right, each)


def beta_quantile(p: float, a: float, b: float) -> float:
    """By bisection: the distribution function has no inverse in closed form."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if _beta_cdf(middle, a, b) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def _beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (NIST Digital Library of
    Mathematical Functions 8.17.22), which converges fast on the side taken here."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - _beta_cdf(1.0 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    return front * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """Lentz's method (W. J. Lentz, Applied Optics 15, 1976)."""
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > _TINY else _TINY)
    value = d
    for m in range(1, _STEPS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0)),
        ):
            d = 1.0 + term * d
            c = 1.0 + term / c
            d = 1.0 / (d if abs(d) > _TINY else _TINY)
            c = c if abs(c) > _TINY else _TINY
            value *= d * c
        if abs(d * c - 1.0) < 1e-12:
            break
    return value
