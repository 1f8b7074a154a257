"""The coordinator over its sockets, with the real screenshot store: workers and trainer are the test's."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from pathlib import Path

import pytest
from metrics_page import names_in, names_of
from replay_system import GROUPS, SIZE, Start, System

from megatron_webrl.errors import UserError
from megatron_webrl.replay import (
    BatchTimeout,
    BatchWriter,
    Records,
    batch_row,
    coordinator,
    read_batches,
    recorder,
)
from megatron_webrl.screenshots import ScreenshotStore
from megatron_webrl.trajectory import (
    AttemptKey,
    Group,
    Task,
)
from megatron_webrl.wire import RequestFailed
from megatron_webrl.wire.messages import (
    Assignments,
    BeginTraining,
    CheckpointDurable,
    ClaimVersion,
    Done,
    EvaluationProgress,
    EvaluationState,
    FetchGroups,
    GetAssignments,
    GetStatus,
    Groups,
    Lacking,
    LackingImages,
    ListUpcoming,
    Manifest,
    StartEvaluation,
    Status,
    StepTrained,
    Submitted,
    SubmitTrajectory,
    Take,
    TrainerStarted,
    Upcoming,
    Version,
)


async def test_a_manifest_tells_what_its_groups_cost_and_the_batch_is_recorded_before_the_run_finishes(
    start: Start, tmp_path: Path
) -> None:
    """costs: Σ tokens of each group's trajectories, the same when asked again; with observe.record_batches the batch on
    disk is what the trainer fetched, screenshots too, once it is told that it finished."""
    system = start(observe={"record_batches": True}, trainer={"steps": 1})
    await system.ask(BeginTraining(), Done)
    groups = await system.finish_groups(GROUPS, version=5)
    manifest = await system.ask(Take(0, 5, 1.0), Manifest)
    assert manifest.ready
    assert manifest.costs == [sum(t.tokens for t in g.trajectories) for g in groups]
    assert await system.ask(Take(0, 5, 1.0), Manifest) == manifest
    fetched = (await system.ask(FetchGroups(manifest.group_ids), Groups)).groups
    await system.ask(StepTrained(0, 6, 1, {}), Done)
    assert (await system.ask(Take(1, 6, 5.0), Manifest)).finished
    (batch,) = read_batches(tmp_path / "run" / "batches")
    assert (batch.step, batch.version, batch.group_ids, batch.costs) == (1, 5, manifest.group_ids, manifest.costs)
    assert batch.groups(batch.group_ids) == fetched == groups
    digests = [d for g in groups for d in g.digests]
    assert set(batch.images(digests)) == set(digests)


async def test_a_row_has_the_metrics_of_the_run_and_nothing_is_recorded_unless_it_is_asked_for(
    start: Start, tmp_path: Path
) -> None:
    system = start()
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(GROUPS, version=5)
    assert (await system.ask(Take(0, 5, 1.0), Manifest)).ready
    await system.ask(StepTrained(0, 6, 1, {"ours": 1.0}), Done)
    ((step, row),) = system.rows
    nothing_dropped = {"account/dropped/REASON", "drops/reason/REASON"}
    assert step == 1 and names_in(row) | nothing_dropped == names_of("Run") | {"ours"}, "the page says all"
    assert not (tmp_path / "run" / "batches").exists()


class SlowWriter(BatchWriter):
    """A fake disk: no batch is whole before it may be."""

    finishing, may_finish = threading.Event(), threading.Event()

    def finish(self, version: int, groups: list[Group], lineage: tuple[tuple[int, int], ...]) -> Path:
        self.finishing.set()
        assert self.may_finish.wait(10)
        return super().finish(version, groups, lineage)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> type[SlowWriter]:
    SlowWriter.finishing.clear()
    SlowWriter.may_finish.clear()
    monkeypatch.setattr(recorder, "BatchWriter", SlowWriter)
    return SlowWriter


async def test_a_slow_disk_holds_back_the_next_batch_and_not_the_trainer(
    start: Start, tmp_path: Path, slow_disk: type[SlowWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """StepTrained is acknowledged at once; until the batch is whole its screenshots stay and no other is taken."""
    released: list[AttemptKey] = []
    release = ScreenshotStore.release
    monkeypatch.setattr(ScreenshotStore, "release", lambda store, keys: (released.extend(keys), release(store, keys)))
    system = start(observe={"record_batches": True})
    await system.ask(BeginTraining(), Done)
    groups = await system.finish_groups(2 * GROUPS, version=5)
    manifest = await system.ask(Take(0, 5, 1.0), Manifest)
    await system.ask(StepTrained(0, 6, 1, {}), Done)
    await system.ask(CheckpointDurable(1), Done)
    assert not (await system.ask(Take(1, 6, 1.2), Manifest)).ready
    assert read_batches_in(tmp_path) == []
    assert released == []
    slow_disk.may_finish.set()
    assert (await system.ask(Take(1, 6, 5.0), Manifest)).ready
    assert 1 in read_batches_in(tmp_path)
    trained = [t.assignment.key for g in groups if g.group_id in manifest.group_ids for t in g.trajectories]
    async with asyncio.timeout(10):
        while set(released) != set(trained):
            await system.ask(GetStatus(), Status)


async def test_a_run_that_ends_while_a_batch_is_written_waits_for_the_writer(
    start: Start, tmp_path: Path, slow_disk: type[SlowWriter]
) -> None:
    """What is given up is not removed under the hands of the thread that writes it."""
    system = start(observe={"record_batches": True})
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(GROUPS, version=5)
    assert (await system.ask(Take(0, 5, 1.0), Manifest)).ready
    assert await asyncio.to_thread(slow_disk.finishing.wait, 10)
    threading.Timer(0.2, slow_disk.may_finish.set).start()
    await system.close()
    assert [file.name for file in (tmp_path / "run" / "batches").iterdir()] == ["step-000001"]
    assert read_batches_in(tmp_path) == [1]


def read_batches_in(directory: Path) -> list[int]:
    """Steps of the whole batches."""
    with contextlib.suppress(UserError):
        return [batch.step for batch in read_batches(directory / "run" / "batches")]
    return []


@pytest.mark.parametrize("trained", [False, True])
async def test_a_disk_that_takes_no_batch_ends_the_run(start: Start, tmp_path: Path, trained: bool) -> None:
    """Also if the step ends, and another batch is asked for, before anybody looked: none is taken in its place."""
    (tmp_path / "run" / "batches").write_text("a file")
    system = start(observe={"record_batches": True})
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(2 * GROUPS, version=5)
    assert (await system.ask(Take(0, 5, 1.0), Manifest)).ready
    if trained:
        await system.ask(StepTrained(0, 6, 1, {}), Done)
        assert not (await system.ask(Take(1, 6, 0.0), Manifest)).ready
    with pytest.raises(UserError, match=r"observe\.record_batches: the batch of step 1 .*Not a directory"):
        await asyncio.wait_for(system.role, 10)


async def test_upcoming_is_what_a_batch_would_be_cut_from(start: Start) -> None:
    """Whole groups only, the oldest first, at most B, none too stale for that version; asking changes nothing."""
    system = start()
    await system.ask(BeginTraining(), Done)

    async def upcoming(version: int) -> list[tuple[int, list[str]]]:
        return (await system.ask(ListUpcoming(version), Upcoming)).groups

    (stale,) = await system.finish_groups(1, version=0)
    begun = await system.assign(1)
    assert await upcoming(2) == [(stale.group_id, stale.digests)]
    last = await system.assign(SIZE - 1)
    assert await upcoming(3) == [], "stale, and begun"
    assert {a.group_id for a in begun + last} == {1}
    second = [await system.finish(a, float(a.sample_index), 3) for a in begun + last]
    third, _ = await system.finish_groups(2, version=3)
    expected = [(1, [d for t in second for d in t.digests]), (third.group_id, third.digests)]
    for _ in range(2):
        assert await upcoming(3) == expected
    manifest = await system.ask(Take(0, 3, 1.0), Manifest)
    assert manifest.group_ids == [group_id for group_id, _ in expected]


async def test_rollout_only_records_batches_and_ends(start: Start, tmp_path: Path) -> None:
    """No trainer asks: batches are taken by the same rules, recorded with their screenshots, and their groups leave the
    account as `rollout_only`; after trainer.steps batches the run is finished and begins nothing more."""
    system = start(rollout_only=True, trainer={"steps": 2}, replay={"eta": 1, "dynamic_sampling": False})
    await system.ask(BeginTraining(), Done)
    groups = []
    async with asyncio.timeout(20):
        while not (status := await system.ask(GetStatus(), Status)).finished:
            if (
                len(groups) < 2 * GROUPS
                and status.running_groups + status.queued_groups + status.in_training_groups < 4
            ):
                groups += await system.finish_groups(1)
            await asyncio.sleep(0.02)
    assert status.step == 2
    assert status.account.dropped == {"rollout_only": 2 * GROUPS * SIZE}
    assert status.account.issued == status.account.trained + sum(status.account.dropped.values())
    assert await system.assign(4) == []
    batches = read_batches(tmp_path / "run" / "batches")
    assert [(b.step, b.version, b.group_ids) for b in batches] == [(1, 0, [0, 1]), (2, 0, [2, 3])]
    for batch, (step, row) in zip(batches, system.rows, strict=True):
        recorded = batch.groups(batch.group_ids)
        assert recorded == groups[GROUPS * (step - 1) : GROUPS * step]
        assert set(batch.images([d for g in recorded for d in g.digests]))
        expected = {
            "rollout/reward": 0.5,
            "rollout/batch_success": 0.5,
            "rollout/batch_mixed_share": 1.0,
            "rollout/steps_success": 2.0,
            "rollout/steps_failure": 1.0,
            "rollout/response_tokens": 12.0,
            "rollout/response_tokens_per_step": 2.0,
        }
        assert batch_row(recorded) == expected and expected.items() <= row.items()
        assert names_in(row) | {"drops/reason/REASON"} == names_of("Without training", "Run")
        assert row["time/collect_s"] > 0 and row["rollout/trajectories_per_hour"] > 0


async def test_rollout_only_does_not_wait_for_ever(start: Start) -> None:
    system = start(rollout_only=True, replay={"take_timeout_s": 0.1})
    await system.ask(BeginTraining(), Done)
    with pytest.raises(BatchTimeout, match=r"no batch of 2 groups in replay\.take_timeout_s=0"):
        await asyncio.wait_for(system.role, 10)


async def train(system: System, step: int, version: int) -> tuple[Manifest, int]:
    """Take a batch for `version`, train, publish."""
    manifest = await system.ask(Take(step, version, 1.0), Manifest)
    assert manifest.ready
    published = (await system.ask(ClaimVersion(version), Version)).version
    metrics = {"rollout/response_tokens": 10.0, "rollout/lag_mean": 0.5, "rollout/lag_max": 1.0}
    await system.ask(StepTrained(step, published, 1, metrics), Done)
    return manifest, published


async def test_a_coordinator_that_is_started_again_goes_on_where_it_stood(start: Start) -> None:
    """Same start of the run: phase, evaluation, leases, queue, the batch in training; the worker's next heartbeat renews its
    leases, results are taken that were begun before, a repeat is a repeat, and the trainer's question has the same answer."""
    system = start()
    assert (await system.ask(TrainerStarted(0, -1), Version)).version == 0
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(2 * GROUPS)
    manifest, version = await train(system, 0, 0)
    (group,) = await system.finish_groups(1, version=1)
    running = await system.assign(SIZE)
    manifest = await system.ask(Take(1, version, 1.0), Manifest)
    assert manifest.ready
    before = await system.ask(GetStatus(), Status)
    await system.close()

    again = start()
    again.issued = system.issued
    after = await again.ask(GetStatus(), Status)
    for name in ("step", "version", "running", "running_groups", "queued_groups", "in_training_groups", "account", "lag_mean",
                 "lag_max", "trajectories", "queue_bytes"):  # fmt: skip
        assert getattr(after, name) == getattr(before, name), name
    assert (after.minutes > 0) and after.success == before.success
    assert await again.ask(Take(1, version, 1.0), Manifest) == manifest
    assert len((await again.ask(FetchGroups(manifest.group_ids), Groups)).groups) == GROUPS
    member = group.trajectories[0]
    assert (await again.ask(SubmitTrajectory(member, "w", "s"), Submitted)).reason == "repeat"
    assert await again.assign(0) == [] and [a.key for a in again.issued] == [a.key for a in running]
    for assignment in running:
        await again.finish(assignment, float(assignment.sample_index), 1)
    assert (await again.ask(GetStatus(), Status)).account.issued == before.account.issued


async def test_a_resumed_run_trains_what_was_rolled_back_and_then_what_was_queued(start: Start, tmp_path: Path) -> None:
    """Another start of the run, from the checkpoint after step 1, when two steps were trained: batch, order and screenshots of
    the second come again, the run's numbers go on, and a version is never used twice."""
    system = start()
    version = (await system.ask(TrainerStarted(0, -1), Version)).version
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(2 * GROUPS)
    first, version = await train(system, 0, version)
    await system.ask(CheckpointDurable(1), Done)
    second, version = await train(system, 1, version)
    queued = await system.finish_groups(GROUPS, version=2)
    begun = await system.assign(1)
    before = await system.ask(GetStatus(), Status)
    await system.close()

    again = start({"run_id": "run.2"})
    status = await again.ask(GetStatus(), Status)
    assert (status.minutes, status.version) == (0, -1)
    assert (await again.ask(TrainerStarted(1, 1), Version)).version == 3
    await again.ask(BeginTraining(), Done)
    status = await again.ask(GetStatus(), Status)
    account = status.account
    assert status.step == 1 and account.issued == before.account.issued
    assert account.trained == SIZE * GROUPS and account.dropped == {"lost_at_restart": 1}
    manifest, version = await train(again, 1, 3)
    assert (manifest.group_ids, manifest.costs) == (second.group_ids, second.costs)
    assert not set(first.group_ids) & set(second.group_ids)
    manifest = await again.ask(Take(2, version, 1.0), Manifest)
    assert manifest.ready and sorted(manifest.group_ids) == [g.group_id for g in queued]
    assert manifest.lineage == ((0, 0), (3, 2)), "3 has the position of 1"
    digests = [d for g in (await again.ask(FetchGroups(manifest.group_ids), Groups)).groups for d in g.digests]
    lacking = await again.store.request(LackingImages(digests), timeout=5, expect=Lacking)
    assert digests and lacking.digests == []
    (missing,) = await again.assign(1)
    assert missing.key == (begun[0].group_id, begun[0].sample_index, 1), "oldest first: the member that was lost"


async def test_a_slot_is_refilled_by_the_reply_to_its_result(start: Start) -> None:
    system = start()
    await system.ask(BeginTraining(), Done)
    (first,) = await system.assign(1)
    trajectory = await system.finish(first, 1.0, more=True)
    [second] = system.following
    assert second.sample_index == 1
    for _ in range(3):  # the reply was lost: the trajectory is repeated, and so are heartbeats
        reply = await system.ask(SubmitTrajectory(trajectory, "w", "s", more=True), Submitted)
        assert (reply.reason, reply.assignments) == ("repeat", []), "the slot has its next attempt already"
        unheard = await system.ask(GetAssignments("w", "s", 0, [], 0.0), Assignments)
        assert unheard.assignments == [second], "the same again, until it is heard of"
    status = await system.ask(GetStatus(), Status)
    assert (status.running, status.account.issued, status.account.dropped) == (1, 2, {})
    await system.ask(GetAssignments("w", "s", 0, [second.key], 0.0), Assignments)
    assert (await system.ask(GetAssignments("w", "s", 0, [], 0.0), Assignments)).assignments == []
    assert (await system.ask(GetStatus(), Status)).account.dropped == {"abandoned": 1}, "given up by the worker"


async def test_an_earlier_session_of_a_worker_that_is_heard_late_changes_nothing(start: Start) -> None:
    system = start()
    await system.ask(BeginTraining(), Done)
    [a] = (await system.ask(GetAssignments("w", "2", 1, [], 0.0), Assignments)).assignments
    late = await system.ask(GetAssignments("w", "1", 1, [(7, 0, 0)], 0.0), Assignments)
    assert (late.assignments, late.revoked) == ([], [(7, 0, 0)])
    assert (await system.ask(GetAssignments("w", "2", 0, [a.key], 0.0), Assignments)).revoked == []


async def test_those_who_wait_are_served_in_their_order(start: Start) -> None:
    system = start()
    waiting = [asyncio.create_task(system.ask(GetAssignments(f"w{n}", "s", 1, [], 5.0), Assignments)) for n in range(3)]
    await asyncio.sleep(0.3)
    await system.ask(BeginTraining(), Done)
    replies = await asyncio.gather(*waiting)
    assert [[(a.group_id, a.sample_index) for a in r.assignments] for r in replies] == [[(0, 0)], [(0, 1)], [(1, 0)]]


async def test_a_group_whose_screenshots_the_store_lost_is_dropped_by_name(start: Start, tmp_path: Path) -> None:
    system = start()
    await system.ask(BeginTraining(), Done)
    lost, *_ = await system.finish_groups(GROUPS)
    screenshot = repr(lost.trajectories[0].assignment.key).encode()
    (pack,) = (p for p in (tmp_path / "run" / "screenshots").glob("*.pack") if p.read_bytes() == screenshot)
    pack.unlink()
    assert not (await system.ask(Take(0, 0, 0.5), Manifest)).ready
    status = await system.ask(GetStatus(), Status)
    assert status.account.dropped == {"images_lost": SIZE}
    await system.finish_groups(1)
    assert (await system.ask(Take(0, 0, 1.0), Manifest)).ready


async def test_screenshots_go_with_the_durable_checkpoint_or_the_drop(start: Start) -> None:
    system = start()
    await system.ask(BeginTraining(), Done)
    trained = await system.finish_groups(GROUPS)
    (a, b) = await system.assign(SIZE)
    dropped = [await system.finish(x, 1.0) for x in (a, b)]

    async def there(digests: list[str]) -> bool:
        return (await system.store.request(LackingImages(digests), timeout=5, expect=Lacking)).digests == []

    async def gone(digests: list[str]) -> None:
        async with asyncio.timeout(5):
            while await there(digests[:1]):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    await gone([d for t in dropped for d in t.digests])
    await train(system, 0, 0)
    digests = [d for g in trained for d in g.digests]
    await asyncio.sleep(1.2)
    assert await there(digests), "trained, and not final yet"
    await system.ask(CheckpointDurable(1), Done)
    await gone(digests)


async def test_a_crowded_store_begins_no_groups_and_asks_for_a_checkpoint(start: Start) -> None:
    """Images of 9 bytes: two groups take more than four fifths of 40; the third is not begun until a checkpoint frees them."""
    system = start({"store_bytes": 40})
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(GROUPS)
    await asyncio.sleep(1.2)
    assert await system.assign(1) == []
    _, version = await train(system, 0, 0)
    manifest = await system.ask(Take(1, version, 5.0), Manifest)
    assert manifest.save and not manifest.ready
    await system.ask(CheckpointDurable(1), Done)
    async with asyncio.timeout(10):
        while not await system.assign(1):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_bounds_that_leave_no_way_on_end_the_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "STUCK_S", 0.5)
    system = start(replay={"queue_bytes": 10})
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(1)
    with pytest.raises(
        UserError, match=r"replay\.queue_bytes=10 is full with 1 queued groups, fewer than .*groups_per_step=2"
    ):
        await asyncio.wait_for(system.role, 10)


async def test_an_evaluation_goes_on_after_the_coordinator_was_killed(start: Start) -> None:
    system = start()
    tasks = [Task(f"e/{i}", "test", "held-out", i, 5) for i in range(2)]
    await system.ask(StartEvaluation("before", tasks, 0.6, top_p=0.9, top_k=20), Done)
    episodes = await system.assign(2)
    assert {(e.temperature, e.top_p, e.top_k) for e in episodes} == {(0.6, 0.9, 20)}
    await system.finish(episodes[0], 1.0)
    await system.close()
    again = start()
    again.issued = system.issued
    await again.finish(episodes[1], 0.0)
    state = await again.ask(EvaluationProgress("before"), EvaluationState)
    assert (state.total, state.finished, state.successes, state.faults) == (2, 2, 1, 0)


async def test_a_disk_that_takes_nothing_more_ends_the_run_and_nothing_is_called_safe(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = start()
    await system.ask(BeginTraining(), Done)
    [assignment] = await system.assign(1)

    def full(records: Records) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Records, "commit", full)
    with pytest.raises(RequestFailed, match="disk is full"):
        await system.finish(assignment, 1.0)
    with pytest.raises(UserError, match=r"run_dir=.*disk is full.*--resume"):
        await asyncio.wait_for(system.role, 5)
    monkeypatch.undo()
    await system.close()
    again = start()
    account = (await again.ask(GetStatus(), Status)).account
    assert (account.issued, account.in_flight) == (1, 1), "as before the trajectory came"
