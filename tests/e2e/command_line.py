"""The command line of small real runs, and what must hold after each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_webrl.processes import marked

REPOSITORY = Path(__file__).parents[2]


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
