"""The rules of admission, freshness and groups, over all small cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.replay.rules import (
    Census,
    Fate,
    Lineage,
    Queued,
    choose_batch,
    episodes_to_issue,
    fate,
    fresh_groups,
    has_signal,
    may_start_group,
    must_wait,
    shuffled,
)
from megatron_webrl.trajectory import Outcome

small = st.integers(0, 12)


@given(small, small, small, st.integers(0, 4), st.integers(1, 6))
def test_admission_is_running_queued_and_in_training_below_eta_plus_one_batches(
    running: int, queued: int, in_training: int, eta: int, b: int
) -> None:
    census = Census(running, queued, in_training)
    assert may_start_group(census, eta=eta, batch_units=b) == (running + queued + in_training < (eta + 1) * b)


def test_eta_zero_begins_nothing_while_a_batch_is_in_training() -> None:
    assert not may_start_group(Census(0, 0, 4), eta=0, batch_units=4)
    assert may_start_group(Census(0, 0, 0), eta=0, batch_units=4)
    assert may_start_group(Census(2, 1, 0), eta=0, batch_units=4), "dropped groups make room"


@given(small, small, small)
def test_dispatch_never_exceeds_slots_nor_the_limit(free: int, limit: int, running: int) -> None:
    issued = episodes_to_issue(free, limit, running)
    assert 0 <= issued <= free and (issued == 0 or running + issued <= limit)


queues = st.lists(st.tuples(st.none() | st.integers(0, 9), st.integers(1, 4)), max_size=10)


@given(queues, st.integers(5, 9), st.integers(0, 3), st.integers(1, 8))
def test_a_batch_is_the_freshest_that_would_be_stale_first_and_the_rest_is_stale_or_stays(
    groups: list[tuple[int | None, int]], position: int, eta: int, units: int
) -> None:
    """fresh: position − oldest ≤ η for every token; without a token a group is always fresh.  A batch is as many groups as
    give it its units, not one more."""
    queue = [Queued(i, oldest, n) for i, (oldest, n) in enumerate(groups)]
    ids, stale = choose_batch(queue, position, eta=eta, batch_units=units)
    fresh = [q for q in queue if q.oldest is None or position - q.oldest <= eta]
    assert sorted([q.group_id for q in fresh] + stale) == [q.group_id for q in queue]
    upcoming = fresh_groups(queue, position, eta=eta, batch_units=units)
    if sum(q.units for q in fresh) < units:
        assert ids is None and len(upcoming) == len(fresh)
        return
    assert ids == upcoming
    chosen = [queue[i] for i in ids]
    assert sum(q.units for q in chosen) >= units > sum(q.units for q in chosen[:-1])
    age = [position if q.oldest is None else q.oldest for q in chosen]
    left = [position if q.oldest is None else q.oldest for q in fresh if q not in chosen]
    assert age == sorted(age) and all(a >= max(age) for a in left)


@given(st.lists(st.integers(0, 50), unique=True, min_size=1), st.integers(0, 5), st.integers(0, 5))
def test_a_batch_is_shuffled_the_same_way_each_time(ids: list[int], seed: int, step: int) -> None:
    order = shuffled(ids, seed, step)
    assert sorted(order) == sorted(ids) and order == shuffled(list(reversed(ids)), seed, step)


def test_minibatches_are_not_cut_by_age() -> None:
    assert len({tuple(shuffled(range(8), 0, step)) for step in range(20)}) == 20


@given(st.lists(st.integers(0, 5), max_size=30))
def test_the_lineage_counts_publications_that_led_to_the_weights(jumps: list[int]) -> None:
    """Against a plain table: each version follows the one before (0), or a trainer goes back by so many positions."""
    lineage, table = Lineage(), [0]
    for back in jumps:
        position = table[-1] + 1 if back == 0 else max(0, table[-1] - back)
        lineage.add(len(table), position)
        table.append(position)
    versions = range(len(table))
    assert [lineage.position(v) for v in versions] == table
    assert lineage.positions(np.arange(len(table))).tolist() == table
    assert Lineage(lineage.segments).segments == lineage.segments
    for first in versions:
        assert lineage.oldest(first, len(table) - 1) == min(table[first:])


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 9), st.integers(0, 20)), max_size=5),
    st.integers(5, 9),
    st.integers(0, 3),
    st.integers(0, 20),
)
def test_wait_is_for_groups_that_are_fresh_now_and_not_at_the_next_version(
    running: list[tuple[int | None, float]], position: int, eta: int, now: int
) -> None:
    expected = any(
        o is not None and position - o <= eta < position + 1 - o and now < deadline for o, deadline in running
    )
    assert must_wait(running, position, eta=eta, now=now) == expected


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=8))
def test_a_group_has_signal_if_its_rewards_differ(rewards: list[float]) -> None:
    assert has_signal(rewards) == (0.0 in rewards and 1.0 in rewards)


@pytest.mark.parametrize(
    ("outcome", "attempt", "expected"),
    [
        (Outcome.SUCCESS, 0, Fate.KEEP),
        (Outcome.FAILURE, 3, Fate.KEEP),
        (Outcome.FAULT, 0, Fate.REISSUE),
        (Outcome.FAULT, 2, Fate.REISSUE),
        (Outcome.FAULT, 3, Fate.DROP_GROUP),
        (Outcome.ENVIRONMENT, 0, Fate.DROP_GROUP),
    ],
)
def test_only_faults_are_issued_again_and_blocked_sites_drop_the_group(
    outcome: Outcome, attempt: int, expected: Fate
) -> None:
    assert fate(outcome, attempt, max_attempts=4) is expected
