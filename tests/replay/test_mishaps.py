"""What goes wrong at a bad moment: lost replies, late questions, disks that fail in part, screenshots that are gone."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from replay_system import GROUPS, SIZE, Start

from megatron_webrl.errors import UserError
from megatron_webrl.replay import BatchWriter, Records, coordinator, read_batches
from megatron_webrl.replay.keeper import ScreenshotKeeper
from megatron_webrl.replay.ledger import Ledger
from megatron_webrl.replay.spool import Spool
from megatron_webrl.screenshots import fetch
from megatron_webrl.trajectory import Group
from megatron_webrl.wire import RequestFailed
from megatron_webrl.wire.messages import (
    Assignments,
    BeginTraining,
    CheckpointDurable,
    ClaimVersion,
    Done,
    FetchGroups,
    GetAssignments,
    GetStatus,
    Groups,
    Manifest,
    Status,
    StepTrained,
    Take,
    TrainerStarted,
    Version,
)


async def test_one_commit_that_fails_ends_the_run_though_the_next_would_succeed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A COMMIT that finds the disk full rolls back: what was changed is in memory only.  The next start has what was safe."""
    system = start()
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(1)
    before = (await system.ask(GetStatus(), Status)).account
    real = Ledger.commit

    def commit(ledger: Ledger) -> None:
        monkeypatch.setattr(Ledger, "commit", real)
        ledger._changed.clear()
        ledger._db.rollback()
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Ledger, "commit", commit)
    with pytest.raises(RequestFailed, match="disk is full"):
        await system.assign(SIZE)
    with pytest.raises(UserError, match=r"run_dir=.*disk is full.*--resume"):
        await asyncio.wait_for(system.role, 5)
    await system.close()
    again = start()
    assert (await again.ask(GetStatus(), Status)).account == before


async def test_a_spool_that_takes_nothing_more_ends_the_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    system = start()
    await system.ask(BeginTraining(), Done)
    [assignment] = await system.assign(1)

    def full(spool: Spool, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Spool, "append", full)
    with pytest.raises(RequestFailed, match="No space left"):
        await system.finish(assignment, 1.0)
    with pytest.raises(UserError, match=r"run_dir=.*No space left"):
        await asyncio.wait_for(system.role, 5)


async def test_trajectories_that_fill_the_disk_budget_ask_for_a_checkpoint(start: Start) -> None:
    """replay.queue_bytes is in use by what was trained and is in no checkpoint yet."""
    system = start(replay={"queue_bytes": 1200, "eta": 0})
    await system.ask(BeginTraining(), Done)
    version = (await system.ask(TrainerStarted(0, -1), Version)).version
    for step in range(3):
        manifest = Manifest(step, False)
        async with asyncio.timeout(10):
            while not manifest.ready:
                for assignment in await system.assign(1):
                    await system.finish(assignment, float(assignment.sample_index), version)
                manifest = await system.ask(Take(step, version, 0.1), Manifest)
                if manifest.save:
                    await system.ask(CheckpointDurable(step), Done)
        version = (await system.ask(ClaimVersion(version), Version)).version
        await system.ask(StepTrained(step, version, 1, {}), Done)


async def test_all_groups_of_a_batch_are_looked_for_in_the_store(start: Start, tmp_path: Path) -> None:
    """Also those that move up when the ones before them are dropped."""
    system = start()
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(2 * GROUPS)
    for pack in (tmp_path / "run" / "screenshots").glob("*.pack"):
        pack.unlink()
    assert not (await system.ask(Take(0, 0, 0.5), Manifest)).ready
    assert (await system.ask(GetStatus(), Status)).account.dropped == {"images_lost": 2 * GROUPS * SIZE}
    await system.finish_groups(GROUPS)
    manifest = await system.ask(Take(0, 0, 2.0), Manifest)
    groups = (await system.ask(FetchGroups(manifest.group_ids), Groups)).groups
    assert await fetch(system.store, [d for group in groups for d in group.digests], timeout=5)


async def test_screenshots_that_a_power_loss_damaged_cost_their_groups_by_name(start: Start, tmp_path: Path) -> None:
    """Their files are as long as they were."""
    system = start()
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(GROUPS)
    await system.close()
    for pack in (tmp_path / "run" / "screenshots").glob("*.pack"):
        pack.write_bytes(bytes(pack.stat().st_size))
    again = start()
    assert not (await again.ask(Take(0, 0, 0.5), Manifest)).ready
    assert (await again.ask(GetStatus(), Status)).account.dropped == {"images_lost": GROUPS * SIZE}


async def test_a_repeat_is_not_acknowledged_before_the_first_is_on_disk(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = start()
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(GROUPS)
    assert (await system.ask(Take(0, 0, 2.0), Manifest)).ready
    written = threading.Event()
    monkeypatch.setattr(Records, "sync", lambda records: written.wait(10))
    said = [asyncio.create_task(system.ask(StepTrained(0, 1, 1, {}), Done)) for _ in range(2)]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in said)
    written.set()
    await asyncio.gather(*said)


async def test_an_early_take_that_is_heard_late_takes_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    system = start()
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(2 * GROUPS)
    real, calls = ScreenshotKeeper.lacking, []

    async def slow_at_first(keeper: ScreenshotKeeper, digests: list[str]) -> set[str]:
        calls.append(digests)
        if len(calls) == 1:
            await asyncio.sleep(1.0)
        return await real(keeper, digests)

    monkeypatch.setattr(ScreenshotKeeper, "lacking", slow_at_first)
    early = asyncio.create_task(system.ask(Take(0, 0, 2.0), Manifest))
    await asyncio.sleep(0.1)
    assert (await system.ask(Take(0, 0, 2.0), Manifest)).ready
    version = (await system.ask(ClaimVersion(0), Version)).version
    await system.ask(StepTrained(0, version, 1, {}), Done)
    assert not (await early).ready
    assert (await system.ask(Take(1, version, 2.0), Manifest)).ready


async def test_a_coordinator_that_was_stopped_hears_its_workers_before_it_ends_their_leases(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the housekeeping jumps by more than a lease, as after SIGSTOP."""
    system = start(replay={"lease_s": 2.0})
    await system.ask(BeginTraining(), Done)
    running = [assignment.key for assignment in await system.assign(2)]
    real, ahead = coordinator.time.monotonic, [0.0]
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: real() + ahead[0])
    ahead[0] = 5.0
    await asyncio.sleep(1.0)
    reply = await system.ask(GetAssignments("w", "s", 0, running, 0.0), Assignments)
    assert reply.revoked == []


@pytest.mark.parametrize("trained", [False, True])
async def test_a_batch_is_recorded_though_the_coordinator_is_killed_meanwhile(
    trained: bool, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = start(observe={"record_batches": True})
    await system.ask(BeginTraining(), Done)
    await system.finish_groups(2 * GROUPS)
    real, killed = BatchWriter.finish, threading.Event()

    def finish(writer: BatchWriter, version: int, groups: list[Group], lineage: Any) -> Path:
        assert killed.wait(10)
        raise RuntimeError("killed")

    monkeypatch.setattr(BatchWriter, "finish", finish)
    assert (await system.ask(Take(0, 0, 2.0), Manifest)).ready
    version = 1
    if trained:
        version = (await system.ask(ClaimVersion(0), Version)).version
        await system.ask(StepTrained(0, version, 1, {}), Done)
    threading.Timer(0.2, killed.set).start()
    await system.close()
    monkeypatch.setattr(BatchWriter, "finish", real)
    again = start(observe={"record_batches": True})
    await again.ask(StepTrained(0, version, 1, {}), Done)
    assert (await again.ask(Take(1, version, 5.0), Manifest)).ready
    assert read_batches(tmp_path / "run" / "batches")[0].step == 1
