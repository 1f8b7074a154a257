"""The book of groups: exactly once, fresh, whole groups, bounded; under random faults (a state machine of hypothesis).

No process is involved: workers, trainer and clock are the test's.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_webrl.config import ReplayConfig
from megatron_webrl.replay.book import Book
from megatron_webrl.replay.ledger import IllegalTransition, Ledger
from megatron_webrl.trajectory import Assignment, Lane, Outcome, Task, Trajectory, encode_steps


class Counting:
    """Tasks 0, 1, 2, …"""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def draw(self) -> Task:
        n = next(self.numbers)
        return Task(f"test/{n}", "test", f"task-{n % 3}", n, 5)


def make_book(directory: Path, **settings_: object) -> tuple[Book, Ledger]:
    ledger = Ledger(directory / "ledger.sqlite")
    config = ReplayConfig.model_validate({"group_size": 2, "groups_per_step": 2, **settings_})
    book = Book(config, ledger, Counting(), temperature=1.0, deadline_s=60, seed=0)
    book.training_allowed = True
    return book, ledger


def result(assignment: Assignment, reward: float, version: int = 0, outcome: Outcome | None = None) -> Trajectory:
    outcome = outcome or (Outcome.SUCCESS if reward else Outcome.FAILURE)
    digests = [f"{assignment.group_id:032x}"]
    return Trajectory(
        assignment, outcome, "test", reward, 1, 3, 5, version, version, digests, "w", 0.0, 1.0, encode_steps([])
    )


def finish_group(book: Book, rewards: tuple[float, float], version: int = 0) -> int:
    """Issue and finish one whole group."""
    a, b = (book.assign("w", "s", 1, 0.0)[0] for _ in range(2))
    assert a.group_id == b.group_id
    assert [book.submit(result(x, r, version)) for x, r in zip((a, b), rewards, strict=True)] == ["accepted"] * 2
    return a.group_id


class Faults(RuleBasedStateMachine):
    """Workers that die, repeat themselves and are late; a trainer that trains, skips and publishes."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.eta = 1
        self.book, self.ledger = make_book(Path(self.directory.name), eta=self.eta, max_attempts=3, lease_s=10)
        self.now = 0.0
        self.version = 0
        self.step = 0
        self.sessions = {"w0": 0, "w1": 0}
        self.held: list[tuple[str, int, Assignment]] = []
        self.retained: set[tuple[int, int, int]] = set()
        self.submitted: list[Trajectory] = []
        self.batches: dict[int, list[int]] = {}

    def teardown(self) -> None:
        self.book.end()
        account = self.ledger.account()
        assert account.in_flight == 0
        assert account.issued == account.trained + sum(account.dropped.values())
        self.ledger.close()
        self.directory.cleanup()

    @rule(worker=st.sampled_from(["w0", "w1"]), slots=st.integers(1, 5))
    def assign(self, worker: str, slots: int) -> None:
        session = self.sessions[worker]
        for assignment in self.book.assign(worker, f"{worker}/{session}", slots, self.now):
            self.held.append((worker, session, assignment))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), outcome=st.sampled_from([*Outcome, None, None, None]))
    def submit(self, data: st.DataObject, reward: float, outcome: Outcome | None) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        _, _, assignment = self.held.pop(index)
        trajectory = result(assignment, reward, self.version, outcome)
        trains = trajectory.outcome in (Outcome.SUCCESS, Outcome.FAILURE)
        retained = trains and self.book.wants(assignment.key)
        reason = self.book.submit(trajectory)
        if retained and reason == "accepted":
            self.retained.add(assignment.key)
        self.submitted.append(trajectory)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        trajectory = data.draw(st.sampled_from(self.submitted))
        before = self.ledger.account()
        if not self.book.wants(trajectory.assignment.key):
            assert self.book.submit(trajectory) in ("repeat", "superseded")
            assert self.ledger.account() == before, "a repeat changes nothing"

    @rule(worker=st.sampled_from(["w0", "w1"]))
    def worker_is_killed_and_comes_back(self, worker: str) -> None:
        self.sessions[worker] += 1
        self.book.renew(worker, f"{worker}/{self.sessions[worker]}", [], self.now)

    @rule(seconds=st.sampled_from([1.0, 11.0]), alive=st.sampled_from(["w0", "w1"]))
    def time_passes(self, seconds: float, alive: str) -> None:
        self.now += seconds
        mine = [a.key for w, s, a in self.held if w == alive and s == self.sessions[alive]]
        self.book.renew(alive, f"{alive}/{self.sessions[alive]}", mine, self.now)
        self.book.expire(self.now)

    @rule()
    def take(self) -> None:
        upcoming = [group.group_id for group in self.book.upcoming(self.version)]
        taken = self.book.take(self.step, self.version)
        if taken is None:
            assert self.step not in self.batches and len(upcoming) < 2
            return
        ids, largest = taken
        assert self.step in self.batches or ids == upcoming, "what was announced is what is taken"
        assert self.batches.setdefault(self.step, ids) == ids, "take is idempotent for a step"
        assert largest <= self.eta
        groups = self.book.fetch(ids)
        assert len(groups) == 2
        for group in groups:
            assert [t.assignment.sample_index for t in group.trajectories] == [0, 1], "whole groups"
            assert all(self.version - t.min_version <= self.eta for t in group.trajectories), "fresh"
            assert len({t.reward for t in group.trajectories}) > 1, "no group without variance"

    @precondition(lambda self: self.step in self.batches)
    @rule(updates=st.integers(0, 2))
    def train(self, updates: int) -> None:
        for _ in range(2):  # a repeat changes nothing
            self.book.trained(self.step, updates)
        self.step += 1
        self.version += updates > 0

    @precondition(lambda self: self.step in self.batches)
    @rule()
    def discard(self) -> None:
        trained = self.ledger.account().trained
        for _ in range(2):  # a repeat changes nothing
            self.book.discard(self.step, "rollout_only")
        assert self.ledger.account().trained == trained
        self.step += 1

    @invariant()
    def what_was_begun_and_not_ended_is_known(self) -> None:
        assert len(self.book.begun_tasks()) == sum(self.book.census())

    @invariant()
    def the_account_balances(self) -> None:
        account = self.ledger.account()
        assert account.issued == account.trained + sum(account.dropped.values()) + account.in_flight
        assert account.in_flight == self.book.in_flight()
        assert account == self.ledger.account(recount=True)

    @invariant()
    def admission_is_bounded(self) -> None:
        assert sum(self.book.census()) <= (self.eta + 1) * 2

    @invariant()
    def screenshots_are_retained_for_just_what_is_held(self) -> None:
        freed, self.book.freed = self.book.freed, []
        self.retained.difference_update(freed)
        held = {
            t.assignment.key
            for g in (*self.book._queued.values(), *self.book._in_training.values())
            for t in g.trajectories
        }
        held |= {t.assignment.key for g in self.book._open.values() for t in g.results.values()}
        assert self.retained == held


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_one_slot_with_whole_groups_works(tmp_path: Path) -> None:
    book, _ = make_book(tmp_path, group_size=8, groups_per_step=1, eta=0)
    rewards = []
    for i in range(8):
        (assignment,) = book.assign("w", "s", 1, 0.0)
        assert (assignment.group_id, assignment.sample_index) == (0, i)
        rewards.append(float(i % 2))
        book.submit(result(assignment, rewards[-1]))
    assert book.take(0, 0) == ([0], 0)
    assert book.assign("w", "s", 1, 0.0) == [], "strictly synchronous: nothing begins while the batch trains"
    book.trained(0, 1)
    assert book.assign("w", "s", 1, 0.0)[0].group_id == 1


def test_eta_zero_with_dynamic_sampling_does_not_deadlock(tmp_path: Path) -> None:
    book, ledger = make_book(tmp_path, eta=0)
    for _ in range(5):
        finish_group(book, (1.0, 1.0))
    assert ledger.account().dropped == {"zero_variance": 10}
    mixed = [finish_group(book, (0.0, 1.0)) for _ in range(2)]
    assert book.take(0, 0) == (mixed, 0)


def test_stale_groups_are_dropped_when_a_batch_is_taken(tmp_path: Path) -> None:
    book, ledger = make_book(tmp_path, eta=1)
    finish_group(book, (0.0, 1.0), version=0)
    fresh = [finish_group(book, (0.0, 1.0), version=2) for _ in range(2)]
    assert book.take(0, 2) == (fresh, 0)
    assert ledger.account().dropped == {"stale": 2}


def test_a_skipped_step_is_no_training(tmp_path: Path) -> None:
    book, ledger = make_book(tmp_path)
    for _ in range(2):
        finish_group(book, (0.0, 1.0))
    assert book.take(0, 0) is not None
    book.trained(0, 0)
    assert ledger.account().dropped == {"step_skipped": 4}
    assert sum(book.census()) == 0


def test_evaluation_goes_first_and_faults_count_as_episodes(tmp_path: Path) -> None:
    book, ledger = make_book(tmp_path, max_attempts=2)
    tasks = [Task(f"e/{i}", "test", "held-out", i, 5) for i in range(3)]
    book.begin_evaluation("before", tasks, 0.0)
    episodes = book.assign("w", "s", 8, 0.0)
    assert [(e.lane, e.task, e.temperature) for e in episodes] == [(Lane.EVAL, t, 0.0) for t in tasks]
    assert book.submit(result(episodes[0], 1.0)) == "accepted"
    assert book.submit(result(episodes[1], 0.0)) == "accepted"
    assert book.submit(result(episodes[2], 0.0, outcome=Outcome.FAULT)) == "accepted"
    (again,) = book.assign("w", "s", 8, 0.0)
    assert (again.task, again.attempt) == (tasks[2], 1)
    book.submit(result(again, 0.0, outcome=Outcome.FAULT))
    state = book.evaluation("before")
    assert (state.finished, state.successes, state.faults) == (3, 1, 1)
    assert state.by_task == {"held-out": [1, 3]}
    assert ledger.account().issued == 0, "the account is of the train lane"


def test_a_resumed_ledger_goes_on_with_new_ids_and_versions_and_rolls_back(tmp_path: Path) -> None:
    book, ledger = make_book(tmp_path)
    for step in range(2):
        for _ in range(2):
            finish_group(book, (0.0, 1.0))
        assert book.take(step, step) is not None
        book.trained(step, 1)
    book.assign("w", "s", 1, 0.0)
    assert [ledger.claim_version() for _ in range(3)] == [0, 1, 2]
    ledger.close()

    again = Ledger(tmp_path / "ledger.sqlite")
    again.end_in_flight("lost_at_restart")
    again.roll_back(1)  # the checkpoint holds step 0 only
    account = again.account()
    assert (account.trained, account.dropped, account.in_flight) == (4, {"lost_at_restart": 1, "rolled_back": 4}, 0)
    assert again.next_group_id() == 5
    assert again.claim_version() == 3, "a version never repeats"


def test_the_ledger_refuses_an_illegal_transition(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assignment = Assignment(Counting().draw(), 0, 0, 0, Lane.TRAIN, 0, 1.0, 60)
    ledger.issue(assignment)
    with pytest.raises(IllegalTransition, match="running, not in_training"):
        ledger.train([assignment.key])
    ledger.drop([assignment.key], "test")
    with pytest.raises(IllegalTransition, match="dropped, not running"):
        ledger.queue([assignment.key])
