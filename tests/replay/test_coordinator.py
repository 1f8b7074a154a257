"""The coordinator over its sockets, with the real screenshot store: workers and trainer are the test's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from metrics_page import names_in, names_of

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.errors import UserError
from megatron_webrl.replay import (
    BatchTimeout,
    BatchWriter,
    Coordinator,
    Ledger,
    batch_row,
    decode_state,
    read_batches,
    recorder,
)
from megatron_webrl.screenshots import ScreenshotStore, serve_store
from megatron_webrl.tasks import UniformSampler
from megatron_webrl.trajectory import (
    Assignment,
    AttemptKey,
    Group,
    Outcome,
    Task,
    Trajectory,
    encode_steps,
    image_digest,
)
from megatron_webrl.wire import Client
from megatron_webrl.wire.messages import (
    Assignments,
    BeginTraining,
    Done,
    FetchGroups,
    GetAssignments,
    GetReplayState,
    GetStatus,
    Groups,
    ListUpcoming,
    Manifest,
    PutImages,
    ReplayState,
    Status,
    StepTrained,
    Submitted,
    SubmitTrajectory,
    Take,
    Upcoming,
)

SIZE, GROUPS = 2, 2


class System:
    """A coordinator and its store, and what workers and a trainer ask them."""

    def __init__(self, config: RunConfig, directory: Path, **resume: Any) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.issued: list[Assignment] = []
        self.config = config
        at = {name: f"ipc://{directory}/{name}" for name in ("coordinator", "store")}
        self.coordinator, self.store = (Client(at[name], "run", "test") for name in ("coordinator", "store"))
        role = Coordinator(
            config,
            run_id="run",
            address=at["coordinator"],
            store_address=at["store"],
            log_metrics=lambda step, values: self.rows.append((step, values)),
            **resume,
        )
        self.role = asyncio.create_task(role.run())
        self.roles = [self.role, asyncio.create_task(serve_store(at["store"], "run", 1 << 20))]

    async def ask(self, message: Any, expect: Any) -> Any:
        return await self.coordinator.request(message, timeout=10, expect=expect)

    async def assign(self, slots: int) -> list[Assignment]:
        found = await self.ask(GetAssignments("w", "s", slots, [a.key for a in self.issued], 0.0), Assignments)
        self.issued += found.assignments
        return found.assignments

    async def finish(self, assignment: Assignment, reward: float, version: int = 0) -> Trajectory:
        """One episode with a screenshot of its own."""
        self.issued.remove(assignment)
        data = repr(assignment.key).encode()
        digest = image_digest(data)
        trajectory = Trajectory(
            assignment, Outcome.SUCCESS if reward else Outcome.FAILURE, "x", reward, 1 + assignment.sample_index, 3,
            100 + 10 * assignment.group_id + assignment.sample_index, version, version, [digest], "w", 0.0, 1.0,
            encode_steps([]),
        )  # fmt: skip
        await self.store.request(PutImages({digest: data}), timeout=5, expect=Done)
        assert (await self.ask(SubmitTrajectory(trajectory), Submitted)).accepted
        return trajectory

    async def finish_groups(self, count: int, version: int = 0) -> list[Group]:
        """Whole groups of one success and one failure."""
        groups = []
        for _ in range(count):
            members = await self.assign(SIZE)
            assert len({a.group_id for a in members}) == 1
            done = [await self.finish(a, float(a.sample_index), version) for a in members]
            groups.append(Group(members[0].group_id, members[0].task, done))
        return groups

    async def close(self) -> None:
        for role in self.roles:
            role.cancel()
        await asyncio.gather(*self.roles, return_exceptions=True)
        self.coordinator.close()
        self.store.close()


Start = Callable[..., System]


def configure(directory: Path, **sections: Any) -> RunConfig:
    return validate(
        {
            "run_dir": str(directory / "run"),
            "model": {"path": "m"},
            "tasks": {"names": ["click-test", "focus-text", "enter-text"]},
            "replay": {"group_size": SIZE, "groups_per_step": GROUPS, "eta": 2, **sections.pop("replay", {})},
            **sections,
        },
        "test",
    )


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts systems, each in place of the one before."""
    running: list[System] = []
    (tmp_path / "run").mkdir()

    def begin(resume: dict[str, Any] | None = None, **sections: Any) -> System:
        assert not running or running[-1].role.done()
        running.append(System(configure(tmp_path, **sections), tmp_path, **(resume or {})))
        return running[-1]

    yield begin
    for system in running:
        await system.close()


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
    assert step == 1 and names_in(row) | {"account/dropped/REASON"} == names_of("Run") | {"ours"}, "the page says all"
    assert not (tmp_path / "run" / "batches").exists()


class SlowWriter(BatchWriter):
    """A fake disk: no batch is whole before it may be."""

    finishing, may_finish = threading.Event(), threading.Event()

    def finish(self, version: int, groups: list[Group]) -> Path:
        self.finishing.set()
        assert self.may_finish.wait(10)
        return super().finish(version, groups)


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
    assert not (await system.ask(Take(1, 6, 0.6), Manifest)).ready
    assert read_batches_in(tmp_path) == []
    assert released == []
    slow_disk.may_finish.set()
    assert (await system.ask(Take(1, 6, 5.0), Manifest)).ready
    assert read_batches_in(tmp_path) == [1]
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
        assert names_in(row) == names_of("Without training", "Run")
        assert row["time/collect_s"] > 0 and row["rollout/trajectories_per_hour"] > 0


async def test_rollout_only_does_not_wait_for_ever(start: Start) -> None:
    system = start(rollout_only=True, replay={"take_timeout_s": 0.1})
    await system.ask(BeginTraining(), Done)
    with pytest.raises(BatchTimeout, match=r"no batch of 2 groups in replay\.take_timeout_s=0"):
        await asyncio.wait_for(system.role, 10)


async def take_and_train(system: System, step: int) -> Manifest:
    manifest = await system.ask(Take(step, step, 1.0), Manifest)
    assert manifest.ready
    metrics = {"rollout/response_tokens": 10.0, "rollout/lag_mean": 0.5, "rollout/lag_max": 1.0}
    await system.ask(StepTrained(step, step + 1, 1, metrics), Done)
    return manifest


async def test_a_resumed_coordinator_practises_what_was_begun_and_goes_on_in_order(start: Start) -> None:
    """The tasks of a run that is killed after a checkpoint and resumed from its replay state are those of a run that was
    never killed: first those begun and not trained, oldest first, then what the sampler would have drawn; recent success,
    mixed share and lag go on, too.  What was drawn after the checkpoint is drawn again."""
    system = start(replay={"eta": 2})
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(GROUPS)
    await take_and_train(system, 0)
    (queued,) = await system.finish_groups(1, version=1)
    (running, *_) = await system.assign(1)
    data = (await system.ask(GetReplayState(), ReplayState)).data
    before = await system.ask(GetStatus(), Status)
    assert len(data) < 8192
    await system.assign(5)  # after the checkpoint
    await system.close()

    sampler = UniformSampler(system.config.tasks, system.config.seed)
    unbroken = [sampler.draw() for _ in range(8)]
    assert decode_state(data, "x").begun == unbroken[2:4] == [queued.task, running.task]

    again = start({"resume_step": 1, "resume_replay": data}, replay={"eta": 2})
    status = await again.ask(GetStatus(), Status)
    assert (status.step, status.success, status.mixed_share) == (1, before.success, before.mixed_share)
    assert (status.lag_mean, status.lag_max) == (before.lag_mean, before.lag_max) == (0.5, 1)
    await again.ask(BeginTraining(), Done)
    begun = await again.finish_groups(1)
    once_more = decode_state((await again.ask(GetReplayState(), ReplayState)).data, "x")
    assert once_more.begun == unbroken[2:4], "one is queued, the other still to be practised again"
    begun += await again.finish_groups(5)
    assert [g.task for g in begun] == unbroken[2:]
    assert begun[0].group_id > running.group_id, "group ids never repeat"


async def test_without_a_replay_state_the_task_order_goes_on_after_all_that_was_drawn(
    start: Start, tmp_path: Path
) -> None:
    system = start()
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(3)
    await system.close()
    sampler = UniformSampler(system.config.tasks, system.config.seed)
    unbroken = [sampler.draw() for _ in range(5)]
    BatchWriter(tmp_path / "run" / "batches", 1).finish(0, [])
    again = start({"resume_step": 0})
    assert read_batches_in(tmp_path) == [], "rolled back, though this start records none"
    await again.ask(BeginTraining(), Done)
    assert [g.task for g in await again.finish_groups(2)] == unbroken[3:]


async def test_tasks_that_are_no_longer_practised_are_not_practised_again(start: Start) -> None:
    """The configuration may change at a resume: names and page seeds outside of it are left out."""
    system = start()
    await system.ask(BeginTraining(), Done)
    await system.assign(3 * SIZE)
    data = (await system.ask(GetReplayState(), ReplayState)).data
    await system.close()
    begun = decode_state(data, "x").begun
    assert len(begun) == 3
    end = max(task.seed for task in begun)
    tasks = {"names": ["click-test", "focus-text"], "train_seeds": [0, end]}
    kept = [task for task in begun if task.name in tasks["names"] and task.seed < end]
    again = start({"resume_step": 0, "resume_replay": data}, tasks=tasks)
    await again.ask(BeginTraining(), Done)
    found: list[Task] = [g.task for g in await again.finish_groups(5)]
    assert found[: len(kept)] == kept
    assert {task.name for task in found} <= set(tasks["names"]) and all(task.seed < end for task in found)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data.replace(b"\xa6format\x01", b"\xa6format\x02"),
        lambda data: data.replace(b"\xa6random", b"\xa6rondom"),
    ],
    ids=["torn", "empty", "of another format", "of another sampler"],
)
async def test_a_replay_state_that_cannot_be_used_names_its_checkpoint(
    start: Start, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    system = start()
    data = (await system.ask(GetReplayState(), ReplayState)).data
    await system.close()
    spoiled = spoil(data)
    assert spoiled != data
    with contextlib.closing(Ledger(tmp_path / "run" / "ledger.sqlite")):
        pass
    with pytest.raises(UserError, match=r"checkpoint .*step-000003: replay\.bin: .*move the checkpoint away"):
        start({"resume_step": 3, "resume_replay": spoiled})
