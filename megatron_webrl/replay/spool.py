"""The spool: finished trajectories on disk, appended to files of some tens of megabytes.

Nothing is kept in memory: what is trained is read again when a trainer fetches it, from the page cache as a rule.  A file is
removed when nothing in it is wanted any more.  The ledger knows where each trajectory lies.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SEGMENT_BYTES = 32 << 20


class SpoolDamaged(Exception):
    """A record is not there as it was written: the disk lost it."""


class Location(NamedTuple):
    """Where a record lies."""

    segment: int
    offset: int
    length: int


class Spool:
    """Records in `directory`.  live: the records of an earlier process that are still wanted; all else there is removed."""

    def __init__(self, directory: Path, live: Iterable[Location] = (), *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.bytes = 0
        """Of the records that are wanted."""
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._live: dict[int, int] = {}
        """Wanted records of each file."""
        self._reading: int | None = None
        """The file that was read last is kept open."""
        directory.mkdir(parents=True, exist_ok=True)
        for location in live:
            self._live[location.segment] = self._live.get(location.segment, 0) + 1
            self.bytes += location.length
        last = 0
        for file in directory.glob("*.spool"):
            last = max(last, int(file.stem))
            if int(file.stem) not in self._live:
                file.unlink()
        self._begin(max(last, *self._live, 0) + 1)

    def append(self, data: bytes) -> Location:
        """A new record; on disk, as far as a killed process is concerned, at once.  Raises OSError, and has changed nothing."""
        if self._offset >= self._segment_bytes:
            os.fdatasync(self._file)
            finished, file = self._segment, self._file
            self._begin(finished + 1)
            os.close(file)
            self._remove_if_dead(finished)
        location = Location(self._segment, self._offset, len(data))
        view, at = memoryview(data), self._offset
        while view:
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written
        self._offset += len(data)
        self._live[self._segment] = self._live.get(self._segment, 0) + 1
        self.bytes += len(data)
        return location

    def read(self, location: Location) -> bytes:
        """A record.  Raises SpoolDamaged if it is not whole there."""
        try:
            if self._reading != location.segment:
                self._stop_reading()
                self._read_file = os.open(self._path(location.segment), os.O_RDONLY)
                self._reading = location.segment
            data = os.pread(self._read_file, location.length, location.offset)
        except OSError as error:
            raise SpoolDamaged(f"{self._path(location.segment)}: {error.strerror}") from None
        if len(data) != location.length:
            raise SpoolDamaged(f"{self._path(location.segment)} ends before {location}")
        return data

    def free(self, location: Location) -> None:
        """A record is not wanted any more."""
        self._live[location.segment] -= 1
        self.bytes -= location.length
        self._remove_if_dead(location.segment)

    def sync(self) -> None:
        """What was appended survives the machine, too.  May be called in a thread.  Raises OSError if it may not."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            if error.errno not in (
                errno.EBADF,
                errno.EINVAL,
            ):  # `append` has just closed this file, and synced it before
                raise

    def close(self) -> None:
        self._stop_reading()
        os.close(self._file)
        if not self._live.get(self._segment):
            self._path(self._segment).unlink(missing_ok=True)

    def _begin(self, segment: int) -> None:
        self._file = os.open(self._path(segment), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._segment, self._offset = segment, 0

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading = None
            os.close(self._read_file)

    def _remove_if_dead(self, segment: int) -> None:
        if segment != self._segment and not self._live.get(segment):
            self._live.pop(segment, None)
            if segment == self._reading:
                self._stop_reading()
            self._path(segment).unlink(missing_ok=True)

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:08d}.spool"
