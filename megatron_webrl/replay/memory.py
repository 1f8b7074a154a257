"""How the coordinator's process keeps its memory: set once, when it begins to serve.

Trajectories come and go by hundreds of kilobytes.  By default glibc gives such blocks back to the kernel at once and has them
mapped, page by page, again; and Python looks for cycles, of which messages have none, after every 700 new objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

KEEP_BYTES = 256 << 20
"""Free memory that stays with the process."""
MAPPED_BYTES = 32 << 20
"""Blocks from this size on are still given back one by one."""
COLLECT_AFTER = (20_000, 20, 100)
"""Of `gc.set_threshold`."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_memory() -> None:
    """Fewer page faults and fewer collections, for at most KEEP_BYTES more; without glibc only the latter."""
    gc.set_threshold(*COLLECT_AFTER)
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)
