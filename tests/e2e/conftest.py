"""Small real runs: a warm tiny policy, made once, and the command line to run it with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_webrl.processes import marked

REPOSITORY = Path(__file__).parents[2]
TASKS = ["click-test", "focus-text"]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "megatron_webrl", *map(str, arguments)]


def run(*arguments: str | Path, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """The command line, to its end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout, cwd=REPOSITORY)


def nothing_left(run_dir: Path) -> bool:
    """No process carries the mark of any start of the run."""
    identity = json.loads((run_dir / "run.json").read_text())
    return not any(marked(f"{identity['run_id']}.{n + 1}") for n in range(identity["starts"]))


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds:.0f} s"
        time.sleep(0.2)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of a small run, as a file: two tasks, two batches of two groups of four in flight."""
    file = tmp_path_factory.mktemp("e2e") / "small.yaml"
    demo = yaml.safe_load((REPOSITORY / "examples" / "demo.yaml").read_text())
    demo["tasks"] |= {"names": TASKS, "demonstration_seeds": [0, 25]}
    demo["browser"] |= {"slots": 4}
    demo["replay"] = {"group_size": 4, "groups_per_step": 2, "eta": 1, "dynamic_sampling": False}
    demo["trainer"] |= {"steps": 4, "max_minutes": None, "checkpoint_every": 2}
    demo["sft"] |= {"steps": 60}
    demo["evaluation"] = {"episodes": 20}
    demo["observe"] = {"record_every": 2}
    demo["run_dir"] = str(file.parent / "demo")
    demo["model"] = {"path": str(file.parent / "demo" / "model")}
    file.write_text(yaml.safe_dump(demo))
    return file


@pytest.fixture(scope="session")
def demo_run(small: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The whole demo at a small size; its `model` is the warm start of the other tests."""
    os.environ["WANDB_SILENT"] = "true"
    return run("demo", "--config", small, timeout=600), small.parent / "demo"
