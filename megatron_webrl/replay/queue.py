"""The replay queue: whole groups on their way from completion to a train step that is final.  No sockets, no waiting.

    queued -> in training -> provisional (until the checkpoint with the step is durable)
       └─ dropped: stale, zero_variance, …              └─ rolled back: queued again, batch by batch

Freshness is decided when a batch is taken, by the oldest response token of each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_webrl.config import ReplayConfig
from megatron_webrl.replay.ledger import Attempt, Batch
from megatron_webrl.replay.records import Records
from megatron_webrl.replay.rules import Lineage, Queued, choose_batch, fresh_groups, lag, must_wait, shuffled
from megatron_webrl.replay.spool import SpoolDamaged
from megatron_webrl.trajectory import Group, Task, Trajectory


def envelope(trajectory: Trajectory) -> Trajectory:
    """The trajectory without its payload, for memory."""
    trajectory.payload = b""
    return trajectory


@dataclass
class Whole:
    """A whole group: its members' rows and envelopes, in order of sample_index.  Where only successes train, the others are not
    among them any more."""

    group_id: int
    task: Task
    attempts: list[Attempt]
    envelopes: list[Trajectory]
    completed_at: float
    _oldest: tuple[int | None] | None = None

    def oldest(self, lineage: Lineage) -> int | None:
        """Position of the oldest response token, which no later publication changes; None without any."""
        if self._oldest is None:
            positions = (lineage.oldest(t.min_version, t.max_version) for t in self.envelopes if t.min_version >= 0)
            self._oldest = (min(positions, default=None),)
        return self._oldest[0]

    @property
    def tokens(self) -> int:
        """What training on it costs."""
        return sum(t.tokens for t in self.envelopes)

    @property
    def digests(self) -> list[str]:
        """Every screenshot of its trajectories, without duplicates."""
        return list(dict.fromkeys(digest for t in self.envelopes for digest in t.digests))


def is_newer(envelopes: Iterable[Trajectory], lineage: Lineage, position: int) -> bool:
    """Whether any of these has a token of weights later than `position`."""
    sampled = (t for t in envelopes if t.min_version >= 0)
    return any(lineage.newest(t.min_version, t.max_version) > position for t in sampled)


class Taken(NamedTuple):
    """The batch in training."""

    step: int
    groups: dict[int, Whole]
    """By group id, in the order of the batch."""


class ReplayQueue:
    """Whole groups.  successes_only: RAFT++, whose batches are counted in successes.  seed: of the order within batches.
    left: called with each group that leaves the queue and why: None if a batch takes it."""

    def __init__(
        self,
        config: ReplayConfig,
        records: Records,
        lineage: Lineage,
        *,
        successes_only: bool,
        seed: int,
        left: Callable[[Whole, str | None], None],
    ) -> None:
        self.config = config
        self.lineage = lineage
        self.group_units = config.group_size if successes_only else 1
        """That a group counts as while it runs."""
        self.batch_units = config.groups_per_step * self.group_units
        self.taken: Taken | None = None
        self._records = records
        self._successes_only = successes_only
        self._seed = seed
        self._left = left
        self._groups: dict[int, Whole] = {}
        self.abandoned_after: int | None = None
        """Set when a roll back could not be made good: members of begun groups that later weights sampled are to go, too."""
        self._again: dict[int, list[int]] = {}
        """Batches that were rolled back: group ids in their order, by step."""

    # Groups in ------------------------------------------------------------------------------------------------------

    def add(self, group: Whole) -> None:
        """A group is complete, and wanted."""
        self._groups[group.group_id] = group

    def restore(self, attempts: Iterable[Attempt], tasks: dict[int, Task], now: float) -> None:
        """What a coordinator that was killed had queued and in training."""
        members: dict[int, list[Attempt]] = {}
        for attempt in attempts:
            members.setdefault(attempt.group_id, []).append(attempt)
        for group_id, rows in sorted(members.items()):
            self._restore_group(group_id, tasks[group_id], rows, now)
        for batch in self._records.ledger.batches():
            if batch.state == "in_training":
                groups = {i: self._groups.pop(i) for i in batch.group_ids if i in self._groups}
                self.taken = Taken(batch.step, groups)
            elif batch.state == "again":
                self._again[batch.step] = batch.group_ids

    def _restore_group(self, group_id: int, task: Task, rows: list[Attempt], now: float) -> None:
        rows.sort(key=lambda a: a.sample_index)
        try:
            envelopes = [envelope(self._records.trajectory(a)) for a in rows]
        except SpoolDamaged:
            self._records.drop(rows, "damaged")
        else:
            self._groups[group_id] = Whole(group_id, task, rows, envelopes, now)

    def roll_back(self, step: int, position: int, now: float) -> None:
        """The trainer goes on after `step` finished steps, with weights of `position`: the batches of later steps are to be
        trained again, in the same order.  Where they are gone, what was sampled from weights that never come again is dropped."""
        ledger = self._records.ledger
        if self.taken is not None and self.taken.step >= step:
            self._groups |= self.taken.groups
            self.taken = None
        again = self._records.roll_back(step)
        back = {i for batch in again for i in batch.group_ids} - self._groups.keys()
        members: dict[int, list[Attempt]] = {}
        for attempt in ledger.live():
            if attempt.group_id in back and attempt.state == "queued":
                members.setdefault(attempt.group_id, []).append(attempt)
        tasks = ledger.tasks(members)
        for group_id, rows in members.items():
            self._restore_group(group_id, tasks[group_id], rows, now)
        self._again = {batch.step: batch.group_ids for batch in again}
        if not again:
            self._abandon(position)

    def _abandon(self, position: int) -> None:
        """What was trained after `position` does not come again as it was: what later weights sampled goes."""
        self.abandoned_after = position
        for group in list(self._groups.values()):
            if is_newer(group.envelopes, self.lineage, position):
                self._drop(self._groups.pop(group.group_id), "rolled_back")

    # Batches out ----------------------------------------------------------------------------------------------------

    @property
    def catching_up(self) -> bool:
        """Whether more batches wait to be trained again than a token may lag: what is sampled now would be too stale."""
        return len(self._again) > self.config.eta

    def take(
        self, step: int, version: int, *, running: Iterable[tuple[int | None, float]] = (), now: float = 0.0
    ) -> Taken | None:
        """The batch of train step `step` for weights of `version`; None while there is none.  Asking again for the same step
        gives the same.  running, now: for `stale: wait`, see `must_wait`.  Raises ValueError if another step is in training."""
        if self.taken is not None:
            if self.taken.step == step:
                return self.taken
            raise ValueError(f"step {step} is asked for while step {self.taken.step} is in training")
        position = self.lineage.position(version)
        ids = self._once_more(step, position)
        if ids is None:
            if self.config.stale == "wait" and must_wait(running, position, eta=self.config.eta, now=now):
                return None
            ids, stale = choose_batch(self._queue(), position, eta=self.config.eta, batch_units=self.batch_units)
            for group_id in stale:
                self._drop(self._groups.pop(group_id), "stale")
            if ids is None:
                return None
            ids = shuffled(ids, self._seed, step)
        self.taken = Taken(step, {i: self._groups.pop(i) for i in ids})
        members = [a for group in self.taken.groups.values() for a in group.attempts]
        self._records.ledger.begin_batch(step, ids, version, members)
        for group in self.taken.groups.values():
            self._left(group, None)
        return self.taken

    def _once_more(self, step: int, position: int) -> list[int] | None:
        """The batch that `step` had before it was rolled back, if it is all there, and as fresh as it was."""
        ids = self._again.pop(step, None)
        groups = [self._groups[i] for i in ids or () if i in self._groups]
        whole = bool(ids) and len(groups) == len(ids or ())
        if whole and all(lag(position, group.oldest(self.lineage)) <= self.config.eta for group in groups):
            return ids
        if self._again:
            self._records.ledger.forget_batches(min(self._again))
            self._again.clear()
            self._abandon(position)
        return None

    def upcoming(self, version: int) -> list[Whole]:
        """The groups of which a batch for weights of `version` would be cut now, as far as they are there."""
        if self._again:
            return [self._groups[i] for i in self._again[min(self._again)] if i in self._groups]
        position = self.lineage.position(version)
        ids = fresh_groups(self._queue(), position, eta=self.config.eta, batch_units=self.batch_units)
        return [self._groups[i] for i in ids]

    def _queue(self) -> list[Queued]:
        return [Queued(i, g.oldest(self.lineage), self._units(g)) for i, g in self._groups.items()]

    def _units(self, group: Whole) -> int:
        return len(group.attempts) if self._successes_only else 1

    def fetch(self, group_ids: list[int]) -> list[Group]:
        """Groups in training, with payloads.  Raises KeyError for others, SpoolDamaged."""
        groups = self.taken.groups if self.taken is not None else {}
        return [Group(i, groups[i].task, [self._records.trajectory(a) for a in groups[i].attempts]) for i in group_ids]

    def provisional(self, batch: Batch) -> list[Group]:
        """A batch that was trained and is in no durable checkpoint yet, with payloads.  Raises SpoolDamaged."""
        members: dict[int, list[Attempt]] = {i: [] for i in batch.group_ids}
        for attempt in self._records.ledger.live():
            if attempt.step == batch.step and attempt.group_id in members:
                members[attempt.group_id].append(attempt)
        tasks = self._records.ledger.tasks(members)
        return [
            Group(i, tasks[i], [self._records.trajectory(a) for a in sorted(rows, key=lambda a: a.sample_index)])
            for i, rows in members.items()
        ]

    def trained(self, step: int, applied_updates: int) -> None:
        """The step ended (0 updates: it was skipped) and its weights are published; a repeat changes nothing."""
        if self.taken is not None and self.taken.step == step:
            members = [a for group in self.taken.groups.values() for a in group.attempts]
            self._records.ledger.end_batch(step, members, skipped=not applied_updates)
            self.taken = None

    def discard(self, step: int, reason: str) -> None:
        """The batch of `step` is not trained, for the named reason; a repeat changes nothing."""
        if self.taken is not None and self.taken.step == step:
            for group in self.taken.groups.values():
                self._records.drop(group.attempts, reason)
            self._records.ledger.forget_batches(step)
            self.taken = None

    def drop(self, group_ids: Iterable[int], reason: str) -> None:
        """Queued groups are not wanted any more."""
        for group_id in group_ids:
            self._drop(self._groups.pop(group_id), reason)

    def _drop(self, group: Whole, reason: str) -> None:
        self._records.drop(group.attempts, reason)
        self._left(group, reason)

    # Accounts -------------------------------------------------------------------------------------------------------

    @property
    def group_ids(self) -> set[int]:
        """Queued groups."""
        return set(self._groups)

    @property
    def units(self) -> tuple[int, int]:
        """Queued, and in training."""
        taken = self.taken.groups if self.taken is not None else {}
        if not self._successes_only:
            return len(self._groups), len(taken)
        return sum(map(self._units, self._groups.values())), sum(map(self._units, taken.values()))

    def members(self) -> list[Attempt]:
        """Attempts that are queued or in training."""
        taken = self.taken.groups.values() if self.taken is not None else ()
        return [a for group in (*self._groups.values(), *taken) for a in group.attempts]

    def ages(self, now: float) -> list[float]:
        """Seconds since each queued group was complete."""
        return [now - group.completed_at for group in self._groups.values()]

    def clear(self) -> None:
        """A clean end: nothing is wanted any more."""
        self._groups.clear()
        self._again.clear()
        self.taken = None
