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


def clustered(tasks: float, total: float, squares: float, *, episodes: int) -> tuple[float, float]:
    """Interval of a success rate whose episodes come several a task: Wilson's at the effective number of episodes, rate·(1 −
    rate) / (s² / tasks), s² the variance of the tasks' means, but not more than there are episodes nor fewer than tasks.
    Episodes of a task are alike, so they count less than as many of different tasks.

    tasks: how many; total, squares: Σ m and Σ m² of their means m; episodes: in all.
    """
    if tasks < 2:
        return 0.0, 1.0
    rate = total / tasks
    variance = max(0.0, (squares - tasks * rate * rate) / (tasks - 1)) / tasks
    effective = rate * (1 - rate) / variance if variance > 0 else tasks
    effective = min(max(effective, tasks), episodes)
    return wilson(min(rate * effective, effective), effective)
