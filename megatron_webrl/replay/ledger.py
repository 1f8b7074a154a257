"""The ledger: one row an attempt in SQLite, each in exactly one state, changed only along legal transitions.

    running -> queued -> in_training -> trained          (trained is provisional until its checkpoint is durable)
       └─────────┴────────────┴───> dropped(reason)

It is the account of invariant 1 (issued = trained + dropped + in flight), and what a resumed run continues: group ids,
the largest policy version ever seen, and which steps were rolled back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from megatron_webrl.trajectory import Assignment, AttemptKey, Lane
from megatron_webrl.wire.messages import Account

_SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
  group_id INTEGER, sample_index INTEGER, attempt INTEGER, lane TEXT NOT NULL, task_id TEXT NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', step INTEGER,
  PRIMARY KEY (group_id, sample_index, attempt)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counts (
  lane TEXT, state TEXT, reason TEXT, n INTEGER NOT NULL, PRIMARY KEY (lane, state, reason)) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS issued AFTER INSERT ON attempts BEGIN
  INSERT INTO counts VALUES (new.lane, new.state, new.reason, 1) ON CONFLICT DO UPDATE SET n = n + 1; END;
CREATE TRIGGER IF NOT EXISTS moved AFTER UPDATE OF state, reason ON attempts BEGIN
  UPDATE counts SET n = n - 1 WHERE lane = old.lane AND state = old.state AND reason = old.reason;
  INSERT INTO counts VALUES (new.lane, new.state, new.reason, 1) ON CONFLICT DO UPDATE SET n = n + 1; END;
INSERT INTO counts SELECT lane, state, reason, count(*) FROM attempts
  WHERE NOT EXISTS (SELECT 1 FROM counts) GROUP BY lane, state, reason; -- a ledger from before they were counted
CREATE TABLE IF NOT EXISTS numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""


class IllegalTransition(Exception):
    """An attempt was not in the state that the change starts from: a defect of the caller."""


class Ledger:
    """Open (or create) the ledger at `path`.  Changes are durable after `commit`."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        if read_only:
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
            return
        self._db = sqlite3.connect(path, isolation_level="DEFERRED", check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)

    def issue(self, assignment: Assignment) -> None:
        """A new attempt is running.  Raises sqlite3.IntegrityError if it was issued before."""
        self._db.execute(
            "INSERT INTO attempts (group_id, sample_index, attempt, lane, task_id, state) VALUES (?, ?, ?, ?, ?, 'running')",
            (*assignment.key, assignment.lane, assignment.task.task_id),
        )

    def queue(self, keys: Iterable[AttemptKey]) -> None:
        """Its trajectory was accepted."""
        self._move(keys, ("running",), "queued")

    def take(self, keys: Iterable[AttemptKey], step: int) -> None:
        """It is in the batch of train step `step`."""
        self._move(keys, ("queued",), "in_training", step=step)

    def train(self, keys: Iterable[AttemptKey]) -> None:
        """Its step ended."""
        self._move(keys, ("in_training",), "trained")

    def count_evaluated(self, key: AttemptKey) -> None:
        """An eval attempt gave its result."""
        self._move([key], ("running",), "evaluated")

    def drop(self, keys: Iterable[AttemptKey], reason: str) -> None:
        """It will not be trained, for the named reason."""
        self._move(keys, ("running", "queued", "in_training"), "dropped", reason=reason)

    def _move(
        self,
        keys: Iterable[AttemptKey],
        before: tuple[str, ...],
        after: str,
        *,
        reason: str = "",
        step: int | None = None,
    ) -> None:
        for key in keys:
            moved = self._db.execute(
                f"UPDATE attempts SET state=?, reason=?, step=coalesce(?, step) WHERE group_id=? AND sample_index=? "
                f"AND attempt=? AND state IN ({','.join('?' * len(before))})",
                (after, reason, step, *key, *before),
            ).rowcount
            if moved != 1:
                row = self._db.execute(
                    "SELECT state FROM attempts WHERE group_id=? AND sample_index=? AND attempt=?", key
                ).fetchone()
                raise IllegalTransition(
                    f"attempt {key} is {row[0] if row else 'unknown'}, not {' or '.join(before)} ({after})"
                )

    def end_in_flight(self, reason: str) -> int:
        """Everything in flight is dropped for `reason`; returns how many attempts."""
        return self._db.execute(
            "UPDATE attempts SET state='dropped', reason=? WHERE state IN ('running', 'queued', 'in_training')",
            (reason,),
        ).rowcount

    def roll_back(self, step: int) -> int:
        """What was trained in `step` and later was not: the weights that saw it are gone (the checkpoint that is resumed
        from holds the steps before `step`).  Dropped as `rolled_back`; returns how many attempts."""
        return self._db.execute(
            "UPDATE attempts SET state='dropped', reason='rolled_back' WHERE state='trained' AND step>=?", (step,)
        ).rowcount

    def account(self, lane: Lane = Lane.TRAIN, *, recount: bool = False) -> Account:
        """Attempts of a lane by state: as counted along the way, whatever their number, or `recount`ed row by row."""
        states: dict[str, int] = {}
        dropped: dict[str, int] = {}
        rows = (
            "SELECT state, reason, count(*) FROM attempts WHERE lane = ? GROUP BY state, reason"
            if recount
            else "SELECT state, reason, n FROM counts WHERE lane = ? AND n > 0"
        )
        for state, reason, n in self._db.execute(rows, (lane,)):
            states[state] = states.get(state, 0) + n
            if state == "dropped":
                dropped[reason] = n
        return Account(
            issued=sum(states.values()),
            trained=states.get("trained", 0),
            dropped=dropped,
            in_flight=sum(states.get(s, 0) for s in ("running", "queued", "in_training")),
        )

    def was_accepted(self, key: AttemptKey) -> bool:
        """Whether a trajectory of this attempt was taken before."""
        row = self._db.execute(
            "SELECT state FROM attempts WHERE group_id=? AND sample_index=? AND attempt=?", key
        ).fetchone()
        return row is not None and row[0] in ("queued", "in_training", "trained", "evaluated")

    def next_group_id(self) -> int:
        """One more than the largest ever issued."""
        (largest,) = self._db.execute("SELECT max(group_id) FROM attempts").fetchone()
        return 0 if largest is None else largest + 1

    def train_groups(self) -> int:
        """Train groups ever begun."""
        (n,) = self._db.execute("SELECT count(DISTINCT group_id) FROM attempts WHERE lane=?", (Lane.TRAIN,)).fetchone()
        return int(n)

    def claim_version(self) -> int:
        """A policy version that no weights of this run ever had: 0, 1, 2, …; durable at once."""
        row = self._db.execute("SELECT value FROM numbers WHERE name='version'").fetchone()
        version = row[0] + 1 if row else 0
        self._db.execute("INSERT OR REPLACE INTO numbers VALUES ('version', ?)", (version,))
        self.commit()
        return version

    def commit(self) -> None:
        self._db.commit()

    def close(self) -> None:
        self._db.commit()
        self._db.close()
