"""A run's directory: who may write to it, where its checkpoints lie, and what of them goes.  Imports nothing heavy: the
driver asks before any process starts."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron_webrl.errors import UserError

_locked: set[Path] = set()
"""Directories that this process holds."""


def check_writable(key: str, directory: Path) -> None:
    """Raises UserError, naming the key, if `directory` is there and cannot be written to, or cannot be made."""
    nearest = directory.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise UserError(f"{key}={directory}: {nearest} is a file: give a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{key}={directory}: {nearest} cannot be written to by this user: give another directory")


def replace_file(file: Path, text: str) -> None:
    """Write a small file: whole, or as it was."""
    new = file.with_name(f".{file.name}.partial")
    new.write_text(text)
    os.replace(new, file)


def _lock_file(run_dir: Path) -> IO[str]:
    """`run_dir`/lock, held while it is open."""
    while True:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / "lock", "a")  # noqa: SIM115 (the caller closes it)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(run_dir / "lock")):
                return file
        except BlockingIOError:
            file.close()
            raise UserError(
                f"run_dir={run_dir} is used by a run that goes on: give another run_dir, or end it"
            ) from None
        except FileNotFoundError:
            pass
        file.close()  # its holder has renamed the directory meanwhile: lock the one that is here now


def hold(file: Path, key: str, *, wait_s: float) -> IO[str]:
    """`file`, locked while it is open, for one process of a run that must be alone; its predecessor may take up to `wait_s`
    seconds to end.  Raises UserError naming the key of its directory if another holds it still."""
    opened = file.open("a")
    give_up = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return opened
        except BlockingIOError:
            if time.monotonic() > give_up:
                opened.close()
                raise UserError(
                    f"{key}={file.parent} is in use by another process: end that, or give another"
                ) from None
        time.sleep(0.1)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """`run_dir`, made if it is not there, for this process alone; a process that holds it may ask again.

    Raises UserError if another process holds it."""
    check_writable("run_dir", run_dir)
    held = run_dir.resolve()
    if held in _locked:
        yield
        return
    with _lock_file(run_dir):
        _locked.add(held)
        try:
            yield
        finally:
            _locked.discard(held)


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint that holds `step` finished train steps."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def checkpoints(run_dir: Path) -> list[Path]:
    """Whole checkpoints, oldest first (saving renames at the end, so one with its final name is whole)."""
    found = (run_dir / "checkpoints").glob("step-*")
    return sorted((path for path in found if re.fullmatch(r"step-\d+", path.name)), key=checkpoint_step)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole checkpoint."""
    return next(reversed(checkpoints(run_dir)), None)


def checkpoint_step(checkpoint: Path) -> int:
    """Finished train steps that a checkpoint holds."""
    return int(checkpoint.name.removeprefix("step-"))


def partial_path(directory: Path) -> Path:
    """Where `directory` is while it is written or deleted: no name that is ever taken for a whole one."""
    return directory.with_name(f".{directory.name}.partial")


def replaced_path(directory: Path) -> Path:
    """Where an earlier `directory` is while another takes its place."""
    return directory.with_name(f".{directory.name}.replaced")


def remove_partial(checkpoints_dir: Path) -> None:
    """Remove what killed saves and deletions left there; a checkpoint whose successor did not come to take its place is put
    back.  For the process that alone writes there."""
    for left in checkpoints_dir.glob(".step-*.replaced"):
        target = left.with_name(left.name.removeprefix(".").removesuffix(".replaced"))
        if target.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.rename(target)
    for left in checkpoints_dir.glob(".step-*.partial"):
        shutil.rmtree(left, ignore_errors=True)


def delete_old(run_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for old in checkpoints(run_dir)[:-keep]:
        half = partial_path(old)
        old.rename(half)  # a killed deletion leaves nothing that looks whole
        shutil.rmtree(half)
