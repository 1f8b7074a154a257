"""What is decided ahead of a step: learning rate, order of groups, who trains which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_webrl.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of step 1, 2, …: linear warm-up to the peak, then constant, or linear or cosine to
    `min_lr_ratio` · peak at step `decay_steps` (null: total_steps), and that from there on."""
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, (config.decay_steps or total_steps) - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def minibatch_order(groups: int, *, epochs: int, minibatches: int, generator: np.random.Generator) -> list[list[int]]:
    """Positions of whole groups, one list an update: every epoch a new order, cut into `minibatches`."""
    updates = []
    for _ in range(epochs):
        for part in np.array_split(generator.permutation(groups), minibatches):
            if part.size:
                updates.append([int(position) for position in part])
    return updates


def share_out(
    positions: Sequence[int], costs: Sequence[int], shards: int, homes: Mapping[int, int] | None = None
) -> list[list[int]]:
    """Groups of a minibatch over data-parallel shards, so that their costs (of all groups, by position) are about equal.

    Each group, the dearest first, goes to the shard with the least so far; but to its home, if that ends up at most a
    tenth above the mean, so that in every epoch a shard meets mostly the groups that it has fetched.
    """
    homes = homes or {}
    shares: list[list[int]] = [[] for _ in range(shards)]
    loads = [0] * shards
    room = 1.1 * sum(costs[p] for p in positions) / shards
    for position in sorted(positions, key=lambda p: (-costs[p], p)):
        shard = homes.get(position, -1)
        if shard < 0 or loads[shard] + costs[position] > room:
            shard = loads.index(min(loads))
        shares[shard].append(position)
        loads[shard] += costs[position]
    return shares
