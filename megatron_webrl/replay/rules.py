"""The rules of admission, freshness and groups: pure functions, no clock, no sockets.

Used by the coordinator, the tests and the planner.  η is `eta`, B `groups_per_step`, G `group_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from megatron_webrl.trajectory import Outcome


class Fate(StrEnum):
    """What becomes of an attempt that ended."""

    KEEP = "keep"
    """It is its episode's result."""
    REISSUE = "reissue"
    """The episode is attempted again."""
    DROP_GROUP = "drop_group"
    """Its whole group is dropped: re-issuing single members would bias towards short and easy episodes."""


class Census(NamedTuple):
    """Groups in the system, derived from its state; no counter is kept."""

    running: int
    """Begun and not complete."""
    queued: int
    """Complete and waiting for a batch."""
    in_training: int
    """Taken; until every serving engine acknowledged the refresh of that step, or the step was skipped."""


def may_start_group(census: Census, *, eta: int, groups_per_step: int) -> bool:
    """Admission: running + queued + in_training < (η+1)·B.  With η = 0 a step's groups are all begun with the weights
    that the step trains: strictly synchronous."""
    return sum(census) < (eta + 1) * groups_per_step


def episodes_to_issue(free_slots: int, max_concurrent: int, running: int) -> int:
    """Dispatch is by episode: min(free slots, max_concurrent − running), at least 0."""
    return max(0, min(free_slots, max_concurrent - running))


def lag(version: int, oldest: int) -> int:
    """Lag of a batch's oldest token: trainer's version − its version.  A trajectory without tokens (−1) lags nothing."""
    return version - oldest if oldest >= 0 else 0


def is_fresh(version: int, oldest_versions: Sequence[int], *, eta: int) -> bool:
    """Whether every token of a group may be trained at `version`: lag ≤ η.  oldest_versions: per trajectory."""
    return all(lag(version, oldest) <= eta for oldest in oldest_versions)


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ: equal ones have advantage 0 (DAPO's dynamic sampling drops such groups)."""
    return len(set(rewards)) > 1


def fate(outcome: Outcome, attempt: int, *, max_attempts: int) -> Fate:
    """A fault is not a reward, and a slow episode is not a fault.  attempt: 0 for the first."""
    if outcome in (Outcome.SUCCESS, Outcome.FAILURE):
        return Fate.KEEP
    if outcome is Outcome.FAULT and attempt + 1 < max_attempts:
        return Fate.REISSUE
    return Fate.DROP_GROUP


Queue = Sequence[tuple[int, Sequence[int]]]
"""(group_id, oldest version per trajectory), oldest group first."""


def fresh_groups(queued: Queue, version: int, *, eta: int, groups_per_step: int) -> list[int]:
    """The B oldest groups that may train at `version`, as far as they are there."""
    return [group for group, oldest in queued if is_fresh(version, oldest, eta=eta)][:groups_per_step]


def choose_batch(queued: Queue, version: int, *, eta: int, groups_per_step: int) -> tuple[list[int] | None, list[int]]:
    """Which groups train at `version`: the B oldest fresh ones.

    Returns (ids, or None while fewer than B are fresh; ids too stale to be ever trained: drop them).
    """
    stale = [group for group, oldest in queued if not is_fresh(version, oldest, eta=eta)]
    fresh = fresh_groups(queued, version, eta=eta, groups_per_step=groups_per_step)
    return (fresh if len(fresh) == groups_per_step else None), stale
