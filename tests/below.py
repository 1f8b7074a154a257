"""Processes below this one."""

from __future__ import annotations

import psutil


def processes_below(*, recursive: bool = True) -> list[psutil.Process]:
    """All of them, zombies too, without the helpers that other tests' multiprocessing keeps."""

    def ours(process: psutil.Process) -> bool:
        try:
            return "multiprocessing" not in " ".join(process.cmdline())
        except psutil.Error:
            return True

    return [p for p in psutil.Process().children(recursive=recursive) if ours(p)]
