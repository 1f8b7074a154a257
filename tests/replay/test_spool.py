"""The spool: every wanted record is read as it was written, whatever became of the others and of the process; nothing grows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.replay.spool import Location, Spool, SpoolDamaged

operations = st.lists(
    st.one_of(st.binary(max_size=60), st.integers(0, 30), st.just("killed")), max_size=60
)  # append, free the n-th, a new process


@given(operations)
def test_wanted_records_are_there_and_files_go_with_their_last(
    tmp_path_factory: pytest.TempPathFactory, ops: list
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    spool, wanted = Spool(directory, segment_bytes=100), dict[Location, bytes]()
    for op in ops:
        if isinstance(op, bytes):
            wanted[spool.append(op)] = op
        elif op == "killed":
            os.close(spool._file)
            spool = Spool(directory, wanted, segment_bytes=100)
        elif op < len(wanted):
            location = list(wanted)[op]
            spool.free(location)
            del wanted[location]
        assert all(spool.read(location) == data for location, data in wanted.items())
        assert spool.bytes == sum(map(len, wanted.values()))
        segments = {location.segment for location in wanted} | {spool._segment}
        assert {int(file.stem) for file in directory.iterdir()} == segments
    spool.sync()
    spool.close()


def test_what_the_disk_lost_is_said(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    location = spool.append(b"x" * 10)
    (tmp_path / "00000001.spool").write_bytes(b"x" * 9)
    with pytest.raises(SpoolDamaged, match="ends before"):
        spool.read(location)
    (tmp_path / "00000001.spool").unlink()
    with pytest.raises(SpoolDamaged, match="No such file"):
        Spool(tmp_path, [location]).read(location)


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that could be written in part only is as if it had not been tried."""
    spool = Spool(tmp_path)
    first = spool.append(b"first")
    pwrite, calls = os.pwrite, []

    def full(fd: int, data: memoryview, at: int) -> int:
        calls.append(at)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return pwrite(fd, data[:2], at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        spool.append(b"second")
    monkeypatch.undo()
    third = spool.append(b"third")
    assert (spool.read(first), spool.read(third)) == (b"first", b"third")
    assert spool.bytes == 10


def test_a_file_that_cannot_be_begun_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the next file is to be begun; later there is room again."""
    spool = Spool(tmp_path, segment_bytes=10)
    first = spool.append(b"x" * 10)
    real = os.open

    def full(path: object, *rest: int) -> int:
        if str(path).endswith(".spool"):
            raise OSError(28, "No space left on device")
        return real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="No space"):
        spool.append(b"second")
    monkeypatch.undo()
    other = tmp_path / "other"
    with other.open("wb") as file:
        file.write(b"somebody else's")
        second = spool.append(b"second")
    assert (spool.read(first), spool.read(second)) == (b"x" * 10, b"second")
    assert other.read_bytes() == b"somebody else's"
