"""Group-normalised rewards and the advantage of a step (AsyncWebRL, arXiv:2606.05597)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def normalize_group_rewards(
    rewards: Sequence[float] | np.ndarray, *, unbiased_std: bool = False, eps: float = 1e-5
) -> np.ndarray:
    """r̂ = (r − μ) / (σ + eps) over the episodes of one group.

    rewards [G] -> float64 [G].  σ is the population deviation (1/G); `unbiased_std` takes 1/(G−1).  A group of equal
    rewards, or of one episode, gives zeros.
    """
    values = np.asarray(rewards, dtype=np.float64)
    ddof = 1 if unbiased_std and values.size > 1 else 0
    return (values - values.mean()) / (values.std(ddof=ddof) + eps)


def step_advantage(normalized_reward: float, num_steps: int, constant_horizon: float | None = 10.0) -> float:
    """Advantage of every response token of a step: r̂ / k with constant k, or r̂ / number of steps of the episode when
    `constant_horizon` is None (an episode that ended before its first step has no token to give it to)."""
    return float(normalized_reward) / (max(1, num_steps) if constant_horizon is None else constant_horizon)


def raft_advantage(reward: float, num_steps: int) -> float | None:
    """RAFT++: advantage r / number of steps of every response token of an episode that succeeded (r > 0), without group
    normalisation; None for the others, which are filtered and count nowhere."""
    return reward / num_steps if reward > 0 else None
