"""The book of episodes and the replay queue: exactly once, fresh, whole groups, bounded, nothing lost; under random faults (a
state machine of hypothesis, against a simple model).

No process is involved: workers, trainer, clock and the kills of the coordinator are the test's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from metrics_page import names_in, names_of

from megatron_webrl.config import ReplayConfig
from megatron_webrl.replay.book import Book
from megatron_webrl.replay.ledger import IllegalTransition
from megatron_webrl.replay.records import Records
from megatron_webrl.trajectory import Assignment, AttemptKey, JudgeCost, Lane, Outcome, Task, Trajectory, encode_steps
from megatron_webrl.wire.messages import Tally


class Counting:
    """Tasks 0, 1, 2, …"""

    def draw(self, n: int) -> Task:
        return Task(f"test/{n}", "test", f"task-{n % 3}", n, 5)

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        pass

    def rate(self, name: str) -> tuple[float, float]:
        return (0.0, 0.0)

    def restore(self, rates: Mapping[str, tuple[float, float]]) -> None:
        pass

    def practises(self, task: Task) -> bool:
        return True


def make_book(directory: Path, now: float = 0.0, **options: Any) -> tuple[Book, Records]:
    """A book over the records in `directory`.  options: of the replay, or of the book (sampler, successes_only, same_start)."""
    names = ("successes_only", "same_start", "beside", "share", "keep_evaluations")
    own = {key: options.pop(key) for key in names if key in options}
    sampler = options.pop("sampler", None) or Counting()
    config = ReplayConfig.model_validate({"group_size": 2, "groups_per_step": 2, **options})
    records = Records(directory)
    book = Book(config, records, sampler, temperature=1.0, deadline_s=60, seed=0, now=now, record_every=1000, **own)
    book.training_allowed = True
    return book, records


def kill(records: Records) -> None:
    """What a SIGKILL leaves: all that was committed, nothing else."""
    records.ledger._db.close()
    os.close(records.ledger._log)
    os.close(records.spool._file)


def result(
    assignment: Assignment,
    reward: float,
    version: int = 0,
    outcome: Outcome | None = None,
    max_version: int | None = None,
) -> Trajectory:
    outcome = outcome or (Outcome.SUCCESS if reward else Outcome.FAILURE)
    digests = [f"{assignment.group_id:032x}"]
    newest = version if max_version is None else max_version
    return Trajectory(
        assignment, outcome, "test", reward, 1, 3, 5, version, newest, digests, "w", 0.0, 1.0, encode_steps([])
    )


def finish_group(book: Book, rewards: tuple[float, float], version: int = 0, now: float = 0.0) -> int:
    """Issue and finish one whole group."""
    a, b = (book.assign("w", "s", 1, now)[0] for _ in range(2))
    assert a.group_id == b.group_id
    for assignment, reward in zip((a, b), rewards, strict=True):
        assert book.submit(result(assignment, reward, version), now) == "accepted"
    return a.group_id


def take(book: Book, step: int, version: int, now: float = 0.0) -> list[int] | None:
    taken = book.queue.take(step, version, running=book.running(), now=now)
    return None if taken is None else list(taken.groups)


class Faults(RuleBasedStateMachine):
    """Workers that die, repeat themselves and are late; a trainer that trains, skips, publishes, saves and dies; a coordinator
    that is killed with and without its last change on disk; a run that is killed as a whole and resumed."""

    @initialize(
        eta=st.integers(0, 2),
        dynamic=st.booleans(),
        successes_only=st.booleans(),
        stale=st.sampled_from(["drop", "wait"]),
    )
    def begin(self, eta: int, dynamic: bool, successes_only: bool, stale: str) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.eta = eta
        self.options = dict(
            eta=eta,
            dynamic_sampling=dynamic and not successes_only,
            successes_only=successes_only,
            stale=stale,
            max_attempts=3,
            lease_s=10,
        )
        self.book, self.records = make_book(Path(self.directory.name), **self.options)
        self.now = 0.0
        self.sessions = {"w0": 0, "w1": 0}
        self.held: list[tuple[str, int, Assignment, int]] = []
        self.submitted: list[Trajectory] = []
        self.retained: set[AttemptKey] = set()
        # The model: the weights' place in training by version; what each step trained, on the lineage that counts.
        self.position: dict[int, int] = {}
        self.batches: dict[int, list[int]] = {}
        self.trained: dict[int, set[AttemptKey]] = {}
        self.updates: dict[int, int] = {}
        self.step, self.version, self.saved = 0, -1, (0, -1)
        self.trainer_begins()

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        self.book.end()
        account = self.records.ledger.account()
        assert account.in_flight == 0
        assert account.issued == account.trained + sum(account.dropped.values())
        assert account.trained == sum(map(len, self.trained.values()))
        self.records.close()
        self.directory.cleanup()

    def trainer_begins(self) -> None:
        step, version = self.saved
        position = self.position.get(version, 0)
        self.version = self.book.trainer_started(step, version, self.now)
        assert self.version not in self.position, "a version never repeats"
        self.position[self.version] = position
        self.step = step
        for later in [s for s in self.trained if s >= step]:
            del self.trained[later]

    def again(self, same_start: bool) -> None:
        """A new coordinator over what the killed one left."""
        self.records.freed.clear()  # said to the store, or said again by KeepImages
        kill(self.records)
        self.book, self.records = make_book(Path(self.directory.name), self.now, same_start=same_start, **self.options)
        self.book.policy = self.version
        self.retained = {a.key for a in self.records.ledger.live() if a.state != "running"}

    # Workers

    @rule(worker=st.sampled_from(["w0", "w1"]), slots=st.integers(1, 5))
    def assign(self, worker: str, slots: int) -> None:
        session = self.sessions[worker]
        units, begun = sum(self.book.census()), self.records.ledger._next_group
        found = self.book.assign(worker, f"{worker}/{session}", slots, self.now)
        if self.records.ledger._next_group > begun:
            assert units < (self.eta + 1) * self.book.queue.batch_units, "admission"
        self.held += [(worker, session, a, self.version) for a in found]

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(), reward=st.sampled_from([0.0, 1.0]), outcome=st.sampled_from([*Outcome, None, None, None, None])
    )
    def submit(self, data: st.DataObject, reward: float, outcome: Outcome | None) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        _, _, assignment, begun_with = self.held.pop(index)
        trajectory = result(assignment, reward, begun_with, outcome, self.version)
        trains = trajectory.outcome in (Outcome.SUCCESS, Outcome.FAILURE)
        if self.book.submit(trajectory, self.now) == "accepted" and trains:
            self.retained.add(assignment.key)
        self.submitted.append(trajectory)

    @rule(failing=st.integers(0, 3))
    def both_workers_finish_all_they_can_get(self, failing: int) -> None:
        """Groups of a success and a failure; some attempts are faults."""
        for worker, session in self.sessions.items():
            self.held += [
                (worker, session, a, self.version) for a in self.book.assign(worker, f"{worker}/{session}", 8, self.now)
            ]
        held, self.held = self.held, []
        for n, (_, _, assignment, begun_with) in enumerate(held):
            outcome = Outcome.FAULT if n < failing else None
            trajectory = result(assignment, float(assignment.sample_index), begun_with, outcome, self.version)
            if self.book.submit(trajectory, self.now) == "accepted" and outcome is None:
                self.retained.add(assignment.key)
            self.submitted.append(trajectory)

    @rule(steps=st.integers(1, 3))
    def whole_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.both_workers_finish_all_they_can_get(0)
            self.take()
            if self.book.queue.taken is not None:
                self.train(1)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        trajectory = data.draw(st.sampled_from(self.submitted))
        before = self.records.ledger.account()
        if trajectory.assignment.key not in self.book._leases:
            assert self.book.submit(trajectory, self.now) in ("repeat", "superseded")
            assert self.records.ledger.account() == before, "a repeat changes nothing"

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def worker_is_killed_and_comes_back(self, worker: str) -> None:
        self.sessions[worker] += 1
        assert self.book.renew(worker, f"{worker}/{self.sessions[worker]}", [], self.now) == ([], [])

    @rule(seconds=st.sampled_from([1.0, 11.0]), alive=st.sampled_from(["w0", "w1"]))
    def time_passes(self, seconds: float, alive: str) -> None:
        self.now += seconds
        session = self.sessions[alive]
        mine = [a.key for w, s, a, _ in self.held if w == alive and s == session]
        revoked, again = self.book.renew(alive, f"{alive}/{session}", mine, self.now)
        assert not set(revoked) & {a.key for a in again}
        self.held = [h for h in self.held if h[2].key not in revoked or h[:2] != (alive, session)]
        self.held += [(alive, session, a, self.version) for a in again]
        self.book.expire(self.now)

    @rule(worker=st.sampled_from(["w0", "w1"]), slots=st.integers(1, 5))
    def a_reply_is_lost(self, worker: str, slots: int) -> None:
        """The same attempts come again with the next heartbeat."""
        session = self.sessions[worker]
        lost = self.book.assign(worker, f"{worker}/{session}", slots, self.now)
        self.now += 1
        mine = [a.key for w, s, a, _ in self.held if w == worker and s == session]
        revoked, again = self.book.renew(worker, f"{worker}/{session}", mine, self.now)
        self.held = [h for h in self.held if h[2].key not in revoked or h[:2] != (worker, session)]
        assert {a.key for a in lost} <= {a.key for a in again}
        self.held += [(worker, session, a, self.version) for a in again]

    # Trainer

    @rule()
    def take(self) -> None:
        upcoming = [group.group_id for group in self.book.queue.upcoming(self.version)]
        ids = take(self.book, self.step, self.version, self.now)
        if ids is None:
            return
        known = self.batches.get(self.step)
        assert known is None or ids == known, "idempotent, and after a roll-back the same again, in the same order"
        assert known is not None or sorted(ids) == sorted(upcoming), "what was announced is what is taken"
        self.batches[self.step] = ids
        units = 0
        for group in self.book.queue.fetch(ids):
            rewards = [t.reward for t in group.trajectories]
            if self.options["successes_only"]:
                assert all(reward > 0 for reward in rewards)
                units += len(rewards)
            else:
                assert [t.assignment.sample_index for t in group.trajectories] == [0, 1], "whole groups"
                assert len(set(rewards)) > 1 or not self.options["dynamic_sampling"]
                units += 1
            for t in group.trajectories:
                versions = [v for v in self.position if t.min_version <= v <= t.max_version]
                oldest = min(self.position[v] for v in versions)
                assert self.position[self.version] - oldest <= self.eta, "fresh"
        assert units >= self.book.queue.batch_units

    @precondition(lambda self: self.book.queue.taken is not None)
    @rule(updates=st.integers(0, 2))
    def train(self, updates: int) -> None:
        assert self.book.queue.taken is not None
        keys = {a.key for g in self.book.queue.taken.groups.values() for a in g.attempts}
        assert not any(keys & others for others in self.trained.values()), "no attempt is trained twice"
        updates = self.updates.setdefault(self.step, updates)  # the same batch again has the same effect
        if updates:
            after, self.version = self.version, self.book.claim_version(self.version)
            assert self.version not in self.position
            self.position[self.version] = self.position[after] + 1
            self.trained[self.step] = keys
        for _ in range(2):  # a repeat changes nothing
            self.book.queue.trained(self.step, updates)
        self.step += 1

    @precondition(lambda self: self.book.queue.taken is None)
    @rule()
    def a_checkpoint_is_durable(self) -> None:
        self.saved = (self.step, self.version)
        self.records.durable(self.step)
        self.batches = {s: ids for s, ids in self.batches.items() if s >= self.step}

    @precondition(lambda self: self.book.queue.taken is not None and not self.batches.keys() - {self.step})
    @rule()
    def discard(self) -> None:
        trained = self.records.ledger.account().trained
        for _ in range(2):  # a repeat changes nothing
            self.book.queue.discard(self.step, "rollout_only")
        assert self.records.ledger.account().trained == trained
        del self.batches[self.step]

    @rule()
    def the_trainer_is_killed(self) -> None:
        self.trainer_begins()

    # Coordinator

    @rule()
    def the_coordinator_is_killed(self) -> None:
        before, in_flight = self.records.ledger.account(), self.book.in_flight()
        census, taken = self.book.census(), self.book.queue.taken
        self.records.commit()
        self.again(same_start=True)
        assert self.records.ledger.account() == before and self.book.in_flight() == in_flight, (
            "nothing is lost or doubled"
        )
        assert self.book.census() == census
        assert (self.book.queue.taken is None) == (taken is None)
        assert taken is None or list(self.book.queue.taken.groups) == list(taken.groups)

    @rule(worker=st.sampled_from(["w0", "w1"]), slots=st.integers(1, 5))
    def the_coordinator_is_killed_before_it_could_reply(self, worker: str, slots: int) -> None:
        """The assignments never were; the worker, which was not told of them, is none the wiser."""
        self.records.commit()
        before = self.records.ledger.account()
        self.book.assign(worker, f"{worker}/{self.sessions[worker]}", slots, self.now)
        self.again(same_start=True)
        assert self.records.ledger.account() == before

    @rule()
    def the_run_is_killed_and_resumed(self) -> None:
        self.records.commit()
        self.again(same_start=False)
        self.held = []
        for worker in self.sessions:
            self.sessions[worker] += 1
        self.trainer_begins()

    # What holds at every moment

    @invariant()
    def the_account_balances(self) -> None:
        account = self.records.ledger.account()
        assert account.issued == account.trained + sum(account.dropped.values()) + account.in_flight
        assert account.in_flight == self.book.in_flight()
        assert account == self.records.ledger.recount()
        assert account.trained == sum(map(len, self.trained.values()))

    @invariant()
    def screenshots_are_retained_for_just_what_is_held(self) -> None:
        freed, self.records.freed = self.records.freed, []
        self.retained.difference_update(freed)
        live = self.records.ledger.live()
        assert self.retained == {a.key for a in live if a.state != "running"}
        assert {a.key for a in live if a.state != "running"} == {a.key for a in live if a.location is not None}

    @invariant()
    def the_spool_holds_just_what_is_wanted(self) -> None:
        lengths = [a.length or 0 for a in self.records.ledger.live()]
        assert self.records.spool.bytes == sum(lengths)


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_one_slot_with_whole_groups_works(tmp_path: Path) -> None:
    book, _ = make_book(tmp_path, group_size=8, groups_per_step=1, eta=0)
    for i in range(8):
        (assignment,) = book.assign("w", "s", 1, 0.0)
        assert (assignment.group_id, assignment.sample_index) == (0, i)
        book.submit(result(assignment, float(i % 2)), 0.0)
    assert take(book, 0, 0) == [0]
    assert book.assign("w", "s", 1, 0.0) == [], "strictly synchronous: nothing begins while the batch trains"
    book.queue.trained(0, 1)
    assert book.assign("w", "s", 1, 0.0)[0].group_id == 1


def test_eta_zero_with_dynamic_sampling_does_not_deadlock(tmp_path: Path) -> None:
    book, records = make_book(tmp_path, eta=0)
    for _ in range(5):
        finish_group(book, (1.0, 1.0))
    assert records.ledger.account().dropped == {"zero_variance": 10}
    mixed = [finish_group(book, (0.0, 1.0)) for _ in range(2)]
    assert sorted(take(book, 0, 0) or []) == mixed


@pytest.mark.parametrize("eta", [0, 2])
def test_raft_counts_successes_and_does_not_deadlock(tmp_path: Path, eta: int) -> None:
    """The batch unit is a success: B·G of them make a batch, however many groups they take; failures are `not_a_success`;
    no zero-variance filter: a group in which all succeeded is the best there is."""
    book, records = make_book(tmp_path, eta=eta, successes_only=True, dynamic_sampling=False)
    ids = [finish_group(book, rewards) for rewards in ((0, 0), (1, 0), (0, 0), (1, 1), (0, 0))]
    assert take(book, 0, 0) is None, "three successes of four"
    ids.append(finish_group(book, (0, 1)))
    batch = take(book, 0, 0)
    assert batch is not None and sorted(batch) == [ids[1], ids[3], ids[5]]
    assert sorted(len(g.trajectories) for g in book.queue.fetch(batch)) == [1, 1, 2]
    book.queue.trained(0, 1)
    account = records.ledger.account()
    assert (account.trained, account.dropped) == (4, {"not_a_success": 8})


@pytest.mark.parametrize("eta", [0, 1])
def test_skipped_steps_do_not_deadlock(tmp_path: Path, eta: int) -> None:
    """Skipped again and again, at every η: admission looks at what is there, not at how many versions there were."""
    book, records = make_book(tmp_path, eta=eta)
    for step in range(5):
        for _ in range(2):
            finish_group(book, (0.0, 1.0))
        assert take(book, step, 0) is not None
        book.queue.trained(step, 0)
        assert records.ledger.account().dropped == {"step_skipped": 4 * (step + 1)}
    assert sum(book.census()) == 0


def test_stale_groups_are_dropped_when_a_batch_is_taken(tmp_path: Path) -> None:
    book, records = make_book(tmp_path, eta=1)
    finish_group(book, (0.0, 1.0), version=0)
    fresh = [finish_group(book, (0.0, 1.0), version=2) for _ in range(2)]
    assert sorted(take(book, 0, 2) or []) == fresh
    assert records.ledger.account().dropped == {"stale": 2}


def test_the_oldest_tokens_go_first_and_the_batch_is_shuffled(tmp_path: Path) -> None:
    book, _ = make_book(tmp_path, eta=2, groups_per_step=8)
    versions = [2, 1, 2, 0, 1, 2, 2, 0, 2, 1, 0, 2]
    ids = [finish_group(book, (0.0, 1.0), version=v) for v in versions]
    batch = take(book, 0, 2)
    assert batch is not None and sorted(batch) == sorted(sorted(ids, key=lambda i: (versions[i], i))[:8])
    assert batch != sorted(batch)


def test_wait_holds_the_batch_for_a_running_group_until_its_deadline(tmp_path: Path) -> None:
    """stale: wait: the group begun with version 0 is trained at 1, the last version at which it is fresh (η = 1), though a
    batch was there; after its deadline (60 s) the batch does not wait any more."""
    for late in (False, True):
        (tmp_path / str(late)).mkdir()
        book, records = make_book(tmp_path / str(late), eta=1, stale="wait")
        book.policy = 0
        slow = book.assign("w", "s", 2, 0.0)
        book.policy = 1
        fresh = [finish_group(book, (0.0, 1.0), version=1, now=1.0) for _ in range(2)]
        assert take(book, 0, 1, now=59.0) is None
        if late:
            assert sorted(take(book, 0, 1, now=60.0) or []) == fresh
        else:
            for assignment in slow:
                book.submit(result(assignment, float(assignment.sample_index), 0), 59.0)
            assert sorted(take(book, 0, 1, now=59.0) or []) == [slow[0].group_id, fresh[0]]
        assert records.ledger.account().dropped == {}


def test_an_attempt_without_end_is_taken_from_its_worker(tmp_path: Path) -> None:
    book, records = make_book(tmp_path, attempt_limit_s=100, lease_s=10)
    (first,) = book.assign("w", "s", 1, 0.0)
    for now in range(5, 105, 5):
        assert book.renew("w", "s", [first.key], float(now)) == ([], [])
        book.expire(float(now))
    book.renew("w", "s", [first.key], 105.0)
    book.expire(105.0)
    assert book.renew("w", "s", [first.key], 106.0) == ([first.key], [])
    assert records.ledger.account().dropped == {"attempt_limit": 1}
    assert book.assign("w", "s", 1, 107.0)[0].attempt == 1


def test_the_youngest_group_that_is_not_complete_gives_way(tmp_path: Path) -> None:
    book, records = make_book(tmp_path)
    assert book.drop_youngest("screenshots_full") is None
    finish_group(book, (0.0, 1.0))
    old, young = (book.assign("w", "s", 2, 0.0)[0].group_id for _ in range(2))
    assert book.drop_youngest("screenshots_full") == young > old
    assert records.ledger.account().dropped == {"screenshots_full": 2}


def test_evaluation_goes_first_and_faults_count_as_episodes_and_it_survives_the_coordinator(tmp_path: Path) -> None:
    book, records = make_book(tmp_path, max_attempts=2)
    tasks = [Task(f"e/{i}", "test", "held-out", i, 5) for i in range(3)]
    book.begin_evaluation("before", tasks, 0.6, top_p=0.9, top_k=20)
    sampling = (0.6, 0.9, 20)
    episodes = book.assign("w", "s", 8, 0.0)
    assert [(e.lane, e.task) for e in episodes] == [(Lane.EVAL, t) for t in tasks]
    assert {(e.temperature, e.top_p, e.top_k) for e in episodes} == {sampling}
    assert book.submit(result(episodes[0], 1.0), 0.0) == "accepted"
    assert book.submit(result(episodes[2], 0.0, outcome=Outcome.FAULT), 0.0) == "accepted"
    records.commit()
    kill(records)
    book, records = make_book(tmp_path, max_attempts=2, same_start=True)
    assert book.evaluations.state("before").finished == 1
    assert book.submit(result(episodes[1], 0.0), 0.0) == "accepted"
    (again,) = book.assign("w", "s", 8, 0.0)
    assert (again.task, again.attempt) == (tasks[2], 1)
    assert (again.temperature, again.top_p, again.top_k) == sampling
    book.submit(result(again, 0.0, outcome=Outcome.FAULT), 0.0)
    state = book.evaluations.state("before")
    assert (state.total, state.finished, state.successes, state.faults) == (3, 3, 1, 1)
    assert counted(state.by_task) == {"held-out": (1, 2, 3)}
    assert records.ledger.account().issued == 0, "the account is of the train lane"
    (train,) = book.assign("w", "s", 1, 0.0)
    assert (train.lane, train.temperature, train.top_p, train.top_k) == (Lane.TRAIN, 1.0, 1.0, 0)
    records.commit()
    kill(records)
    book, _ = make_book(tmp_path, same_start=False)
    with pytest.raises(KeyError):
        book.evaluations.state("before")


def held_out(n: int) -> list[Task]:
    return [Task(f"e/{i}", "test", f"held-out-{i}", i, 5, 1 + i) for i in range(n)]


def count(tally: Tally) -> tuple[int, int, int]:
    return tally.successes, tally.results, tally.episodes


def counted(tallies: Mapping[Any, Tally]) -> dict[Any, tuple[int, int, int]]:
    return {key: count(tally) for key, tally in tallies.items()}


def test_an_evaluation_beside_training_has_its_slots_and_holds_nothing_up(tmp_path: Path) -> None:
    """At most `beside` of its episodes at once, whoever asks; train groups go on meanwhile; what ran is told with its policies'
    versions, once, also by a coordinator that was killed."""
    book, records = make_book(tmp_path, eta=9, beside=2)
    book.begin_evaluation("step-1", held_out(3), 1.0, beside=True)
    first = book.assign("w", "s", 5, 0.0)
    assert [a.lane for a in first] == [Lane.EVAL, Lane.TRAIN, Lane.TRAIN, Lane.TRAIN, Lane.EVAL]
    assert all(a.lane is Lane.TRAIN for a in book.assign("v", "s", 6, 0.0))
    book.submit(result(first[0], 1.0, version=4), 0.0)
    assert [a.lane for a in book.assign("w", "s", 2, 0.0)] == [Lane.EVAL, Lane.TRAIN]
    assert book.evaluations.row() == {}
    book.submit(result(first[4], 0.0, version=6), 0.0)
    last = next(lease.assignment for lease in book._leases.values() if lease.attempt.lane == Lane.EVAL)
    book.submit(result(last, 0.0, 5, Outcome.ENVIRONMENT), 0.0)
    state = book.evaluations.state("step-1")
    assert (state.over, count(state.all), state.blocked, state.faults) == (True, (1, 2, 3), 1, 0)
    assert (state.min_version, state.max_version) == (4, 6)
    row = book.evaluations.row()
    assert names_in(row) == names_of("Evaluation beside training")
    assert row["evaluation/success"] == pytest.approx(1 / 3)
    assert book.evaluations.row() == {}
    records.commit()
    kill(records)
    book, _ = make_book(tmp_path, eta=9, beside=2, same_start=True)
    assert count(book.evaluations.state("step-1").all) == (1, 2, 3)
    assert book.evaluations.row() == {}


@pytest.mark.parametrize(("share", "evaluated"), [(0.25, 10), (0.1, 4), (0.5, 20), (0.75, 30)])
def test_one_slot_is_shared_in_turns(tmp_path: Path, share: float, evaluated: int) -> None:
    """Where slots cannot be divided, or fewer live than the configuration says, episodes are: training is never starved."""
    book, _ = make_book(tmp_path, eta=99, beside=1, share=share)
    book.begin_evaluation("step-1", held_out(60), 1.0, beside=True)
    lanes = []
    for _ in range(40):
        (episode,) = book.assign("w", "s", 1, 0.0)
        lanes.append(episode.lane)
        book.submit(result(episode, 1.0), 0.0)
    assert abs(lanes.count(Lane.EVAL) - evaluated) <= 1
    book.training_allowed = False
    for group in list(book._open[Lane.TRAIN].values()):
        book._drop_open(group, "screenshots_full")
    for _ in range(5):  # nobody else wants the slot
        (episode,) = book.assign("w", "s", 1, 0.0)
        assert episode.lane is Lane.EVAL
        book.submit(result(episode, 1.0), 0.0)


def test_evaluations_beside_training_are_forgotten_once_told(tmp_path: Path) -> None:
    """Their number grows with the run, what is kept of them does not; nor is one forgotten whose row is still to be given."""
    book, records = make_book(tmp_path)
    book.training_allowed = False
    for n in range(20):
        book.begin_evaluation(f"step-{n}", held_out(1), 1.0, beside=True)
        (episode,) = book.assign("w", "s", 1, 0.0)
        book.submit(result(episode, 1.0), 0.0)
        if n < 19:
            assert book.evaluations.row()["evaluation/episodes"] == 1
    assert set(records.ledger.recall("evaluations", {})) == {"step-19"}
    book.begin_evaluation("step-20", held_out(1), 1.0, beside=True)
    assert set(records.ledger.recall("evaluations", {})) == {"step-19", "step-20"}
    assert book.evaluations.row()["evaluation/success"] == 1


def test_progress_is_small_while_it_runs(tmp_path: Path) -> None:
    """By task it may have as many tallies as episodes: they are told at the end alone."""
    book, _ = make_book(tmp_path)
    book.begin_evaluation("before", held_out(2), 1.0)
    first, last = book.assign("w", "s", 2, 0.0)
    book.submit(result(first, 1.0), 0.0)
    assert counted(book.evaluations.state("before").by_task) == {"held-out-0": (1, 1, 1)}
    assert book.evaluations.progress("before").by_task == {}
    assert count(book.evaluations.progress("before").all) == (1, 1, 1)
    book.submit(result(last, 1.0), 0.0)
    assert set(book.evaluations.progress("before").by_task) == {"held-out-0", "held-out-1"}


def test_a_phase_ends_the_evaluation_beside_it(tmp_path: Path) -> None:
    """Its running episodes are dropped by name, and nothing more of it is issued, nor told."""
    book, records = make_book(tmp_path, beside=1)
    book.begin_evaluation("step-1", held_out(3), 1.0, beside=True)
    (running,) = book.assign("w", "s", 1, 0.0)
    book.begin_evaluation("after", held_out(2), 1.0)
    assert book.evaluations.state("step-1").dropped
    assert book.submit(result(running, 1.0), 0.0) == "superseded"
    assert {a.group_id > running.group_id + 2 for a in book.assign("w", "s", 9, 0.0)} == {True}
    assert book.evaluations.row() == {}
    assert [a.reason for a in records.ledger.group_attempts(running.group_id)] == ["evaluation_ended"]


def test_several_seeds_are_episodes_of_one_task(tmp_path: Path) -> None:
    """Each with a seed of its own; tallies by seed, and the sums over tasks that intervals need."""
    book, records = make_book(tmp_path, max_attempts=1)
    book.begin_evaluation("eval", held_out(2), 1.0, seeds=3)
    episodes = book.assign("w", "s", 9, 0.0)
    assert [(a.task.seed, a.sample_index) for a in episodes] == [(t, s) for t in range(2) for s in range(3)]
    assert len({a.seed for a in episodes}) == 6
    for episode, reward in zip(episodes[:4], (1.0, 0.0, 1.0, 1.0), strict=True):
        book.submit(result(episode, reward), 0.0)
    records.commit()
    kill(records)
    book, records = make_book(tmp_path, max_attempts=1, same_start=True)
    assert list(map(count, book.evaluations.state("eval").by_seed)) == [(2, 2, 2), (0, 1, 1), (1, 1, 1)]
    book.submit(result(episodes[4], 0.0, outcome=Outcome.FAULT), 0.0)
    book.submit(result(episodes[5], 0.0), 0.0)
    state = book.evaluations.state("eval")
    assert (state.over, state.faults) == (True, 1)
    assert state.all == Tally(3, 5, 6, tasks=2, ss=2 * 2 + 1 * 1, sr=2 * 3 + 1 * 2, rr=3 * 3 + 2 * 2)
    assert state.by_level == {1: Tally(2, 3, 3, 1, 4, 6, 9), 2: Tally(1, 2, 3, 1, 1, 2, 4)}
    assert state.by_task == {"held-out-0": state.by_level[1], "held-out-1": state.by_level[2]}


def test_an_evaluation_that_is_resumed_keeps_what_has_a_result(tmp_path: Path) -> None:
    """A new start of the run: what was running is issued again, what ended for good is not."""
    book, records = make_book(tmp_path, max_attempts=2)
    book.begin_evaluation("eval", held_out(4), 1.0, seeds=2)
    episodes = book.assign("w", "s", 6, 0.0)
    book.submit(result(episodes[0], 1.0), 0.0)
    book.submit(result(episodes[1], 0.0, outcome=Outcome.ENVIRONMENT), 0.0)
    book.submit(result(episodes[2], 0.0, outcome=Outcome.FAULT), 0.0)
    records.commit()
    kill(records)
    book, records = make_book(tmp_path, max_attempts=2, keep_evaluations=True)
    book.begin_evaluation("eval", held_out(4), 1.0, seeds=2)
    assert count(book.evaluations.state("eval").all) == (1, 1, 2)
    again = evaluated(book, "v")
    assert {(a.task.seed, a.sample_index, a.attempt) for a in again} == {
        (1, 0, 1), (1, 1, 1), (2, 0, 1), (2, 1, 1), (3, 0, 0), (3, 1, 0)
    }  # fmt: skip
    for episode in again:
        book.submit(result(episode, 1.0), 0.0)
    state = book.evaluations.state("eval")
    assert (state.over, count(state.all), state.blocked, state.faults) == (True, (7, 7, 8), 1, 0)


def evaluated(book: Book, worker: str) -> list[Assignment]:
    return [a for a in book.assign(worker, worker, 9, 0.0) if a.lane is Lane.EVAL]


def test_what_faults_ended_is_run_again_when_an_evaluation_is_resumed(tmp_path: Path) -> None:
    """Exhausted retries and whole groups of them, too: the outage that the user mended is no result.  A coordinator that is
    killed has no such effect, neither before nor after; each resumed start tries once more."""
    book, records = make_book(tmp_path, max_attempts=1)
    book.begin_evaluation("eval", held_out(3), 1.0)
    solved, fault, running = evaluated(book, "w")
    book.submit(result(solved, 1.0), 0.0)
    book.submit(result(fault, 0.0, outcome=Outcome.FAULT), 0.0)
    assert book.evaluations.state("eval").faults == 1
    records.commit()
    kill(records)
    book, records = make_book(tmp_path, max_attempts=1, same_start=True)
    assert book.evaluations.state("eval").faults == 1
    assert evaluated(book, "w") == []
    records.commit()
    kill(records)
    again = {(fault.group_id, 0, 1), (running.group_id, 0, 1)}
    book, records = make_book(tmp_path, max_attempts=1, keep_evaluations=True)
    assert (book.evaluations.state("eval").finished, book.evaluations.state("eval").faults) == (1, 0)
    records.commit()
    kill(records)
    book, records = make_book(tmp_path, max_attempts=1, same_start=True)  # before any of them was issued
    assert book.evaluations.state("eval").finished == 1
    first, second = evaluated(book, "v")
    assert {first.key, second.key} == again
    book.submit(result(first, 0.0, outcome=Outcome.FAULT), 0.0)
    book.submit(result(second, 0.0), 0.0)
    state = book.evaluations.state("eval")
    assert (state.over, count(state.all), state.faults) == (True, (1, 2, 3), 1)
    records.commit()
    kill(records)
    book, records = make_book(tmp_path, max_attempts=1, keep_evaluations=True)
    assert [a.key for a in evaluated(book, "u")] == [(first.group_id, 0, 2)]
    assert records.ledger.recount(Lane.EVAL) == records.ledger.account(Lane.EVAL)


def test_what_judges_took_is_summed_a_row(tmp_path: Path) -> None:
    book, _ = make_book(tmp_path)
    for assignment in book.assign("w", "s", 2, 0.0):
        trajectory = result(assignment, 1.0)
        trajectory.judge_cost = JudgeCost(3, 100, 10, 2.0 + assignment.sample_index, 0.5)
        book.submit(trajectory, 0.0)
    row = book.judge_row()
    assert names_in(row) == names_of("Judge")
    assert row == {
        "judge/episodes": 2, "judge/requests": 6, "judge/tokens": 220, "judge/seconds": 2.5, "judge/cost": 1.0
    }  # fmt: skip
    assert book.judge_row() == {}


def train_two_steps(book: Book) -> list[list[int]]:
    """Steps 0 and 1, from versions 0 and 1."""
    assert book.trainer_started(0, -1, 0.0) == 0
    batches = []
    for step in range(2):
        for _ in range(2):
            finish_group(book, (0.0, 1.0), version=step)
        batches.append(take(book, step, step) or [])
        assert book.claim_version(step) == step + 1
        book.queue.trained(step, 1)
    return batches


def test_a_resumed_run_trains_the_same_batches_again_in_the_same_order(tmp_path: Path) -> None:
    """Killed after two steps, resumed from the checkpoint of the first: the second comes again, then what was queued, at the
    lags that an unbroken run has; nothing is issued for it, nothing dropped."""
    book, records = make_book(tmp_path, eta=2)
    batches = train_two_steps(book)
    records.durable(1)
    queued = [finish_group(book, (1.0, 0.0), version=2) for _ in range(2)]
    records.commit()
    kill(records)

    book, records = make_book(tmp_path, eta=2, same_start=False)
    assert book.trainer_started(1, 1, 0.0) == 3, "a version never repeats"
    account = records.ledger.account()
    assert (account.issued, account.trained, account.dropped, account.in_flight) == (12, 4, {}, 8)
    assert take(book, 1, 3) == batches[1]
    assert book.claim_version(3) == 4
    book.queue.trained(1, 1)
    assert sorted(take(book, 2, 4) or []) == queued, "sampled by version 2, whose weights 4 has again"
    assert book.lineage.position(4) == book.lineage.position(2) == 2


def test_the_roll_back_goes_on_though_trainer_and_coordinator_are_killed_in_it(tmp_path: Path) -> None:
    book, records = make_book(tmp_path, eta=1)
    batches = train_two_steps(book)
    book.trainer_started(0, -1, 0.0)
    assert take(book, 0, 3) == batches[0]
    records.commit()
    kill(records)
    book, records = make_book(tmp_path, eta=1, same_start=True)
    assert take(book, 0, 3) == batches[0]
    assert book.trainer_started(0, -1, 0.0) == 4
    assert take(book, 0, 4) == batches[0]
    assert book.claim_version(4) == 5
    book.queue.trained(0, 1)
    assert take(book, 1, 5) == batches[1]


def test_batches_of_a_checkpoint_that_is_not_gone_on_from_are_gone(tmp_path: Path) -> None:
    """The checkpoint after two steps was durable, and is moved away: its trajectories are not there any more.  What it trained
    is `rolled_back`, and so is what its weights sampled, which no weights to come will be near to."""
    book, records = make_book(tmp_path, eta=2)
    train_two_steps(book)
    old, young = finish_group(book, (1.0, 0.0), version=0), finish_group(book, (1.0, 0.0), version=2)
    records.durable(2)
    records.commit()
    kill(records)
    book, records = make_book(tmp_path, eta=2)
    book.trainer_started(0, 0, 0.0)
    account = records.ledger.account()
    assert (account.trained, account.dropped, account.in_flight) == (0, {"rolled_back": 10}, 2)
    assert account == records.ledger.recount()
    assert book.queue.group_ids == {old} and young not in book.queue.group_ids


def test_members_of_weights_that_never_come_again_are_dropped_with_their_groups(tmp_path: Path) -> None:
    """Resumed from a checkpoint older than the newest durable one, in the middle of a group."""
    book, records = make_book(tmp_path, eta=2)
    version = book.trainer_started(0, -1, 0.0)
    for step in range(4):
        for assignment in book.assign("w", "s", 4, 0.0):
            book.submit(result(assignment, float(assignment.sample_index), version=version), 0.0)
        assert book.queue.take(step, version)
        version = book.claim_version(version)
        book.queue.trained(step, 1)
        records.durable(step + 1)
    [half] = book.assign("w", "s", 1, 0.0)
    book.submit(result(half, 1.0, version=version), 0.0)
    records.commit()
    book.trainer_started(1, 1, 0.0)
    assert book.census().running == 0
    assert records.ledger.account().dropped["rolled_back"] >= 1


def test_what_is_sampled_while_old_batches_are_trained_again_would_be_stale(tmp_path: Path) -> None:
    """More than η batches to be trained again: no train episode is issued until the trainer has caught up."""
    book, _ = make_book(tmp_path, eta=1)
    batches = train_two_steps(book)
    book.trainer_started(0, -1, 0.0)
    assert book.queue.catching_up and book.assign("w", "s", 8, 0.0) == []
    assert take(book, 0, 3) == batches[0]
    assert not book.queue.catching_up


def test_a_torn_spool_costs_the_group_and_is_named(tmp_path: Path) -> None:
    """After a power loss a trajectory may be gone although the ledger has it: its group is dropped as `damaged`."""
    book, records = make_book(tmp_path)
    finish_group(book, (0.0, 1.0))
    a, _ = book.assign("w", "s", 2, 0.0)
    book.submit(result(a, 1.0), 0.0)
    records.commit()
    kill(records)
    for file in (tmp_path / "spool").iterdir():
        file.write_bytes(b"")
    book, records = make_book(tmp_path, same_start=True)
    assert records.ledger.account().dropped == {"damaged": 4}
    assert book.in_flight() == 0


def test_groups_that_are_no_longer_practised_are_dropped_at_a_resume(tmp_path: Path) -> None:
    """The configuration may change: what is begun and not complete goes, what is complete trains."""
    book, records = make_book(tmp_path)
    whole = finish_group(book, (0.0, 1.0))
    book.assign("w", "s", 1, 0.0)
    records.commit()
    kill(records)

    class Other(Counting):
        def practises(self, task: Task) -> bool:
            return False

    book, records = make_book(tmp_path, sampler=Other())
    assert records.ledger.account().dropped == {"no_longer_practised": 1}
    assert book.queue.group_ids == {whole}


def test_drop_rates_count_what_is_too_stale_with_its_steps_and_age(tmp_path: Path) -> None:
    """An attempt ends once, when a batch takes it or it is dropped, in the queue too: staleness hits slow episodes first."""
    book, records = make_book(tmp_path, eta=1)
    finish_group(book, (0.0, 1.0), version=0)
    assert book.drops.row() == {"drops/rate": 0.0}, "it may still become stale"
    for _ in range(2):
        finish_group(book, (0.0, 1.0), version=2)
    assert take(book, 0, 2) is not None
    row = book.drops.row()
    assert (row["drops/rate"], row["drops/reason/stale"]) == pytest.approx((1 / 3, 1 / 3))
    assert records.ledger.account().dropped == {"stale": 2}
    book.queue.trained(0, 1)
    assert book.drops.row() == row


def test_the_ledger_refuses_an_illegal_transition(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assignment = Assignment(Counting().draw(0), 0, 0, 0, Lane.TRAIN, 0, 1.0, 60)
    attempt = records.ledger.issue(assignment, "w", "s", policy=0, at=0.0)
    with pytest.raises(IllegalTransition, match="running: it cannot become trained"):
        records.ledger.end_batch(0, [attempt], skipped=False)
    records.drop([attempt], "test")
    with pytest.raises(IllegalTransition, match="dropped: it cannot become queued"):
        records.keep(attempt, result(assignment, 1.0))
    records.ledger.issue(again := msgspec.structs.replace(assignment, attempt=1), "w", "s", policy=0, at=0.0)
    with pytest.raises(IllegalTransition, match="issued twice"):
        records.ledger.issue(again, "w", "s", policy=0, at=0.0)
