"""Files of JSON lines that a killed writer may have left in mid-line."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO


def open_lines(path: Path) -> TextIO:
    """Open `path` to append lines, its folder made; a torn last line is ended, so that it spoils no other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")  # noqa: SIM115 (handed to the caller)
    size = file.seek(0, 2)
    if size:
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")
    file.close()
    return open(path, "a", encoding="utf-8")
