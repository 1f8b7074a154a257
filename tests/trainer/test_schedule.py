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


@given(positions=st.lists(st.integers(0, 40), unique=True), shards=st.integers(1, 6))
def test_shares_are_even_and_complete(positions: list[int], shards: int) -> None:
    """Each group on exactly one shard, none with more than ceil(n / shards)."""
    shares = share_out(positions, shards)
    assert len(shares) == shards
    assert sorted(chain(*shares)) == sorted(positions)
    assert max(map(len, shares)) <= -(-len(positions) // shards)
