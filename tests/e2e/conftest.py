"""Small real runs: a warm tiny policy, made once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from command_line import REPOSITORY, run

TASKS = ["click-test", "focus-text"]


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
    demo["observe"] = {"record_every": 2, "record_batches": True}
    demo["run_dir"] = str(file.parent / "demo")
    demo["model"] = {"path": str(file.parent / "demo" / "model")}
    file.write_text(yaml.safe_dump(demo))
    return file


@pytest.fixture(scope="session")
def demo_run(small: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The whole demo at a small size; its `model` is the warm start of the other tests."""
    os.environ["WANDB_SILENT"] = "true"
    return run("demo", "--config", small, timeout=600), small.parent / "demo"
