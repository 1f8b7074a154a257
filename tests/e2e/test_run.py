"""The real loop, driven as a user drives it: real Chromium, SGLang, Ray and Megatron, a tiny model."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from pathlib import Path

import psutil
import pytest
from command_line import REPOSITORY, command, nothing_left, run, wait_for

from megatron_webrl.processes import marked
from megatron_webrl.replay import Ledger
from megatron_webrl.run_directory import newest_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
Demo = tuple[subprocess.CompletedProcess[str], Path]


def metrics(run_dir: Path) -> list[dict[str, float]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps_done(run_dir: Path) -> int:
    return len([row for row in metrics(run_dir) if "ppo_actor/entropy" in row])


def balanced(run_dir: Path) -> dict[str, int]:
    """The account of a run that ended: balanced, nothing in flight.  Returns what was dropped."""
    ledger = Ledger(run_dir / "ledger.sqlite")
    account = ledger.account()
    ledger.close()
    assert account.issued == account.trained + sum(account.dropped.values())
    assert account.in_flight == 0 and account.trained > 0
    return account.dropped


def test_the_demo_runs_to_its_picture(demo_run: Demo) -> None:
    """Demonstrations, warm start, evaluation, GRPO, evaluation: all that the summary promises is there and true."""
    done, run_dir = demo_run
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    account = summary["account"]
    assert account["issued"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"]
    assert summary["trajectories_trained"] == account["trained"] == 4 * 2 * 4
    assert summary["episodes_evaluated"] == 20
    for when in ("before", "after"):
        low, value, high = (summary[f"success_{when}{part}"] for part in ("_low", "", "_high"))
        assert 0 <= low <= value <= high <= 1
    assert 0 <= summary["mean_lag"] <= summary["max_lag"] <= summary["eta"] == 1
    assert set(summary["minutes"]) >= {"setup", "demonstrations", "warm_start", "rl", "evaluation"}
    assert summary["trajectories_per_hour"] > 0
    assert summary["versions"]["sglang"] and summary["versions"]["megatron-core"]
    assert summary["engine_trainer_logprob_max_diff"] <= 1e-4
    for picture in ("success.png", "timeline.png"):
        assert (run_dir / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "Learned: held-out success" in done.stdout
    assert list((run_dir / "wandb").rglob("*.wandb")), "an offline wandb run"
    recorded = sorted((run_dir / "trajectories").glob("group-*/group.json"))
    group = json.loads(recorded[0].read_text())
    assert len(group["trajectories"]) == 4
    step = group["trajectories"][0]["steps"][0]
    assert (recorded[0].parent / "images" / f"{step['images'][0]}.png").exists()
    assert len(step["response_ids"]) == len(step["logprobs"]) == len(step["versions"])
    assert nothing_left(run_dir)


def test_engine_and_trainer_agree_at_step_0_and_after_each_refresh(demo_run: Demo) -> None:
    """Invariants 7 and 8 in float32: |engine − trainer| ≤ 1e-4 on the same tokens, and versions only grow.  (A refresh that
    is over only after the next step began leaves no time for a probe.)"""
    rows = [row for row in metrics(demo_run[1]) if "ppo_actor/entropy" in row]
    assert rows[0]["engine/logprob_tokens"] > 0
    assert max(row["engine/logprob_diff_max"] for row in rows) <= 1e-4
    assert max(row.get("engine/refresh_logprob_diff_max", 0.0) for row in rows) <= 1e-4
    assert any(row.get("refresh/verified") for row in rows), "the first refresh, by checksum"
    versions = [row["run/version"] for row in rows]
    assert versions == sorted(set(versions))


def test_killed_worker_and_engine_are_replaced_and_a_killed_trainer_resumes(demo_run: Demo, small: Path) -> None:
    """Invariants 1, 4, 11: kill -9 of the browser worker, of SGLang and of an engine host: the run goes on; of the trainer:
    --resume."""
    run_dir = small.parent / "killed"
    settings = [
        "train",
        small,
        f"run_dir={run_dir}",
        "evaluation.episodes=0",
        "trainer.steps=100000",
        "wire.transport=tcp",
        "engine.hosts=2",
    ]
    driver = subprocess.Popen(
        command(*settings), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def pid(role: str) -> int:
        return int((run_dir / "logs" / f"{role}.pid").read_text())

    def goes_on(steps: int) -> None:
        before = steps_done(run_dir)
        wait_for(lambda: driver.poll() is not None or steps_done(run_dir) >= before + steps, 240, "further step")
        assert driver.poll() is None, driver.stdout and driver.stdout.read()

    goes_on(3)
    worker, browsers = pid("worker-0"), psutil.Process(pid("worker-0")).children(recursive=True)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: pid("worker-0") != worker, 60, "new worker")
    goes_on(2)
    assert not [b for b in browsers if b.is_running() and b.status() != psutil.STATUS_ZOMBIE], (
        "a browser outlived its worker"
    )

    for role in ("coordinator", "store"):
        before = pid(role)
        os.kill(before, signal.SIGKILL)
        wait_for(lambda role=role, before=before: pid(role) != before, 60, f"new {role}")  # type: ignore[misc]
        goes_on(2)

    identity = json.loads((run_dir / "run.json").read_text())
    (engine,) = [p for p in marked(f"{identity['run_id']}.1/engine-0") if "launch_server" in " ".join(p.cmdline())][:1]
    engine.kill()
    goes_on(2)  # the other engine serves
    host = pid("engine-1")
    os.kill(host, signal.SIGKILL)
    wait_for(lambda: pid("engine-1") != host, 60, "new engine host")
    goes_on(2)

    saved = newest_checkpoint(run_dir)
    assert saved is not None
    os.kill(pid("trainer-0"), signal.SIGKILL)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 1 and "--resume" in output, output
    assert nothing_left(run_dir)

    before = max(row["run/version"] for row in metrics(run_dir))
    trained = steps_done(run_dir)
    more = run(*settings, "--resume", f"trainer.steps={trained + 3}")
    assert more.returncode == 0, more.stdout + more.stderr
    rows = [row for row in metrics(run_dir) if "ppo_actor/entropy" in row]
    assert rows[trained]["run/version"] > before, "a version never repeats"
    assert rows[-1]["step"] == trained + 3
    dropped = balanced(run_dir)
    assert "worker_lost" in dropped
    assert nothing_left(run_dir)


def test_ctrl_c_ends_everything_and_eval_runs_without_a_trainer(demo_run: Demo, small: Path) -> None:
    run_dir = small.parent / "interrupted"
    driver = subprocess.Popen(
        command("train", small, f"run_dir={run_dir}", "evaluation.episodes=0"),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # it is ignored in a shell's background
    )
    wait_for(lambda: (run_dir / "logs" / "engine-0-sglang.log").exists(), 120, "SGLang")
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130 and "interrupted" in output, output
    assert nothing_left(run_dir)

    run_dir, final = small.parent / "eval", small.parent / "demo" / "model_final"
    driver = subprocess.Popen(
        command("eval", small, f"model.path={final}", f"run_dir={run_dir}", "evaluation.episodes=100"),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: driver.poll() is not None or evaluated(run_dir) > 5, 240, "evaluated episode")
    identity = json.loads((run_dir / "run.json").read_text())
    (engine,) = [p for p in marked(f"{identity['run_id']}.1/engine-0") if "launch_server" in " ".join(p.cmdline())][:1]
    engine.kill()  # its successor gets the weights from disk, too
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0 and "of all 100 episodes asked for" in output and "0 faults" in output, output
    assert nothing_left(run_dir)


def evaluated(run_dir: Path) -> int:
    """Episodes of an evaluation that ended, as the ledger has them."""
    try:
        ledger = sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)
        (count,) = ledger.execute("SELECT count(*) FROM attempts WHERE state = 'evaluated'").fetchone()
        ledger.close()
    except sqlite3.Error:  # it is not there yet
        return 0
    return int(count)


def test_a_group_without_its_model_is_one_line(small: Path) -> None:
    done = run("train", small, "model.path=/nowhere", f"run_dir={small.parent / 'none'}")
    assert done.returncode == 2 and not (small.parent / "none").exists()
    assert done.stderr.splitlines() == [
        "megatron-webrl: model.path=/nowhere does not exist: give a Hugging Face directory of a Qwen3-VL"
    ]
