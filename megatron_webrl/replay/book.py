"""The book of groups: which episodes are wanted, leased, finished, queued and in training.  No sockets, no waiting.

Every change goes through the ledger in the same call, so the account balances at every moment.  The clock is passed in.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from megatron_webrl.config import ReplayConfig
from megatron_webrl.replay.ledger import Ledger
from megatron_webrl.replay.rules import (
    Census,
    Fate,
    choose_batch,
    episodes_to_issue,
    fate,
    fresh_groups,
    has_signal,
    lag,
    may_start_group,
)
from megatron_webrl.trajectory import Assignment, AttemptKey, Group, Lane, Outcome, Task, Trajectory
from megatron_webrl.wire.messages import EvaluationState

RECENT_EPISODES = 256
RECENT_GROUPS = 64


class TaskSource(Protocol):
    """Draws the tasks of train groups, for ever."""

    def draw(self) -> Task: ...


@dataclass
class _Lease:
    assignment: Assignment
    worker: str
    session: str
    renewed_at: float


@dataclass
class _OpenGroup:
    """Begun and not complete.  The eval lane uses groups of one."""

    task: Task
    lane: Lane
    temperature: float
    pending: deque[tuple[int, int]]
    """(sample_index, attempt) to be issued."""
    results: dict[int, Trajectory] = field(default_factory=dict)
    evaluation: str = ""


class Book:
    """State of groups.

    task_source: of train groups; temperature: of train episodes; deadline_s: of an episode's own steps; seed: of the run.
    """

    def __init__(
        self,
        config: ReplayConfig,
        ledger: Ledger,
        task_source: TaskSource,
        *,
        temperature: float,
        deadline_s: float,
        seed: int,
    ) -> None:
        self.config = config
        self.training_allowed = False
        self.full = False
        """Back-pressure of the screenshot store: no new groups."""
        self.freed: list[AttemptKey] = []
        """Attempts that need their screenshots no more, since the caller last emptied this list; some never had any."""
        self.completed: list[Group] = []
        """Train groups completed since the caller last emptied this list (for the recorder)."""
        self.recent = deque[float](maxlen=RECENT_EPISODES)
        self.recent_mixed = deque[bool](maxlen=RECENT_GROUPS)
        self.trajectories = 0
        self.again: deque[Task] = deque()
        """Tasks that train groups practise before the source is asked: those that a resumed run had begun."""
        self._ledger = ledger
        self._source = task_source
        self._temperature = temperature
        self._deadline_s = deadline_s
        self._seed = seed
        self._next_group = ledger.next_group_id()
        self._open: dict[int, _OpenGroup] = {}
        self._leases: dict[AttemptKey, _Lease] = {}
        self._queued: dict[int, Group] = {}
        self._in_training: dict[int, Group] = {}
        self._batch: tuple[int, list[int], int] | None = None
        self._evaluations: dict[str, EvaluationState] = {}

    # Episodes out ---------------------------------------------------------------------------------------------------

    def assign(self, worker: str, session: str, slots: int, now: float) -> list[Assignment]:
        """Up to `slots` attempts, leased: eval first, then the oldest group's missing members, then a new group."""
        out: list[Assignment] = []
        room = episodes_to_issue(slots, self.config.max_concurrent_episodes, len(self._leases))
        while len(out) < room and (found := self._next_open()) is not None:
            group_id, group = found
            sample, attempt = group.pending.popleft()
            assignment = Assignment(
                task=group.task,
                group_id=group_id,
                sample_index=sample,
                attempt=attempt,
                lane=group.lane,
                seed=_episode_seed(self._seed, group_id, sample, attempt),
                temperature=group.temperature,
                deadline_s=self._deadline_s,
            )
            self._ledger.issue(assignment)
            self._leases[assignment.key] = _Lease(assignment, worker, session, now)
            out.append(assignment)
        return out

    def _next_open(self) -> tuple[int, _OpenGroup] | None:
        waiting = [(g.lane is Lane.TRAIN, i) for i, g in self._open.items() if g.pending]
        if waiting:
            _, group_id = min(waiting)
            return group_id, self._open[group_id]
        evaluating = any(e.finished < e.total for e in self._evaluations.values())
        admitted = may_start_group(self.census(), eta=self.config.eta, groups_per_step=self.config.groups_per_step)
        if not self.training_allowed or self.full or evaluating or not admitted:
            return None
        task = self.again.popleft() if self.again else self._source.draw()
        group_id = self._open_group(task, Lane.TRAIN, self._temperature, self.config.group_size)
        return group_id, self._open[group_id]

    def _open_group(self, task: Task, lane: Lane, temperature: float, size: int, evaluation: str = "") -> int:
        group_id, self._next_group = self._next_group, self._next_group + 1
        self._open[group_id] = _OpenGroup(task, lane, temperature, deque((i, 0) for i in range(size)), {}, evaluation)
        return group_id

    def renew(self, worker: str, session: str, running: list[AttemptKey], now: float) -> list[AttemptKey]:
        """Heartbeat of a worker.  Ends the leases of its earlier sessions; returns those of `running` that are no
        longer wanted."""
        for key, lease in list(self._leases.items()):
            if lease.worker == worker and lease.session != session:
                self._lost(key, "worker_lost")
        revoked = []
        for key in running:
            lease_or_none = self._leases.get(key)
            if lease_or_none is None or lease_or_none.session != session:
                revoked.append(key)
            else:
                lease_or_none.renewed_at = now
        return revoked

    def expire(self, now: float) -> None:
        """End the leases that were not renewed in time: their workers, or the replies that carried them, are lost."""
        for key, lease in list(self._leases.items()):
            if now - lease.renewed_at > self.config.lease_s:
                self._lost(key, "lease_expired")

    def _lost(self, key: AttemptKey, reason: str) -> None:
        if (lease := self._leases.pop(key, None)) is not None:  # an earlier loss may have dropped the whole group
            self._ended(lease.assignment, Outcome.FAULT, reason)

    # Trajectories in ------------------------------------------------------------------------------------------------

    def wants(self, key: AttemptKey) -> bool:
        """Whether a trajectory of this attempt would be accepted."""
        return key in self._leases

    def submit(self, trajectory: Trajectory) -> str:
        """Take the result of an attempt: `accepted`, `repeat` (had before) or `superseded` (no longer wanted).
        The screenshots of a success or failure are retained by the caller and come back through `freed`."""
        key = trajectory.assignment.key
        lease = self._leases.pop(key, None)
        if lease is None:
            return "repeat" if self._ledger.was_accepted(key) else "superseded"
        assignment = lease.assignment
        verdict = fate(trajectory.outcome, assignment.attempt, max_attempts=self.config.max_attempts)
        if verdict is not Fate.KEEP:
            self._ended(assignment, trajectory.outcome, trajectory.reason)
            return "accepted"
        group = self._open[assignment.group_id]
        if group.lane is Lane.EVAL:
            self.freed.append(key)
            self._ledger.count_evaluated(key)
            del self._open[assignment.group_id]
            self._count_evaluation(group, trajectory.reward > 0)
            return "accepted"
        self._ledger.queue([key])
        group.results[assignment.sample_index] = trajectory
        self.recent.append(trajectory.reward)
        self.trajectories += 1
        if len(group.results) == self.config.group_size:
            self._complete(assignment.group_id)
        return "accepted"

    def _ended(self, assignment: Assignment, outcome: Outcome, reason: str) -> None:
        """An attempt without a result: issue it again, or drop its group."""
        group = self._open[assignment.group_id]
        self._ledger.drop([assignment.key], reason)
        self.freed.append(assignment.key)
        if fate(outcome, assignment.attempt, max_attempts=self.config.max_attempts) is Fate.REISSUE:
            group.pending.appendleft((assignment.sample_index, assignment.attempt + 1))
        elif group.lane is Lane.EVAL:
            del self._open[assignment.group_id]
            self._count_evaluation(group, False, fault=True)
        else:
            self._drop_open(assignment.group_id, "group_faults" if outcome is Outcome.FAULT else f"group_{reason}")

    def _drop_open(self, group_id: int, reason: str) -> None:
        group = self._open.pop(group_id)
        keys = [key for key in self._leases if key[0] == group_id]
        for key in keys:
            del self._leases[key]
        keys += [t.assignment.key for t in group.results.values()]
        self._ledger.drop(keys, reason)
        self.freed.extend(keys)

    def _complete(self, group_id: int) -> None:
        opened = self._open.pop(group_id)
        group = Group(group_id, opened.task, [opened.results[i] for i in range(self.config.group_size)])
        self.completed.append(group)
        mixed = has_signal([t.reward for t in group.trajectories])
        self.recent_mixed.append(mixed)
        if self.config.dynamic_sampling and not mixed:
            self._drop_group(group, "zero_variance")
        else:
            self._queued[group_id] = group

    def _drop_group(self, group: Group, reason: str) -> None:
        keys = [t.assignment.key for t in group.trajectories]
        self._ledger.drop(keys, reason)
        self.freed.extend(keys)

    # Batches --------------------------------------------------------------------------------------------------------

    def take(self, step: int, version: int) -> tuple[list[int], int] | None:
        """Batch of train step `step` for weights of `version`: group ids, oldest first, and the largest lag; None while
        there is none.  Asking again for the same step gives the same."""
        if self._batch is not None:
            if self._batch[0] == step:
                return self._batch[1], self._batch[2]
            raise ValueError(f"step {step} is asked for while step {self._batch[0]} is in training")
        ids, stale = choose_batch(
            self._queue(), version, eta=self.config.eta, groups_per_step=self.config.groups_per_step
        )
        for group_id in stale:
            self._drop_group(self._queued.pop(group_id), "stale")
        if ids is None:
            return None
        self._in_training = {i: self._queued.pop(i) for i in ids}
        members = [t for g in self._in_training.values() for t in g.trajectories]
        self._ledger.take((t.assignment.key for t in members), step)
        self._batch = (step, ids, max(lag(version, t.min_version) for t in members))
        return self._batch[1], self._batch[2]

    def _queue(self) -> list[tuple[int, list[int]]]:
        return [(i, [t.min_version for t in g.trajectories]) for i, g in sorted(self._queued.items())]

    def upcoming(self, version: int) -> list[Group]:
        """The groups of which a batch for weights of `version` would be cut now, as far as they are there."""
        eta, size = self.config.eta, self.config.groups_per_step
        return [self._queued[i] for i in fresh_groups(self._queue(), version, eta=eta, groups_per_step=size)]

    def fetch(self, group_ids: list[int]) -> list[Group]:
        """Groups in training.  Raises KeyError for others."""
        return [self._in_training[i] for i in group_ids]

    def trained(self, step: int, applied_updates: int) -> None:
        """The step ended (0 updates: it was skipped) and its weights are published."""
        if not applied_updates:
            return self.discard(step, "step_skipped")
        for group in self._end_batch(step):
            keys = [t.assignment.key for t in group.trajectories]
            self._ledger.train(keys)
            self.freed.extend(keys)

    def discard(self, step: int, reason: str) -> None:
        """The batch of `step` is not trained, for the named reason."""
        for group in self._end_batch(step):
            self._drop_group(group, reason)

    def _end_batch(self, step: int) -> list[Group]:
        """The groups of the batch, which are in training no more; none if this is a repeat."""
        if self._batch is None or self._batch[0] != step:
            return []
        groups = list(self._in_training.values())
        self._in_training, self._batch = {}, None
        return groups

    # Evaluation -----------------------------------------------------------------------------------------------------

    def begin_evaluation(self, name: str, tasks: list[Task], temperature: float) -> None:
        """Open one episode a task in the eval lane; a repeat of a name is ignored."""
        if name in self._evaluations:
            return
        self._evaluations[name] = EvaluationState(name, len(tasks), 0, 0, {}, 0)
        for task in tasks:
            self._open_group(task, Lane.EVAL, temperature, 1, name)

    def evaluation(self, name: str) -> EvaluationState:
        """Raises KeyError for an unknown name."""
        return self._evaluations[name]

    def _count_evaluation(self, group: _OpenGroup, success: bool, *, fault: bool = False) -> None:
        state = self._evaluations[group.evaluation]
        state.finished += 1
        state.successes += success
        state.faults += fault
        tally = state.by_task.setdefault(group.task.name, [0, 0])
        tally[0] += success
        tally[1] += 1

    # Accounts -------------------------------------------------------------------------------------------------------

    def census(self) -> Census:
        """Train groups by where they are."""
        running = sum(g.lane is Lane.TRAIN for g in self._open.values())
        return Census(running, len(self._queued), len(self._in_training))

    def begun_tasks(self) -> list[Task]:
        """Tasks of the train groups that were begun and neither trained nor dropped, then those still to be practised
        again: what the source was asked for and will not give once more."""
        opened = {i: g.task for i, g in self._open.items() if g.lane is Lane.TRAIN}
        complete = {i: g.task for i, g in (*self._queued.items(), *self._in_training.items())}
        return [task for _, task in sorted((opened | complete).items())] + list(self.again)

    @property
    def running(self) -> int:
        """Leased episodes, both lanes."""
        return len(self._leases)

    def in_flight(self) -> int:
        """Train attempts that are running, queued or in training, counted from the state: the ledger must agree."""
        running = sum(lease.assignment.lane is Lane.TRAIN for lease in self._leases.values())
        finished = sum(len(g.results) for g in self._open.values())
        return (
            running + finished + sum(len(g.trajectories) for g in (*self._queued.values(), *self._in_training.values()))
        )

    def status(self) -> dict[str, Any]:
        """The book's part of `Status`."""
        census = self.census()
        return dict(
            running=self.running,
            running_groups=census.running,
            queued_groups=census.queued,
            in_training_groups=census.in_training,
            account=self._ledger.account(),
            success=sum(self.recent) / len(self.recent) if self.recent else math.nan,
            mixed_share=sum(self.recent_mixed) / len(self.recent_mixed) if self.recent_mixed else math.nan,
            trajectories=self.trajectories,
        )

    def end(self) -> None:
        """A clean end: what is in flight becomes `run_ended`, and nothing is wanted any more."""
        self.training_allowed = False
        self._ledger.end_in_flight("run_ended")
        self._open.clear()
        self._leases.clear()
        self._queued.clear()
        self._in_training.clear()
        self._batch = None


def _episode_seed(*parts: int) -> int:
    """Seed of an episode's sampler: 31 bits of a hash."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
