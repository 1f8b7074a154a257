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


def clustered(successes: int, episodes: int, *, tasks: int, ss: int, se: int, ee: int) -> tuple[float, float]:
    """Interval of a success rate whose episodes come several a task: Wilson's at the effective number of episodes, rate·(1 −
    rate) / V.  Episodes of a task are alike, so they count less than as many of different tasks.

    V = tasks / (tasks − 1) · Σ (s − rate·e)² / (Σ e)² is the variance of a ratio over clusters, with s successes in e episodes of
    each task (which may differ: W. G. Cochran, Sampling Techniques, 1977, ch. 6).  The effective number is at most that of
    episodes, and at least that of tasks as Kish counts them, (Σ e)² / Σ e².

    successes, episodes: Σ s and Σ e over the `tasks` with e > 0; ss, se, ee: Σ s², Σ s·e and Σ e².  (0, 1) for less than two
    tasks, which say nothing of others.
    """
    if tasks < 2:
        return 0.0, 1.0
    rate = successes / episodes
    variance = tasks / (tasks - 1) * (ss - 2 * rate * se + rate * rate * ee) / episodes**2
    fewest = episodes * episodes / ee
    effective = rate * (1 - rate) / variance if variance > 1e-12 else fewest
    effective = min(max(effective, fewest), episodes)
    return wilson(min(rate * effective, effective), effective)
