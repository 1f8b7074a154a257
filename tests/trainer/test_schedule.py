"""Decisions ahead of a step: pure functions."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.config import OptimizerConfig
from megatron_webrl.trainer.schedule import learning_rate, minibatch_order, share_out


@pytest.mark.parametrize(("schedule", "middle"), [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55)])
def test_learning_rate(schedule: str, middle: float) -> None:
    """Linear warm-up from the first step, the peak, half way down, the floor and no further."""
    config = OptimizerConfig(lr=2.0, warmup_steps=4, schedule=schedule, min_lr_ratio=0.1)
    assert learning_rate(config, 1, 24) == 0.5
    assert learning_rate(config, 4, 24) == 2.0
    assert learning_rate(config, 14, 24) == pytest.approx(2.0 * middle)
    floor = 2.0 if schedule == "constant" else 0.2
    assert learning_rate(config, 24, 24) == pytest.approx(floor)
    assert learning_rate(config, 99, 24) == pytest.approx(floor)


@given(groups=st.integers(1, 20), epochs=st.integers(1, 4), minibatches=st.integers(1, 5), seed=st.integers(0, 9))
def test_every_epoch_trains_every_group_once(groups: int, epochs: int, minibatches: int, seed: int) -> None:
    """epochs × minibatches updates (fewer only where groups lack), sizes differ by at most one, seeded."""
    order = minibatch_order(groups, epochs=epochs, minibatches=minibatches, generator=np.random.default_rng(seed))
    again = minibatch_order(groups, epochs=epochs, minibatches=minibatches, generator=np.random.default_rng(seed))
    assert order == again
    a_pass = min(groups, minibatches)
    assert len(order) == epochs * a_pass
    for first in range(0, len(order), a_pass):
        assert sorted(chain(*order[first : first + a_pass])) == list(range(groups))
    assert max(map(len, order)) - min(map(len, order)) <= 1


@given(
    costs=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    shards=st.integers(1, 6),
    taken=st.integers(0, 2**40 - 1),
)
def test_shares_are_balanced_and_complete(costs: list[int], shards: int, taken: int) -> None:
    """Each group on exactly one shard, also of a part of the batch; none has more than a tenth above the mean and one more
    group, or than the least loaded one and a group."""
    first = share_out(range(len(costs)), costs, shards)
    homes = {position: shard for shard, share in enumerate(first) for position in share}
    part = [p for p in range(len(costs)) if taken >> p & 1]
    for positions, shares in ((range(len(costs)), first), (part, share_out(part, costs, shards, homes))):
        assert len(shares) == shards
        assert sorted(chain(*shares)) == sorted(positions)
        loads = [sum(costs[p] for p in share) for share in shares]
        assert max(loads) <= max(1.1 * sum(loads) / shards, sum(loads) / shards + max(costs))
        assert share_out(part, costs, shards, homes) == share_out(part, costs, shards, homes)


def test_equal_costs_give_equal_shares() -> None:
    """And a group that fits at home stays there."""
    assert [len(share) for share in share_out(range(8), [5] * 8, 4)] == [2, 2, 2, 2]
    first = share_out(range(8), [5] * 8, 4)
    homes = {position: shard for shard, share in enumerate(first) for position in share}
    again = share_out([7, 3, 1, 0, 2, 4, 5, 6], [5] * 8, 4, homes)
    assert [set(a) for a in again] == [set(a) for a in first]
