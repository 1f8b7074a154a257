"""Half a run at a time: training again from what a real run recorded, and rollouts that only record."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import nothing_left, run
from metrics_page import names_in, names_of

from megatron_webrl.observe import read_jsonl
from megatron_webrl.replay import Ledger, read_batches

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
Demo = tuple[subprocess.CompletedProcess[str], Path]


def trained(row: dict[str, float]) -> dict[str, float]:
    """What a row says of the train step itself."""
    named = names_of("Train step")
    return {name: n for name, n in row.items() if names_in({name}) & named and not name.startswith("time/")}


def test_a_real_run_trained_again_from_its_batches_has_the_same_metrics(demo_run: Demo, small: Path) -> None:
    """Invariant 11's recorded batches: every ppo_actor/* and rollout/* number of every step, bit by bit, and the same model."""
    run_dir = small.parent / "again"
    done = run("train", small, f"train_only={demo_run[1]}/batches", f"run_dir={run_dir}")
    assert done.returncode == 0, done.stdout + done.stderr
    live, again = (read_jsonl(directory / "metrics.jsonl") for directory in (demo_run[1], run_dir))
    assert [row["step"] for row in again] == [row["step"] for row in live] == [1, 2, 3, 4]
    assert [trained(row) for row in again] == [trained(row) for row in live]
    weights = [directory / "model_final" / "model.safetensors" for directory in (demo_run[1], run_dir)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not list(run_dir.glob("logs/engine*")) and not list(run_dir.glob("logs/worker*"))


def test_every_metric_of_a_real_run_is_on_its_page_and_no_other(demo_run: Demo) -> None:
    """docs/metrics.md against the rows of a whole run; what comes with faults only, need not be there."""
    rows = [names_in(row) for row in read_jsonl(demo_run[1] / "metrics.jsonl")]
    named = names_of("Train step", "Trainer's loop", "Run")
    assert set.union(*rows) <= named
    by_luck = {"engine/refresh_logprob_diff_max", "engine/refresh_probes"}  # the next step may have begun before
    assert named - set.union(*rows) <= {"account/dropped/REASON", "drops/reason/REASON"} | by_luck
    assert set.intersection(*rows) >= names_of("Train step") | {"time/step_s", "time/wait_s", "rollout/success"}


def test_rollouts_without_training_then_training_without_rollouts(demo_run: Demo, small: Path) -> None:
    """rollout_only leaves whole batches, a balanced account and no trainer; train_only trains on them."""
    run_dir, after = small.parent / "rollouts", small.parent / "trained"
    done = run("train", small, "rollout_only=true", "trainer.steps=2", f"run_dir={run_dir}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Recorded 2 batches" in done.stdout and not list(run_dir.glob("logs/trainer*"))
    assert nothing_left(run_dir)
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(names_of("Without training") <= names_in(row) <= names_of("Without training", "Run") for row in rows)
    ledger = Ledger(run_dir / "ledger.sqlite")
    account = ledger.account()
    ledger.close()
    assert account.trained == account.in_flight == 0
    assert account.issued == sum(account.dropped.values()) and account.dropped["rollout_only"] == 2 * 2 * 4
    batches = read_batches(run_dir / "batches")
    assert [(b.step, b.version, len(b.group_ids)) for b in batches] == [(1, 0, 2), (2, 0, 2)]
    for batch in batches:
        groups = batch.groups(batch.group_ids)
        assert {t.min_version for g in groups for t in g.trajectories} == {0}
        assert batch.images([digest for g in groups for digest in g.digests])

    done = run("train", small, f"train_only={run_dir}/batches", f"run_dir={after}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_jsonl(after / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["engine/logprob_diff_max"] <= 1e-4, (
        "engine and trainer agree on what was sampled from the same weights"
    )
    assert (after / "model_final" / "model.safetensors").exists()
