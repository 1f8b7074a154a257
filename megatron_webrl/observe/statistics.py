"""Intervals for success rates."""

from __future__ import annotations

import math


def wilson(successes: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion (E. B. Wilson, 1927): (low, high), within [0, 1]; (0, 1) if n = 0.

    z: quantile of the normal distribution, 1.96 for 95 %.  Raises ValueError unless 0 ≤ successes ≤ n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    denominator = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / denominator
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / denominator
    # At 0 and n the exact bound is the rate itself; rounding must not put the rate outside.
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))
