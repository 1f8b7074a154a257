"""The rules of admission, freshness and groups, over all small cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.replay.rules import (
    Census,
    Fate,
    choose_batch,
    episodes_to_issue,
    fate,
    has_signal,
    is_fresh,
    lag,
    may_start_group,
)
from megatron_webrl.trajectory import Outcome

small = st.integers(0, 12)


@given(small, small, small, st.integers(0, 4), st.integers(1, 6))
def test_admission_is_running_queued_and_in_training_below_eta_plus_one_batches(
    running: int, queued: int, in_training: int, eta: int, b: int
) -> None:
    census = Census(running, queued, in_training)
    assert may_start_group(census, eta=eta, groups_per_step=b) == (running + queued + in_training < (eta + 1) * b)


def test_eta_zero_begins_nothing_while_a_batch_is_in_training() -> None:
    assert not may_start_group(Census(0, 0, 4), eta=0, groups_per_step=4)
    assert may_start_group(Census(0, 0, 0), eta=0, groups_per_step=4)
    assert may_start_group(Census(2, 1, 0), eta=0, groups_per_step=4), "dropped groups make room"


@given(small, small, small)
def test_dispatch_never_exceeds_slots_nor_the_limit(free: int, limit: int, running: int) -> None:
    issued = episodes_to_issue(free, limit, running)
    assert 0 <= issued <= free and (issued == 0 or running + issued <= limit)


@given(st.integers(0, 20), st.lists(st.integers(-1, 20), min_size=1, max_size=8), st.integers(0, 4))
def test_fresh_means_every_token_lags_at_most_eta(version: int, oldest: list[int], eta: int) -> None:
    assert is_fresh(version, oldest, eta=eta) == all(v < 0 or version - v <= eta for v in oldest)
    assert lag(version, -1) == 0


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), max_size=10),
    st.integers(5, 9),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_a_batch_is_the_oldest_fresh_groups_and_the_rest_is_stale_or_stays(
    versions: list[list[int]], version: int, eta: int, b: int
) -> None:
    queued = list(enumerate(versions))
    ids, stale = choose_batch(queued, version, eta=eta, groups_per_step=b)
    fresh = [i for i, v in queued if is_fresh(version, v, eta=eta)]
    assert sorted(fresh + stale) == [i for i, _ in queued]
    assert ids == (fresh[:b] if len(fresh) >= b else None)


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
