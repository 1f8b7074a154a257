"""Invariant 11, live: with one slot, η = 0 and (nearly) greedy decoding a run whose coordinator and trainer are killed, and
which is resumed from a checkpoint older than its last step, trains the same batches with the same losses as one that nobody
touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import REPOSITORY, command, nothing_left, run, wait_for

from megatron_webrl.replay import read_batches

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
STEPS = 5


def settings(small: Path, run_dir: Path) -> list[Any]:
    """RAFT++, since greedy episodes of one page are all alike: no group would have a signal otherwise."""
    return [
        "train", small, f"run_dir={run_dir}", "evaluation.episodes=0", f"trainer.steps={STEPS}", "sampling.temperature=0.01",
        "browser.slots=1", "replay.eta=0", "replay.group_size=2", "algorithm.objective=raft++", "observe.trace=false",
        "trainer.checkpoint_every=2", "algorithm.constant_horizon=null", "trainer.max_logprob_diff=0.01",
        "trainer.mean_logprob_diff=0.01",
    ]  # fmt: skip


def rows_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The last row of each train step."""
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["step"]: row for row in rows if "ppo_actor/entropy" in row}


def test_a_killed_and_resumed_run_trains_what_an_unbroken_one_trains(demo_run: Any, small: Path) -> None:
    whole, broken = small.parent / "unbroken", small.parent / "broken"
    done = run(*settings(small, whole))
    assert done.returncode == 0, done.stdout + done.stderr

    driver = subprocess.Popen(
        command(*settings(small, broken)), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def until(step: int) -> None:
        wait_for(lambda: driver.poll() is not None or step in rows_of(broken), 240, f"step {step}")
        assert driver.poll() is None, driver.stdout and driver.stdout.read()

    def kill(role: str) -> None:
        os.kill(int((broken / "logs" / f"{role}.pid").read_text()), signal.SIGKILL)

    until(1)
    kill("coordinator")
    until(3)  # one further than the checkpoint
    kill("trainer-0")
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 1 and "--resume" in output, output
    assert nothing_left(broken)
    again = run(*settings(small, broken), "--resume")
    assert again.returncode == 0, again.stdout + again.stderr

    rows, same = rows_of(broken), rows_of(whole)
    assert sorted(rows) == sorted(same) == list(range(1, STEPS + 1))
    batches, expected = (read_batches(run_dir / "batches") for run_dir in (broken, whole))
    assert [batch.group_ids for batch in batches] == [batch.group_ids for batch in expected]
    for step, row in same.items():
        for name in ("ppo_actor/update/actor_loss/avg", "ppo_actor/grad_norm", "ppo_actor/entropy", "rollout/lag_max"):
            assert rows[step][name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), (step, name)
