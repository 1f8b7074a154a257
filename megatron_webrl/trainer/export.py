"""A policy on its way out of the trainer: its tensors in buckets, a copy of them on the host, and that copy on disk.

Each pipeline stage's first rank (tensor-parallel rank 0 of the first data-parallel shard) holds the copy of its stage.  All
ranks know the whole plan: it follows from the conversion table and the shapes of the model's tensors.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_webrl.run_directory import partial_path
from megatron_webrl.trainer.mapping import Entry
from megatron_webrl.trainer.weights import copy_all_but_weights, replace_directory

FILE_BYTES = 5_000_000_000
"""Most bytes of a file of an export, unless one bucket has more."""
INDEX = "model.safetensors.index.json"


class Bucket(NamedTuple):
    """Tensors that travel together: neighbours in the table, of one pipeline stage."""

    stage: int
    """Rank in the pipeline."""
    entries: tuple[Entry, ...]
    names: tuple[str, ...]
    """Hugging Face names."""
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(map(torch.Size.numel, map(torch.Size, self.shapes))) * self.dtype.itemsize

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each, which share the memory of `flat`, uint8 [nbytes]."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        for name, shape, part in zip(self.names, self.shapes, flat.view(self.dtype).split(sizes), strict=True):
            yield name, part.view(shape)


def plan_buckets(
    entries: Sequence[Entry], lengths: Mapping[str, Sequence[int]], dtype: torch.dtype, *, limit: int, pp: int
) -> list[Bucket]:
    """All exported tensors, in the one order in which they travel.

    lengths: shape of each Hugging Face tensor; limit: most bytes of a bucket, unless one parameter alone has more; pp:
    pipeline stages (chunk j of a virtual pipeline is on stage j mod pp).
    """
    plan: list[Bucket] = []
    for entry in entries:
        if not entry.exported:
            continue
        shapes = tuple(tuple(lengths[name]) for name in entry.hf)
        new = Bucket(entry.stage % pp, (entry,), entry.hf, shapes, dtype)
        last = plan[-1] if plan else None
        if last is not None and last.stage == new.stage and last.nbytes + new.nbytes <= limit:
            plan[-1] = last._replace(
                entries=last.entries + new.entries, names=last.names + new.names, shapes=last.shapes + new.shapes
            )
        else:
            plan.append(new)
    return plan


class SnapshotError(Exception):
    """A bucket was asked for that the snapshot does not hold, or did not hold in time."""


class Snapshot:
    """A stage's buckets of one version, on the host.  One thread fills it, bucket by bucket, while others read those that
    are whole; its memory is used again for the next version."""

    def __init__(self, plan: Sequence[Bucket], stage: int, *, pinned: bool = False) -> None:
        self.plan = plan
        self.stage = stage
        self._flat = {
            i: torch.empty(b.nbytes, dtype=torch.uint8, pin_memory=pinned)
            for i, b in enumerate(plan)
            if b.stage == stage
        }
        self._version: int | None = None
        self._whole: set[int] = set()
        self._changed = threading.Condition()

    @property
    def indices(self) -> list[int]:
        """Of the stage's buckets in the plan."""
        return list(self._flat)

    def begin(self, version: int) -> None:
        """What it held is given up: nobody may be reading."""
        with self._changed:
            self._version = version
            self._whole.clear()

    def memory(self, index: int) -> Tensor:
        """uint8 [nbytes], to be filled; then call `whole`."""
        return self._flat[index]

    def whole(self, index: int) -> None:
        """That bucket is complete."""
        with self._changed:
            self._whole.add(index)
            self._changed.notify_all()

    def get(self, index: int, version: int, *, timeout_s: float = 0.0) -> Tensor:
        """uint8 [nbytes], waiting until it is whole.  Raises SnapshotError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._version == version and index in self._whole, timeout_s):
                raise SnapshotError(
                    f"bucket {index} of version {version} is not here after {timeout_s:.0f} s (version {self._version} has "
                    f"{len(self._whole)} of {len(self._flat)})"
                )
            return self._flat[index]

    def tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of all that it holds; they share its memory.  Raises SnapshotError."""
        for index in self._flat:
            yield from self.plan[index].views(self.get(index, version))


def _files(plan: Sequence[Bucket]) -> list[list[int]]:
    """Buckets of each file: neighbours of one stage."""
    files: list[list[int]] = []
    size = 0
    for index, bucket in enumerate(plan):
        if not files or plan[files[-1][0]].stage != bucket.stage or size + bucket.nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(index)
        size += bucket.nbytes
    return files


def _file_name(place: int, files: int) -> str:
    return "model.safetensors" if files == 1 else f"model-{place + 1:05d}-of-{files:05d}.safetensors"


def write_stage(partial: Path, snapshot: Snapshot, version: int, *, timeout_s: float = 0.0) -> None:
    """This stage's files of an export into `partial`, which is there, as the buckets come.  Raises SnapshotError, OSError."""
    files = _files(snapshot.plan)
    for place, indices in enumerate(files):
        if snapshot.plan[indices[0]].stage == snapshot.stage:
            whole = {i: snapshot.get(i, version, timeout_s=timeout_s) for i in indices}
            tensors = {name: tensor for i in indices for name, tensor in snapshot.plan[i].views(whole[i])}
            save_file(tensors, partial / _file_name(place, len(files)), metadata={"format": "pt"})


def begin_directory(directory: Path) -> Path:
    """An empty folder beside `directory`, for `write_stage` of all stages; then call `complete_directory`."""
    partial = partial_path(directory)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def complete_directory(directory: Path, plan: Sequence[Bucket], model_path: Path) -> None:
    """All stages are written: add the index and every other file of `model_path`, and let it appear, whole."""
    partial, files = partial_path(directory), _files(plan)
    if len(files) > 1:
        where = {
            name: _file_name(place, len(files))
            for place, indices in enumerate(files)
            for i in indices
            for name in plan[i].names
        }
        index = {"metadata": {"total_size": sum(b.nbytes for b in plan)}, "weight_map": where}
        (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    copy_all_but_weights(model_path, partial)
    replace_directory(partial, directory)
