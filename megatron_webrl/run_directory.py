"""Where a run's checkpoints lie.  Imports nothing heavy: the driver asks before any process starts."""

from __future__ import annotations

from pathlib import Path


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint that holds `step` finished train steps."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def checkpoints(run_dir: Path) -> list[Path]:
    """Whole checkpoints, oldest first (saving renames at the end, so one with its final name is whole)."""
    return sorted((run_dir / "checkpoints").glob("step-[0-9]*[0-9]"))


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole checkpoint."""
    return next(reversed(checkpoints(run_dir)), None)


def checkpoint_step(checkpoint: Path) -> int:
    """Finished train steps that a checkpoint holds."""
    return int(checkpoint.name.removeprefix("step-"))
