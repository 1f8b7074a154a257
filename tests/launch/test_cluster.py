"""The private Ray: roles run, are restarted within limits, and nothing outlives the cluster.  Real Ray, real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_webrl.errors import UserError
from megatron_webrl.launch import Cluster, RoleDied
from megatron_webrl.processes import marked, spawn

HERE = str(Path(__file__).parent)


def sleeper() -> None:
    """A role with a child of its own."""
    spawn(["sleep", "600"], mark=os.environ["MEGATRON_WEBRL_MARK"])
    time.sleep(600)


async def closes(file: Path) -> None:
    file.with_suffix(".began").touch()
    try:
        await asyncio.sleep(600)
    finally:
        file.write_text("closed")


def leaves() -> None:
    """Ends by itself."""


def fails() -> None:
    raise ValueError("no such thing")


def finds_wrong_input() -> None:
    time.sleep(0.5)
    raise UserError("train_only=x: one clear message")


def pid(directory: Path) -> int:
    return int((directory / "worker-0.pid").read_text())


def wait_for(condition: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


@pytest.mark.e2e
def test_roles_are_restarted_ended_and_leave_nothing(tmp_path: Path) -> None:
    run_id = f"test-{os.getpid()}"
    sys.path.insert(0, HERE)
    os.environ["PYTHONPATH"] = HERE + os.pathsep + os.environ.get("PYTHONPATH", "")
    with Cluster(run_id, tmp_path) as cluster:
        directory = cluster.directory
        cluster.start("worker-0", sleeper, {}, restarts=1)
        wait_for(lambda: len(marked(f"{run_id}/worker-0")) == 1)
        first, orphan = pid(tmp_path), marked(f"{run_id}/worker-0")[0]
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: cluster.check() == [] and pid(tmp_path) != first)
        wait_for(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE)

        cluster.start("store", closes, {"file": tmp_path / "closed"})
        wait_for((tmp_path / "closed.began").exists)
        cluster.stop("store")
        assert (tmp_path / "closed").read_text() == "closed", "an asyncio role is cancelled, not killed"

        cluster.start("engine-0", leaves, {}, may_end=True)
        wait_for(lambda: cluster.check() == ["engine-0"])
        cluster.start("store", leaves, {})
        with pytest.raises(RoleDied, match="store ended too early"):
            wait_for(cluster.check)
        del cluster.roles["store"]

        cluster.start("trainer-0", fails, {})
        with pytest.raises(RoleDied, match=r"trainer-0 died: .*no such thing.*trainer-0\.log"):
            wait_for(cluster.check)
        assert "no such thing" in (tmp_path / "trainer-0.log").read_text()
        del cluster.roles["trainer-0"]

        cluster.start("trainer-0", fails, {})  # what another rank's end does to it, told earlier than its cause
        cluster.start("trainer-1", finds_wrong_input, {})
        with pytest.raises(UserError, match="one clear message"):
            wait_for(cluster.check)
        for name in ("trainer-0", "trainer-1"):
            del cluster.roles[name]

        os.kill(pid(tmp_path), signal.SIGKILL)
        with pytest.raises(RoleDied, match="worker-0"):
            wait_for(lambda: cluster.check() != [])
    assert marked(run_id) == []
    assert not directory.exists()


@pytest.mark.e2e
def test_a_killed_driver_leaves_nothing(tmp_path: Path) -> None:
    run_id = f"test-killed-{os.getpid()}"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; import time, test_cluster; from megatron_webrl.launch import Cluster\n"
        "cluster = Cluster(sys.argv[2], Path(sys.argv[3])).__enter__()\n"
        "cluster.start('worker-0', test_cluster.sleeper, {})\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": HERE + os.pathsep + os.environ.get("PYTHONPATH", "")}
    driver = subprocess.Popen(
        [sys.executable, "-c", code, HERE, run_id, str(tmp_path)], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
    wait_for(lambda: len(marked(f"{run_id}/worker-0")) == 1)
    driver.kill()
    driver.wait(10)
    wait_for(lambda: marked(run_id) == [], 30)
