"""Child processes that never outlive us: own process group, killed with their parent, and reaped by mark.

A mark is an environment variable that every descendant inherits, so that what a killed role left behind can be found
and ended, whoever its parent is by then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARK = "MEGATRON_WEBRL_MARK"
"""Environment variable: `RUN_ID/ROLE`."""

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Runs in the child between fork and exec (Linux only; elsewhere the mark alone has to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(
    command: Sequence[str], *, mark: str, log: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` in its own session, marked, to die with the calling thread's process.  `log`: file that gets
    stdout and stderr (appended); None discards them."""
    out = open(log, "ab") if log else subprocess.DEVNULL  # noqa: SIM115 (handed to the child)
    try:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {}), MARK: mark},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    finally:
        if out is not subprocess.DEVNULL:
            out.close()  # type: ignore[union-attr]


def marked(prefix: str) -> list[psutil.Process]:
    """Live processes whose mark is `prefix` or starts with `prefix/`, ourselves and our ancestors left out."""
    ours = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            mark = process.environ().get(MARK, "")
            if (mark == prefix or mark.startswith(prefix + "/")) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def reap(prefix: str, *, grace_s: float = 0.0) -> int:
    """End every process with that mark: SIGTERM, `grace_s` seconds later SIGKILL.  Returns how many there were."""
    total = 0
    processes = marked(prefix)
    if grace_s and processes:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        psutil.wait_procs(processes, timeout=grace_s)
    for _ in range(5):  # a dying parent may have just forked once more
        if not processes:
            break
        total += len(processes)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=3)
        processes = marked(prefix)
    return total
