"""The rules of admission, freshness and groups: pure functions, no clock, no sockets.

Used by the coordinator, the tests and the planner.  η is `eta`, B `groups_per_step`, G `group_size`.

A batch is counted in units: a group is one, and a batch has B; where only successes train (RAFT++) a success is one, a group
that still runs counts as G, and a batch has B·G.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

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
    """Units in the system, derived from its state; no counter is kept."""

    running: int
    """Begun and not complete."""
    queued: int
    """Complete and waiting for a batch."""
    in_training: int
    """Taken; until every serving engine acknowledged the refresh of that step, or the step was skipped."""


def may_start_group(census: Census, *, eta: int, batch_units: int) -> bool:
    """Admission: running + queued + in_training < (η+1)·B, in units.  With η = 0 a step's groups are all begun with the
    weights that the step trains: strictly synchronous."""
    return sum(census) < (eta + 1) * batch_units


def episodes_to_issue(free_slots: int, max_concurrent: int, running: int) -> int:
    """Dispatch is by episode: min(free slots, max_concurrent − running), at least 0."""
    return max(0, min(free_slots, max_concurrent - running))


class Lineage:
    """Where policy versions stand in training: the position of a version is the number of updates' publications that led to
    its weights.

    Versions never repeat, but weights come again: a trainer that resumes from the checkpoint of version 20, after 27 was
    published, publishes the same weights as version 28, which has position 20; 29 has 21, and if the same batches are
    trained again, the weights of 29 are those of 21.  Lag is a difference of positions.

    segments: (first version, offset), ascending; position = version − offset of the last segment that begins at or before it.
    """

    def __init__(self, segments: Sequence[tuple[int, int]] = ((0, 0),)) -> None:
        self.segments = [(int(first), int(offset)) for first, offset in segments]

    def position(self, version: int) -> int:
        """Position of a version ≥ 0."""
        return version - self.segments[max(0, bisect_right(self.segments, version, key=lambda s: s[0]) - 1)][1]

    def positions(self, versions: np.ndarray) -> np.ndarray:
        """Positions of versions ≥ 0, int64 of their shape."""
        firsts, offsets = np.array(self.segments, np.int64).T
        return versions - offsets[np.maximum(0, np.searchsorted(firsts, versions, side="right") - 1)]

    def oldest(self, min_version: int, max_version: int) -> int:
        """Smallest position among versions min_version … max_version."""
        firsts = [first for first, _ in self.segments if min_version < first <= max_version]
        return min(self.position(version) for version in (min_version, *firsts))

    def newest(self, min_version: int, max_version: int) -> int:
        """Largest position among versions min_version … max_version."""
        lasts = [first - 1 for first, _ in self.segments if min_version < first <= max_version]
        return max(self.position(version) for version in (max_version, *lasts))

    def add(self, version: int, position: int) -> None:
        """`version`, larger than all before, has `position`."""
        if self.segments[-1][1] != version - position:
            self.segments.append((version, version - position))


def lag(position: int, oldest: int | None) -> int:
    """Lag of a batch's oldest token: position of the trainer's version − its position.  Without tokens (None) it is 0."""
    return position - oldest if oldest is not None else 0


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


class Queued(NamedTuple):
    """A whole group that waits for a batch."""

    group_id: int
    oldest: int | None
    """Position of its oldest response token; None without any."""
    units: int


def fresh_groups(queue: Iterable[Queued], position: int, *, eta: int, batch_units: int) -> list[int]:
    """The groups that a batch at `position` would be cut from: every token's lag ≤ η, the oldest tokens first (they would be
    too stale first), then the oldest group; as many as a batch needs, as far as they are there."""
    fresh = sorted(
        (q for q in queue if lag(position, q.oldest) <= eta),
        key=lambda q: (position if q.oldest is None else q.oldest, q.group_id),
    )
    chosen, units = [], 0
    for group in fresh:
        if units >= batch_units:
            break
        chosen.append(group.group_id)
        units += group.units
    return chosen


def choose_batch(
    queue: Sequence[Queued], position: int, *, eta: int, batch_units: int
) -> tuple[list[int] | None, list[int]]:
    """Which groups train at `position`.

    Returns (ids, or None while a batch is not there; ids too stale to be ever trained: drop them).
    """
    stale = [q.group_id for q in queue if lag(position, q.oldest) > eta]
    fresh = fresh_groups(queue, position, eta=eta, batch_units=batch_units)
    units = {q.group_id: q.units for q in queue}
    return (fresh if sum(units[i] for i in fresh) >= batch_units else None), stale


def shuffled(group_ids: Sequence[int], seed: int, step: int) -> list[int]:
    """The order of a batch: minibatches are cut from it, so that none holds just the oldest groups.  The same for the same
    seed, step and groups."""
    order = sorted(group_ids)
    random.Random(f"{seed}/{step}").shuffle(order)
    return order


def must_wait(running: Iterable[tuple[int | None, float]], position: int, *, eta: int, now: float) -> bool:
    """`stale: wait`: whether a batch at `position`, after which the next version comes, is to wait for a running group that is
    still fresh at `position` and no more at the next.  running: (position of its oldest token or of the oldest policy that it
    was begun with, deadline) of each group that runs."""
    return any(oldest is not None and lag(position, oldest) == eta and now < deadline for oldest, deadline in running)
