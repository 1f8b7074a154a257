"""The ledger: one row an attempt in SQLite, each in exactly one state, changed only along legal transitions.

    running -> queued -> in_training -> trained          (eval lane: running -> evaluated)
       └─────────┴────────────┴───> dropped(reason)
                 └<──────────────────── trained, dropped(step_skipped): rolled back, while provisional

`trained` is provisional until a checkpoint with its step is durable.  The ledger is the account of invariant 1 (issued =
trained + dropped + in flight), and all that a coordinator needs to go on after it was killed, but for the trajectories
themselves (the spool).  Rows of attempts that are in flight or provisional are also kept in memory, where they change; `commit`
writes what changed.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_webrl.errors import UserError
from megatron_webrl.replay.spool import Location
from megatron_webrl.trajectory import Assignment, AttemptKey, Lane, Task, Trajectory
from megatron_webrl.wire.messages import Account

FORMAT = 4
IN_FLIGHT = ("running", "queued", "in_training")

_SCHEMA = """
CREATE TABLE groups (
  group_id INTEGER PRIMARY KEY, lane TEXT NOT NULL, task BLOB NOT NULL, temperature REAL NOT NULL, size INTEGER NOT NULL,
  evaluation TEXT NOT NULL, top_p REAL NOT NULL, top_k INTEGER NOT NULL, open INTEGER NOT NULL);
CREATE TABLE attempts (
  group_id INTEGER, sample_index INTEGER, attempt INTEGER, lane TEXT NOT NULL, worker TEXT NOT NULL, session TEXT NOT NULL,
  issued_at REAL NOT NULL, policy INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, outcome TEXT NOT NULL,
  reward REAL, steps INTEGER NOT NULL, tokens INTEGER NOT NULL, min_version INTEGER NOT NULL,
  max_version INTEGER NOT NULL, started_at REAL, ended_at REAL, step INTEGER, segment INTEGER, offset INTEGER, length INTEGER,
  PRIMARY KEY (group_id, sample_index, attempt)) WITHOUT ROWID;
CREATE TABLE batches (step INTEGER PRIMARY KEY, group_ids BLOB NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL);
CREATE TABLE rates (name TEXT PRIMARY KEY, successes REAL NOT NULL, episodes REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""
_COLUMNS = 22
_LEGAL = {
    ("running", "queued"),
    ("running", "evaluated"),
    ("queued", "in_training"),
    ("in_training", "trained"),
    ("in_training", "queued"),
    ("trained", "queued"),
    ("dropped", "queued"),
    *((state, "dropped") for state in IN_FLIGHT),
}


class IllegalTransition(Exception):
    """An attempt was not in the state that the change starts from: a defect of the caller."""


class Attempt(msgspec.Struct, gc=False):
    """A row."""

    group_id: int
    sample_index: int
    attempt: int
    lane: str
    worker: str
    session: str
    issued_at: float
    """Seconds since the epoch."""
    policy: int
    """Version that the trainer held when it was issued; −1 before the first."""
    state: str = "running"
    reason: str = ""
    """Of the drop; of an eval attempt, why the episode ended."""
    outcome: str = ""
    reward: float | None = None
    steps: int = 0
    tokens: int = 0
    """Of its replies."""
    min_version: int = -1
    max_version: int = -1
    started_at: float | None = None
    ended_at: float | None = None
    step: int | None = None
    """Train step that it was trained (or skipped) in."""
    segment: int | None = None
    offset: int | None = None
    length: int | None = None

    @property
    def key(self) -> AttemptKey:
        return (self.group_id, self.sample_index, self.attempt)

    @property
    def location(self) -> Location | None:
        """Where its trajectory lies in the spool, while it is wanted."""
        if self.segment is None or self.offset is None or self.length is None:
            return None
        return Location(self.segment, self.offset, self.length)


class OpenGroup(NamedTuple):
    """A row of a group that was begun and is not complete."""

    group_id: int
    lane: Lane
    task: Task
    temperature: float
    size: int
    evaluation: str
    top_p: float
    top_k: int


class Batch(NamedTuple):
    """A row: what a train step took."""

    step: int
    group_ids: list[int]
    version: int
    state: str
    """`in_training`, `trained`, `skipped`, or `again`: rolled back, to be trained again."""


class Ledger:
    """Open (or create) the ledger at `path`.  Changes outlive the process after `commit`, the machine after `sync`.

    Raises UserError if the file is of another version of this program, or no ledger."""

    def __init__(self, path: Path) -> None:
        new = not path.exists()
        self._db = sqlite3.connect(path, isolation_level="DEFERRED", check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            if new or not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={FORMAT}; COMMIT;")
            _check_format(self._db, path)
        except sqlite3.DatabaseError as error:
            raise _unreadable(path, error) from None
        self._counts: Counter[tuple[str, str, str]] = Counter(_counts(self._db))
        self._attempts = self._load()
        self._changed: dict[AttemptKey, Attempt] = {}
        self._next_group = int(self._db.execute("SELECT coalesce(max(group_id) + 1, 0) FROM groups").fetchone()[0])
        # Not the database's own descriptor, whose closing would drop SQLite's locks; the log is never locked.
        self._log = os.open(path.with_name(path.name + "-wal"), os.O_RDONLY)

    def _load(self) -> dict[AttemptKey, Attempt]:
        rows = self._db.execute(
            "SELECT * FROM attempts WHERE state IN ('running', 'queued') OR (segment IS NOT NULL AND step>=?)",
            (self.recall("durable_step", 0),),
        )
        found = {attempt.key: attempt for attempt in (Attempt(*row) for row in rows)}
        for batch in self.batches():
            if batch.state == "in_training":
                for attempt in found.values():
                    if attempt.group_id in batch.group_ids and attempt.state == "queued":
                        self._counts[attempt.lane, "queued", ""] -= 1
                        self._counts[attempt.lane, "in_training", ""] += 1
                        attempt.state, attempt.step = "in_training", batch.step
        return found

    # Attempts -------------------------------------------------------------------------------------------------------

    def issue(self, assignment: Assignment, worker: str, session: str, *, policy: int, at: float) -> Attempt:
        """A new attempt is running.  Raises IllegalTransition if it was issued before."""
        attempt = Attempt(*assignment.key, str(assignment.lane), worker, session, at, policy)
        if attempt.key in self._attempts:
            raise IllegalTransition(f"attempt {attempt.key} is issued twice")
        self._attempts[attempt.key] = self._changed[attempt.key] = attempt
        self._counts[attempt.lane, "running", ""] += 1
        return attempt

    def queue(self, attempt: Attempt, trajectory: Trajectory, location: Location) -> None:
        """Its trajectory was accepted, and lies at `location` in the spool."""
        self._result(attempt, trajectory)
        attempt.segment, attempt.offset, attempt.length = location
        self._move(attempt, "queued")

    def count_evaluated(self, attempt: Attempt, trajectory: Trajectory) -> None:
        """An eval attempt gave its result."""
        self._result(attempt, trajectory)
        self._move(attempt, "evaluated", trajectory.reason)

    def drop(self, attempts: Iterable[Attempt], reason: str, trajectory: Trajectory | None = None) -> list[Location]:
        """They will not be trained, for the named reason; trajectory: what came of a single one.  Returns where their
        trajectories lie, which are not wanted any more."""
        freed = []
        for attempt in attempts:
            if trajectory is not None:
                self._result(attempt, trajectory)
            if attempt.location is not None:
                freed.append(attempt.location)
                attempt.segment = attempt.offset = attempt.length = None
            self._move(attempt, "dropped", reason)
        return freed

    def _result(self, attempt: Attempt, trajectory: Trajectory) -> None:
        attempt.outcome, attempt.reward, attempt.steps = (
            str(trajectory.outcome),
            trajectory.reward,
            trajectory.num_steps,
        )
        attempt.tokens = trajectory.response_tokens
        attempt.min_version, attempt.max_version = trajectory.min_version, trajectory.max_version
        attempt.started_at, attempt.ended_at = trajectory.started_at, trajectory.finished_at

    def _move(self, attempt: Attempt, state: str, reason: str = "", *, write: bool = True) -> None:
        before = attempt.state
        if (before, state) not in _LEGAL or attempt.key not in self._attempts:
            raise IllegalTransition(f"attempt {attempt.key} is {before}: it cannot become {state}")
        self._counts[attempt.lane, before, attempt.reason] -= 1
        self._counts[attempt.lane, state, reason] += 1
        attempt.state, attempt.reason = state, reason
        if write:
            self._changed[attempt.key] = attempt
        if state == "evaluated" or (state == "dropped" and attempt.location is None):
            del self._attempts[attempt.key]

    def live(self) -> list[Attempt]:
        """The attempts that are in flight or provisional."""
        return list(self._attempts.values())

    def was_accepted(self, key: AttemptKey) -> bool:
        """Whether a trajectory of this attempt was taken before."""
        attempt = self._attempts.get(key) or self._changed.get(key)
        if attempt is not None:
            return bool(attempt.outcome)
        row = self._db.execute(
            "SELECT outcome FROM attempts WHERE group_id=? AND sample_index=? AND attempt=?", key
        ).fetchone()
        return row is not None and bool(row[0])

    # Groups ---------------------------------------------------------------------------------------------------------

    def begin_group(
        self,
        lane: Lane,
        task: Task,
        temperature: float,
        size: int,
        evaluation: str = "",
        *,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> OpenGroup:
        """A group is begun, under an id that no other has."""
        group = OpenGroup(self._next_group, lane, task, temperature, size, evaluation, top_p, top_k)
        self._next_group += 1
        row = (group.group_id, str(lane), msgspec.msgpack.encode(task), *group[3:])
        self._db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1)", row)
        return group

    def close_group(self, group_id: int) -> None:
        """It is complete, or dropped."""
        self._db.execute("UPDATE groups SET open=0 WHERE group_id=?", (group_id,))

    def reopen_group(self, group_id: int) -> None:
        """It is not complete after all."""
        self._db.execute("UPDATE groups SET open=1 WHERE group_id=?", (group_id,))

    def open_groups(self) -> list[OpenGroup]:
        """Groups that were begun and are not complete, oldest first."""
        rows = self._db.execute(
            "SELECT group_id, lane, task, temperature, size, evaluation, top_p, top_k FROM groups WHERE open=1 "
            "ORDER BY group_id"
        )
        return [OpenGroup(i, Lane(lane), _task(task), *rest) for i, lane, task, *rest in rows]

    def tasks(self, group_ids: Iterable[int]) -> dict[int, Task]:
        """Their tasks."""
        found = {}
        for group_id in group_ids:
            (task,) = self._db.execute("SELECT task FROM groups WHERE group_id=?", (group_id,)).fetchone()
            found[group_id] = _task(task)
        return found

    def group_attempts(self, group_id: int) -> list[Attempt]:
        """All attempts of a group, those before the newest of their episode included."""
        self.commit()
        return [
            self._attempts.get((row[0], row[1], row[2])) or Attempt(*row)
            for row in self._db.execute("SELECT * FROM attempts WHERE group_id=? ORDER BY attempt", (group_id,))
        ]

    def forget_evaluations(self) -> None:
        """The evaluations so far are of an earlier start of the run: their names are free again."""
        self._db.execute("UPDATE groups SET evaluation='' WHERE evaluation!=''")
        self.remember(evaluations={}, evaluated_again=[])

    def evaluated(self, evaluation: str) -> list[tuple[Task, list[Attempt]]]:
        """The tasks of an evaluation, each with its attempts."""
        rows = self._db.execute("SELECT group_id, task FROM groups WHERE evaluation=?", (evaluation,))
        return [(_task(task), self.group_attempts(group_id)) for group_id, task in rows.fetchall()]

    # Batches --------------------------------------------------------------------------------------------------------

    def begin_batch(self, step: int, group_ids: list[int], version: int, attempts: Iterable[Attempt]) -> None:
        """Train step `step` took these groups."""
        for attempt in attempts:
            self._move(attempt, "in_training", write=False)  # the batch's row says it
            attempt.step = step
        row = (step, msgspec.msgpack.encode(group_ids), version, "in_training")
        self._db.execute("INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?)", row)

    def end_batch(self, step: int, attempts: Iterable[Attempt], *, skipped: bool) -> None:
        """The step ended.  Trajectories stay wanted until `durable`."""
        for attempt in attempts:
            self._move(attempt, "dropped" if skipped else "trained", "step_skipped" if skipped else "")
        state = "skipped" if skipped else "trained"
        self._db.execute("UPDATE batches SET state=? WHERE step=?", (state, step))

    def forget_batches(self, step: int) -> None:
        """The batches of `step` and later are none any more."""
        self._db.execute("DELETE FROM batches WHERE step>=?", (step,))

    def durable(self, step: int) -> list[Attempt]:
        """A checkpoint with `step` finished steps is on disk: what was trained in them is final.  Returns those attempts; their
        trajectories are not wanted any more."""
        self.remember(durable_step=step)
        final = [
            a for a in self._attempts.values() if a.state not in IN_FLIGHT and a.step is not None and a.step < step
        ]
        for attempt in final:
            del self._attempts[attempt.key]
        self._db.execute("DELETE FROM batches WHERE step<?", (step,))
        return final

    def roll_back(self, step: int) -> tuple[list[Batch], list[Attempt]]:
        """The trainer goes on after `step` finished steps.

        Attempts of later batches become queued; the batches are returned, in order, to be trained again.  If `step` lies before
        what is final already (the checkpoints after it were moved away), their trajectories are gone: what was trained since is
        dropped as `rolled_back`, and no batch comes again.  Returns also the attempts whose trajectories are not wanted any more.
        """
        if gone := step < self.recall("durable_step", 0):
            self.commit()
            for lane, n in self._db.execute(
                "SELECT lane, count(*) FROM attempts WHERE state='trained' AND step>=? GROUP BY lane", (step,)
            ).fetchall():
                self._counts[lane, "trained", ""] -= n
                self._counts[lane, "dropped", "rolled_back"] += n
            self._db.execute(
                "UPDATE attempts SET state='dropped', reason='rolled_back', segment=NULL WHERE state='trained' AND step>=?",
                (step,),
            )
            self._db.execute("UPDATE attempts SET segment=NULL WHERE state='dropped' AND step>=?", (step,))
            self.remember(durable_step=step)
        again = [batch for batch in self.batches() if batch.step >= step]
        steps = {batch.step for batch in again}
        freed = []
        for attempt in self.live():
            if attempt.step not in steps:
                continue
            if not gone or attempt.state == "in_training":
                self._move(attempt, "queued")
                attempt.step = None
                continue
            freed.append(attempt)
            if attempt.state == "trained":
                attempt.state, attempt.reason = "dropped", "rolled_back"  # as counted above
            del self._attempts[attempt.key]
        if gone:
            self.forget_batches(step)
        else:
            self._db.execute("UPDATE batches SET state='again' WHERE step>=?", (step,))
        return ([] if gone else again), freed

    def batches(self) -> list[Batch]:
        """Of steps that are not durable yet, in order."""
        rows = self._db.execute("SELECT step, group_ids, version, state FROM batches ORDER BY step")
        return [Batch(step, msgspec.msgpack.decode(ids, type=list[int]), v, state) for step, ids, v, state in rows]

    # Facts ----------------------------------------------------------------------------------------------------------

    def remember(self, **facts: Any) -> None:
        """Keep values (of msgpack) under their names."""
        rows = [(name, msgspec.msgpack.encode(value)) for name, value in facts.items()]
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)

    def recall(self, name: str, default: Any) -> Any:
        """The value under a name."""
        row = self._db.execute("SELECT value FROM facts WHERE name=?", (name,)).fetchone()
        return default if row is None else msgspec.msgpack.decode(row[0])

    def remember_rate(self, name: str, rate: tuple[float, float]) -> None:
        """Decayed (successes, episodes) of a task's name, for the sampler."""
        self._db.execute("INSERT OR REPLACE INTO rates VALUES (?, ?, ?)", (name, *rate))

    def rates(self) -> dict[str, tuple[float, float]]:
        return {name: (s, e) for name, s, e in self._db.execute("SELECT name, successes, episodes FROM rates")}

    def claim_version(self, at_least: int = 0) -> int:
        """A policy version that no weights of this run ever had: 0, 1, 2, …"""
        version = max(self.recall("version", -1) + 1, at_least)
        self.remember(version=version)
        return int(version)

    # Account --------------------------------------------------------------------------------------------------------

    def account(self, lane: Lane = Lane.TRAIN) -> Account:
        """Attempts of a lane by state."""
        return _account(self._counts, lane)

    def recount(self, lane: Lane = Lane.TRAIN) -> Account:
        """The same, counted row by row."""
        self.commit()
        return _account(Counter(_counts(self._db)), lane)

    # Durability -----------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """What changed outlives this process."""
        if self._changed:
            rows = [
                (
                    a.group_id, a.sample_index, a.attempt, a.lane, a.worker, a.session, a.issued_at, a.policy, a.state, a.reason,
                    a.outcome, a.reward, a.steps, a.tokens, a.min_version, a.max_version, a.started_at, a.ended_at, a.step,
                    a.segment, a.offset, a.length,
                )
                for a in self._changed.values()
            ]  # fmt: skip
            self._db.executemany(f"INSERT OR REPLACE INTO attempts VALUES ({','.join('?' * _COLUMNS)})", rows)
            self._changed.clear()
        self._db.commit()

    def sync(self) -> None:
        """What was committed outlives the machine.  May be called in a thread."""
        os.fdatasync(self._log)

    def close(self, *, commit: bool = True) -> None:
        """commit: False leaves the disk as the last commit did."""
        if commit:
            self.commit()
        self._db.close()
        os.close(self._log)


def read_account(path: Path, lane: Lane) -> Account:
    """The account of a run, which may be running.  Raises UserError if the file is no ledger of this version."""
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            _check_format(db, path)
            return _account(Counter(_counts(db)), lane)
        finally:
            db.close()
    except sqlite3.DatabaseError as error:
        raise _unreadable(path, error) from None


def _counts(db: sqlite3.Connection) -> dict[tuple[str, str, str], int]:
    rows = db.execute("SELECT lane, state, reason, count(*) FROM attempts GROUP BY lane, state, reason")
    return {(lane, state, reason): n for lane, state, reason, n in rows}


def _account(counts: Counter[tuple[str, str, str]], lane: Lane) -> Account:
    states: Counter[str] = Counter()
    dropped: dict[str, int] = {}
    for (of, state, reason), n in counts.items():
        if of == lane and n:
            states[state] += n
            if state == "dropped":
                dropped[reason] = n
    return Account(
        issued=states.total(),
        trained=states["trained"],
        dropped=dropped,
        in_flight=sum(states[s] for s in IN_FLIGHT),
    )


def _task(data: bytes) -> Task:
    return msgspec.msgpack.decode(data, type=Task)


def _check_format(db: sqlite3.Connection, path: Path) -> None:
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found != FORMAT:
        raise UserError(
            f"{path} is of format {found}, this version reads {FORMAT}: go on with the version that made it, or give another "
            "run_dir"
        )


def _unreadable(path: Path, error: sqlite3.DatabaseError) -> UserError:
    return UserError(f"{path} cannot be read as a ledger ({error}): give the run_dir of a run, or move the file away")
