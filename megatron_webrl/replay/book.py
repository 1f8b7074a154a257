"""The book of episodes: which are wanted, leased and finished, until their group is whole and goes to the replay queue.

No sockets, no waiting.  Every change goes through the ledger in the same call, so the account balances at every moment, and a
book made anew from the records of one that was killed goes on where that stood.  The clock is passed in.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from megatron_webrl.config import ReplayConfig
from megatron_webrl.replay.drops import DropRates
from megatron_webrl.replay.evaluations import Evaluations
from megatron_webrl.replay.ledger import Attempt, OpenGroup
from megatron_webrl.replay.queue import ReplayQueue, Whole, envelope, is_newer
from megatron_webrl.replay.records import Records
from megatron_webrl.replay.rules import Census, Fate, Lineage, episodes_to_issue, fate, has_signal, may_start_group
from megatron_webrl.replay.spool import SpoolDamaged
from megatron_webrl.tasks import Sampler
from megatron_webrl.trajectory import Assignment, AttemptKey, Group, JudgeCost, Lane, Outcome, Task, Trajectory

log = logging.getLogger(__name__)

RECENT_EPISODES = 256
RECENT_GROUPS = 64


@dataclass
class _Open:
    """A group that is begun and not complete.  The eval lane uses groups of as many as an evaluation has seeds."""

    row: OpenGroup
    pending: deque[tuple[int, int]]
    """(sample_index, attempt) to be issued."""
    leases: dict[AttemptKey, _Lease] = field(default_factory=dict)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """Of finished members, by sample_index."""
    envelopes: dict[int, Trajectory] = field(default_factory=dict)
    deadline: float = -math.inf
    """Of `stale: wait`."""


@dataclass
class _Lease:
    assignment: Assignment
    attempt: Attempt
    group: _Open
    issued_at: float
    renewed_at: float
    known: bool = False
    """Its worker said that it runs it."""


class Book:
    """Episodes of a run.

    sampler: of the tasks of train groups; temperature: of train episodes; deadline_s: of an episode's own steps; seed: of the
    run; successes_only: RAFT++; same_start: the records are those of a coordinator of this very start of the run, whose
    workers live on; beside, share: most episodes at once of an evaluation beside training, and its share of those that are
    begun while train episodes wait, too; keep_evaluations: go on with those of an earlier start.
    """

    def __init__(
        self,
        config: ReplayConfig,
        records: Records,
        sampler: Sampler,
        *,
        temperature: float,
        deadline_s: float,
        seed: int,
        now: float,
        record_every: int = 1,
        successes_only: bool = False,
        same_start: bool = False,
        beside: int = 1,
        share: float = 0.25,
        keep_evaluations: bool = False,
    ) -> None:
        self.config = config
        self.evaluations = Evaluations(records.ledger, config.max_attempts)
        self._beside, self._share = beside, share
        self._due = 1.0
        """Episodes of an evaluation beside training that it may begin before train episodes, by its share."""
        self.training_allowed = False
        self.full = False
        """Back-pressure: no new groups."""
        self.policy = -1
        """Version that the trainer holds."""
        self.refreshing: Callable[[], bool] = lambda: False
        """Whether an engine still serves weights older than `policy`."""
        self.completed: list[Group] = []
        """Train groups completed since the caller last emptied this list, each `record_every`-th of them."""
        self.recent: deque[float] = deque(records.ledger.recall("recent", []), maxlen=RECENT_EPISODES)
        self.recent_mixed: deque[bool] = deque(records.ledger.recall("recent_mixed", []), maxlen=RECENT_GROUPS)
        self.drops = DropRates()
        self._judged: list[JudgeCost] = []
        """Of the episodes since the last row."""
        self.trajectories = 0
        self.lineage = Lineage(records.ledger.recall("lineage", [(0, 0)]))
        self.queue = ReplayQueue(
            config,
            records,
            self.lineage,
            successes_only=successes_only,
            seed=seed,
            left=lambda group, reason: self._count(group.attempts, reason, group.task),
        )
        self.records = records
        self._record_every = record_every
        self._successes_only = successes_only
        self._sampler = sampler
        self._temperature = temperature
        self._deadline_s = deadline_s
        self._seed = seed
        self._drawn: int = records.ledger.recall("drawn", 0)
        self._open: dict[Lane, dict[int, _Open]] = {Lane.TRAIN: {}, Lane.EVAL: {}}
        self._waiting: dict[Lane, list[int]] = {Lane.EVAL: [], Lane.TRAIN: []}
        """Heaps of the ids of open groups with pending members; may hold others too."""
        self._leases: dict[AttemptKey, _Lease] = {}
        self._of_worker: dict[str, dict[AttemptKey, _Lease]] = {}
        sampler.restore(records.ledger.rates())
        self._restore(now, same_start, keep_evaluations or same_start)

    # What an earlier process left -----------------------------------------------------------------------------------

    def _restore(self, now: float, same_start: bool, keep_evaluations: bool) -> None:
        ledger = self.records.ledger
        if keep_evaluations:
            self.evaluations.restore(anew=not same_start)
        else:
            ledger.forget_evaluations()
        open_groups = {row.group_id: row for row in ledger.open_groups()}
        whole = [a for a in ledger.live() if a.group_id not in open_groups and a.state in ("queued", "in_training")]
        self.queue.restore(whole, ledger.tasks({a.group_id for a in whole}), now)
        for row in open_groups.values():
            self._restore_group(row, now, same_start, keep_evaluations)

    def _restore_group(self, row: OpenGroup, now: float, same_start: bool, keep_evaluations: bool) -> None:
        newest: dict[int, Attempt] = {a.sample_index: a for a in self.records.ledger.group_attempts(row.group_id)}
        ended = {i: a for i, a in newest.items() if row.lane is Lane.EVAL and self.evaluations.ended(a)}
        pending = (
            (i, newest[i].attempt + 1 if i in newest else 0)
            for i in range(row.size)
            if i not in newest or (newest[i].state == "dropped" and i not in ended)
        )
        group = _Open(row, deque(pending), deadline=now + self._deadline_s)
        self._open[row.lane][row.group_id] = group
        for attempt in newest.values():
            if attempt.state == "running":
                assignment = self._assignment(group.row, attempt.sample_index, attempt.attempt)
                self._lease(assignment, group, attempt, now)
            elif attempt.state == "queued":
                group.attempts[attempt.sample_index] = attempt
        try:
            group.envelopes = {i: envelope(self.records.trajectory(a)) for i, a in group.attempts.items()}
        except SpoolDamaged as error:
            log.warning("group %d is dropped: %s", row.group_id, error)
            return self._drop_open(group, "damaged")
        group.attempts |= ended
        if row.lane is Lane.EVAL and not keep_evaluations:
            return self._drop_open(group, "lost_at_restart")
        if row.lane is Lane.TRAIN and not self._sampler.practises(row.task):
            return self._drop_open(group, "no_longer_practised")
        if not same_start:
            for key in list(group.leases):
                self._lost(key, "lost_at_restart", now)
        if group.pending:
            heapq.heappush(self._waiting[row.lane], row.group_id)

    # Episodes out ---------------------------------------------------------------------------------------------------

    def assign(self, worker: str, session: str, slots: int, now: float) -> list[Assignment]:
        """Up to `slots` attempts, leased: eval first, then the oldest group's missing members, then a new group."""
        out: list[Assignment] = []
        room = episodes_to_issue(slots, self.config.max_concurrent_episodes, len(self._leases))
        while len(out) < room and (group := self._next_open()) is not None:
            sample, number = group.pending.popleft()
            assignment = self._assignment(group.row, sample, number)
            attempt = self.records.ledger.issue(assignment, worker, session, policy=self.policy, at=time.time())
            self._lease(assignment, group, attempt, now)
            group.deadline = now + self._deadline_s
            out.append(assignment)
        return out

    def _assignment(self, row: OpenGroup, sample: int, number: int) -> Assignment:
        return Assignment(
            task=row.task,
            group_id=row.group_id,
            sample_index=sample,
            attempt=number,
            lane=row.lane,
            seed=_episode_seed(self._seed, row.group_id, sample, number),
            temperature=row.temperature,
            top_p=row.top_p,
            top_k=row.top_k,
            deadline_s=self._deadline_s,
        )

    def _lease(self, assignment: Assignment, group: _Open, attempt: Attempt, now: float) -> None:
        lease = _Lease(assignment, attempt, group, now, now)
        self._leases[attempt.key] = group.leases[attempt.key] = lease
        self._of_worker.setdefault(attempt.worker, {})[attempt.key] = lease

    def _end_lease(self, key: AttemptKey) -> _Lease | None:
        lease = self._leases.pop(key, None)
        if lease is not None:
            del lease.group.leases[key]
            theirs = self._of_worker[lease.attempt.worker]
            del theirs[key]
            if not theirs:
                del self._of_worker[lease.attempt.worker]
        return lease

    def _next_open(self) -> _Open | None:
        """Whose episode is next: an evaluation's that training waits for; else a train group's, and in its share that of an
        evaluation beside them."""
        evaluated = self._first_waiting(Lane.EVAL)
        if evaluated is None:
            return self._next_train()
        if not self.evaluations.is_beside(evaluated.row.evaluation):
            return evaluated
        room = sum(lease.attempt.lane == Lane.EVAL for lease in self._leases.values()) < self._beside
        if not (room and self._due >= 1.0) and (group := self._next_train()) is not None:
            due = self._share / (1 - self._share)
            self._due = min(max(1.0, due), self._due + due)
            return group
        if not room:
            return None
        self._due = max(0.0, self._due - 1.0)
        return evaluated

    def _next_train(self) -> _Open | None:
        if self.queue.catching_up:
            return None
        if (group := self._first_waiting(Lane.TRAIN)) is not None:
            return group
        if not self.training_allowed or self.full or self.evaluations.phase or not self._admitted():
            return None
        task = self._sampler.draw(self._drawn)
        self._drawn += 1
        self.records.ledger.remember(drawn=self._drawn)
        return self._begin(Lane.TRAIN, task, self._temperature, self.config.group_size)

    def _first_waiting(self, lane: Lane) -> _Open | None:
        waiting = self._waiting[lane]
        while waiting:
            group = self._open[lane].get(waiting[0])
            if group is not None and group.pending:
                return group
            heapq.heappop(waiting)
        return None

    def _admitted(self) -> bool:
        return may_start_group(self.census(), eta=self.config.eta, batch_units=self.queue.batch_units)

    def _begin(
        self, lane: Lane, task: Task, temperature: float, size: int, evaluation: str = "", **truncation: Any
    ) -> _Open:
        row = self.records.ledger.begin_group(lane, task, temperature, size, evaluation, **truncation)
        group = self._open[lane][row.group_id] = _Open(row, deque((i, 0) for i in range(size)))
        heapq.heappush(self._waiting[lane], row.group_id)
        return group

    def renew(
        self, worker: str, session: str, running: list[AttemptKey], now: float
    ) -> tuple[list[AttemptKey], list[Assignment]]:
        """Heartbeat of a worker.  Ends the leases of its earlier sessions.  Returns those of `running` that are no longer
        wanted, and the assignments of this session that are not among them: the reply that carried them was lost."""
        revoked = []
        known = set(running)
        again = []
        for key, lease in list(self._of_worker.get(worker, {}).items()):
            if lease.attempt.session != session:
                self._lost(key, "worker_lost", now)
            elif key in known:
                lease.renewed_at, lease.known = now, True
            elif lease.known:
                self._lost(key, "abandoned", now)  # it gave it up
            elif now > lease.issued_at:
                lease.renewed_at = now
                again.append(lease.assignment)
        mine = self._of_worker.get(worker, {})
        revoked = [key for key in running if key not in mine]
        return revoked, again

    def postpone(self, seconds: float) -> None:
        """All leases last so much longer."""
        for lease in self._leases.values():
            lease.renewed_at += seconds

    def expire(self, now: float) -> None:
        """End the leases that were not renewed in time, whose workers are lost, and attempts without end."""
        for key, lease in list(self._leases.items()):
            if now - lease.renewed_at > self.config.lease_s:
                self._lost(key, "lease_expired", now)
            elif now - lease.issued_at > self.config.attempt_limit_s:
                self._lost(key, "attempt_limit", now)

    def _lost(self, key: AttemptKey, reason: str, now: float) -> None:
        if (lease := self._end_lease(key)) is not None:  # an earlier loss may have dropped the whole group
            self._ended(lease, Outcome.FAULT, reason, now)

    # Trajectories in ------------------------------------------------------------------------------------------------

    def submit(self, trajectory: Trajectory, now: float) -> str:
        """Take the result of an attempt: `accepted`, `repeat` (had before) or `superseded` (no longer wanted: its screenshots
        are freed)."""
        key = trajectory.assignment.key
        lease = self._leases.get(key)
        if lease is None:
            if self.records.ledger.was_accepted(key):
                return "repeat"
            self.records.freed.append(key)
            return "superseded"
        group, attempt = lease.group, lease.attempt
        if trajectory.judge_cost is not None:
            self._judged.append(trajectory.judge_cost)
        kept = fate(trajectory.outcome, attempt.attempt, max_attempts=self.config.max_attempts) is Fate.KEEP
        if kept and group.row.lane is Lane.TRAIN:
            self.records.keep(attempt, trajectory)  # may raise: the worker will repeat it
        self._end_lease(key)
        if not kept:
            self._ended(lease, trajectory.outcome, trajectory.reason, now, trajectory)
        elif group.row.lane is Lane.EVAL:
            self.records.ledger.count_evaluated(attempt, trajectory)
            self._evaluated(group, attempt)
        else:
            group.attempts[attempt.sample_index] = attempt
            group.envelopes[attempt.sample_index] = envelope(trajectory)
            self.recent.append(trajectory.reward)
            self.trajectories += 1
            if len(group.attempts) == group.row.size:
                self._complete(group, now)
        return "accepted"

    def _ended(
        self, lease: _Lease, outcome: Outcome, reason: str, now: float, trajectory: Trajectory | None = None
    ) -> None:
        """An attempt without a result that trains: issue it again, or drop its group."""
        group, attempt = lease.group, lease.attempt
        self._drop([attempt], reason, group.row.task, trajectory)
        again = fate(outcome, attempt.attempt, max_attempts=self.config.max_attempts) is Fate.REISSUE
        if again or self.evaluations.runs_again(attempt):
            group.pending.appendleft((attempt.sample_index, attempt.attempt + 1))
            heapq.heappush(self._waiting[group.row.lane], group.row.group_id)
        elif group.row.lane is Lane.EVAL:
            self._evaluated(group, attempt)
        else:
            self._drop_open(group, "group_faults" if outcome is Outcome.FAULT else f"group_{reason}")

    def _drop_open(self, group: _Open, reason: str) -> None:
        self._close(group)
        leased = [lease.attempt for key in list(group.leases) if (lease := self._end_lease(key)) is not None]
        finished = (
            group.attempts.values() if group.row.lane is Lane.TRAIN else ()
        )  # an episode of the eval lane has counted
        self._drop([*leased, *finished], reason, group.row.task)

    def _drop(self, attempts: list[Attempt], reason: str, task: Task, trajectory: Trajectory | None = None) -> None:
        self.records.drop(attempts, reason, trajectory)
        self._count(attempts, reason, task)

    def _count(self, attempts: list[Attempt], reason: str | None, task: Task) -> None:
        """Train attempts ended, for the drop rates."""
        for attempt in attempts:
            if attempt.lane == Lane.TRAIN:
                ended_at = time.time() if attempt.ended_at is None else attempt.ended_at
                age = max(0.0, ended_at - attempt.issued_at)
                self.drops.ended(reason, difficulty=task.difficulty, steps=attempt.steps, age_s=age)

    def _close(self, group: _Open) -> None:
        del self._open[group.row.lane][group.row.group_id]
        self.records.ledger.close_group(group.row.group_id)

    def drop_youngest(self, reason: str) -> int | None:
        """Drop the train group that was begun last and is not complete; returns its id."""
        groups = self._open[Lane.TRAIN]
        if not groups:
            return None
        group_id = max(groups)
        self._drop_open(groups[group_id], reason)
        return group_id

    def _complete(self, group: _Open, now: float) -> None:
        self._close(group)
        row = group.row
        members = [(group.attempts[i], group.envelopes[i]) for i in range(row.size)]
        rewards = [t.reward for _, t in members]
        if row.group_id % self._record_every == 0:
            whole = [self.records.trajectory(attempt) for attempt, _ in members]
            self.completed.append(Group(row.group_id, row.task, whole))
        mixed = has_signal(rewards)
        self.recent_mixed.append(mixed)
        self._sampler.observe(row.task, rewards)
        if (rate := self._sampler.rate(row.task.name)) != (0.0, 0.0):
            self.records.ledger.remember_rate(row.task.name, rate)
        if self._successes_only:
            failed = [a for a, t in members if not t.reward > 0]
            self._drop(failed, "not_a_success", row.task)
            members = [(a, t) for a, t in members if t.reward > 0]
        elif self.config.dynamic_sampling and not mixed:
            self._drop([a for a, _ in members], "zero_variance", row.task)
            members = []
        if members:
            self.queue.add(Whole(row.group_id, row.task, [a for a, _ in members], [t for _, t in members], now))

    # Trainer --------------------------------------------------------------------------------------------------------

    def running(self) -> list[tuple[int | None, float]]:
        """Of each train group that runs: the position of its oldest token, or of the policy that a running member was begun
        with; and its deadline for `stale: wait`."""
        return [(self._oldest(group), group.deadline) for group in self._open[Lane.TRAIN].values()]

    def _oldest(self, group: _Open) -> int | None:
        finished = (t for t in group.envelopes.values() if t.min_version >= 0)
        positions = [self.lineage.oldest(t.min_version, t.max_version) for t in finished]
        positions += [
            self.lineage.position(lease.attempt.policy) for lease in group.leases.values() if lease.attempt.policy >= 0
        ]
        return min(positions, default=None)

    def trainer_started(self, step: int, version: int, now: float) -> int:
        """A trainer goes on after `step` finished steps with the weights of `version` (−1: those of the model).  What was
        trained later is rolled back.  Returns the version to publish its weights as."""
        position = self.lineage.position(version) if version >= 0 else 0
        self.queue.roll_back(step, position, now)
        self.drop_abandoned()
        return self._claim(position, at_least=version + 1)

    def drop_abandoned(self) -> None:
        """Begun groups with members of weights that never come again go as `rolled_back`."""
        position, self.queue.abandoned_after = self.queue.abandoned_after, None
        if position is not None:
            for group in list(self._open[Lane.TRAIN].values()):
                if is_newer(group.envelopes.values(), self.lineage, position):
                    self._drop_open(group, "rolled_back")

    def claim_version(self, after: int) -> int:
        """A version for the weights that an update made of those of `after`."""
        return self._claim(self.lineage.position(after) + 1, at_least=after + 1)

    def _claim(self, position: int, at_least: int) -> int:
        version = self.records.ledger.claim_version(at_least)
        self.lineage.add(version, position)
        self.records.ledger.remember(lineage=self.lineage.segments)
        self.policy = version
        return version

    # Evaluation -----------------------------------------------------------------------------------------------------

    def begin_evaluation(
        self,
        name: str,
        tasks: list[Task],
        temperature: float,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        seeds: int = 1,
        beside: bool = False,
    ) -> None:
        """Open `seeds` episodes a task in the eval lane; a repeat of a name is ignored.  One that is not beside training ends
        those that are."""
        if not beside:
            over = self.evaluations.end_beside()
            for group in list(self._open[Lane.EVAL].values()):
                if group.row.evaluation in over:
                    self._drop_open(group, "evaluation_ended")
        if self.evaluations.begin(name, len(tasks), seeds, beside=beside):
            for task in tasks:
                self._begin(Lane.EVAL, task, temperature, seeds, name, top_p=top_p, top_k=top_k)

    def _evaluated(self, group: _Open, attempt: Attempt) -> None:
        """One of the group's episodes ended with this attempt."""
        group.attempts[attempt.sample_index] = attempt
        self.evaluations.count(group.row.evaluation, group.row.task, attempt)
        if len(group.attempts) == group.row.size:
            self.evaluations.count_task(group.row.evaluation, group.row.task, list(group.attempts.values()))
            self._close(group)

    # Accounts -------------------------------------------------------------------------------------------------------

    def census(self) -> Census:
        """Train groups by where they are, in units."""
        queued, in_training = self.queue.units
        refreshing = self.queue.batch_units if self.refreshing() else 0
        return Census(len(self._open[Lane.TRAIN]) * self.queue.group_units, queued, in_training + refreshing)

    @property
    def leased(self) -> int:
        """Leased episodes, both lanes."""
        return len(self._leases)

    def owners(self) -> list[AttemptKey]:
        """Attempts that may own screenshots."""
        return [a.key for a in self.records.ledger.live()]

    def in_flight(self) -> int:
        """Train attempts that are running, queued or in training, counted from the state: the ledger must agree."""
        running = sum(lease.attempt.lane == Lane.TRAIN for lease in self._leases.values())
        finished = sum(len(g.attempts) for g in self._open[Lane.TRAIN].values())
        return running + finished + len(self.queue.members())

    def judge_row(self) -> dict[str, float]:
        """Metrics of what models judged since the last call; none if they judged nothing."""
        judged, self._judged = self._judged, []
        if not judged:
            return {}
        return {
            "judge/episodes": float(len(judged)),
            "judge/requests": float(sum(cost.requests for cost in judged)),
            "judge/tokens": float(sum(cost.prompt_tokens + cost.completion_tokens for cost in judged)),
            "judge/seconds": sum(cost.seconds for cost in judged) / len(judged),
            "judge/cost": sum(cost.cost for cost in judged),
        }

    def status(self) -> dict[str, Any]:
        """The book's part of `Status`."""
        taken = self.queue.taken
        return dict(
            running=self.leased,
            running_groups=len(self._open[Lane.TRAIN]),
            queued_groups=len(self.queue.group_ids),
            in_training_groups=len(taken.groups) if taken is not None else 0,
            account=self.records.ledger.account(),
            success=sum(self.recent) / len(self.recent) if self.recent else math.nan,
            mixed_share=sum(self.recent_mixed) / len(self.recent_mixed) if self.recent_mixed else math.nan,
            trajectories=self.trajectories,
            queue_bytes=self.records.spool.bytes,
        )

    def remember(self) -> None:
        """Keep what only the display shows."""
        self.records.ledger.remember(recent=list(self.recent), recent_mixed=list(self.recent_mixed))

    def end(self) -> None:
        """A clean end: what is in flight becomes `run_ended`, and nothing is wanted any more."""
        self.training_allowed = False
        for lane in self._open.values():
            for group in list(lane.values()):
                self._drop_open(group, "run_ended")
        self.records.drop(self.queue.members(), "run_ended")
        self.queue.clear()


def _episode_seed(*parts: int) -> int:
    """Seed of an episode's sampler: 31 bits of a hash."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
