"""Conversion between Hugging Face directories and Megatron's distributed checkpoints.

Tensor by tensor: what is in memory is one whole tensor with its slices, never a model.  What is written appears whole or
not at all, after it was read back and found equal to its source.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_webrl.config import ParallelConfig
from megatron_webrl.config.checks import check_parallel, model_shape
from megatron_webrl.errors import UserError
from megatron_webrl.run_directory import check_writable
from megatron_webrl.trainer.checkpoint import HF_FOLDER
from megatron_webrl.trainer.mapping import (
    FINAL_STATE,
    LAYER_STATES,
    Entry,
    Piece,
    pieces,
    to_megatron,
    whole_shape,
)
from megatron_webrl.trainer.weight_files import (
    CONVERSION_FILE,
    DTYPES,
    Checkpoint,
    Comparison,
    HuggingFaceCheckpoint,
    MegatronCheckpoint,
    Progress,
    as_bytes,
    called,
    compare,
    is_megatron,
    neither,
    tell,
)
from megatron_webrl.trainer.weights import copy_all_but_weights

_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ROOM = 1.02
"""Headers, indices and tokenizer files on top of the tensors."""


# From Hugging Face to Megatron


def hf_to_megatron(
    source: Path, target: Path, *, tp: int, pp: int, first_stage_layers: int | None, progress: Progress
) -> Comparison:
    """Write `target`, with one file for each rank of the layout; whatever reads it may have another layout.

    Raises UserError if something is wrong with `source` or the layout, `target` exists, or there is no room.
    """
    if not (source / "config.json").exists():
        raise (
            neither(source, "SRC")
            if not is_megatron(source)
            else UserError(f"SRC={source} is a Megatron checkpoint already: use megatron-to-hf")
        )
    stages = _stages(source, tp, pp, first_stage_layers)
    weights = HuggingFaceCheckpoint(source, "SRC")
    plan = _SavePlan(weights, stages, tp)
    with _appearing(target, plan.bytes) as directory:
        plan.write(directory, progress)
        copy_all_but_weights(source, directory / HF_FOLDER)
        dtypes = {name: _SAFETENSORS_NAMES[dtype] for name, dtype in weights.dtypes.items()}
        (directory / CONVERSION_FILE).write_text(json.dumps({"dtypes": dtypes}, indent=1) + "\n")
        save_config(CheckpointingConfig("torch_dist"), str(directory))
        save_integrity_manifest(str(directory))
        return _proved(weights, MegatronCheckpoint(directory, "DST"), progress)


def _stages(source: Path, tp: int, pp: int, first_stage_layers: int | None) -> list[int]:
    """Decoder layers of each stage.  Raises UserError in the words of the command line."""
    with called("SRC"):
        shape = model_shape(source)
        try:
            parallel = ParallelConfig(tp=tp, pp=pp, first_stage_layers=first_stage_layers)
        except ValidationError as error:
            raise UserError(
                "; ".join(
                    str(e["msg"]).removeprefix("Value error, ")
                    if e["type"] == "value_error"
                    else f"trainer.parallel.{e['loc'][0]}={e['input']}: {e['msg']}"
                    for e in error.errors()
                )
            ) from None
        check_parallel(parallel, shape)
    return parallel.stage_layers(shape.layers)


class _Source(NamedTuple):
    """Where the bytes of one item of a checkpoint come from."""

    entry: Entry
    rank: int
    """Tensor-parallel."""
    piece: Piece
    dtype: torch.dtype


class _SavePlan(DefaultSavePlanner):
    """What each rank writes, resolved from the source when it is written."""

    def __init__(self, weights: HuggingFaceCheckpoint, stages: Sequence[int], tp: int) -> None:
        super().__init__()
        self._weights, self._tp = weights, tp
        self._sources: dict[MetadataIndex, _Source] = {}
        self._last: tuple[tuple[Entry, int], Tensor] | None = None
        entries = weights.architecture.entries(stages)
        stored_as: dict[str, torch.dtype] = {}
        for entry in entries:  # a stack has one dtype, which holds all that its layers have
            for name in entry.hf:
                dtype = weights.dtypes[name]
                stored_as[entry.stored] = torch.promote_types(stored_as.get(entry.stored, dtype), dtype)
        plans = []
        for stage in range(len(stages)):
            for rank in range(tp):
                mine = [entry for entry in entries if entry.stage == stage]
                items = [item for entry in mine for item in self._items(entry, rank, stored_as[entry.stored])]
                if rank == 0:
                    layers = [sum(stages[:stage]) + i for i in range(stages[stage])]
                    items += self._states(layers, first=stage == 0, last=stage == len(stages) - 1)
                plans.append(SavePlan(items))
        self._plans, self._index = create_default_global_save_plan(plans)
        self.bytes = sum(
            math.prod(stored.size) * stored.properties.dtype.itemsize
            for stored in self._index.state_dict_metadata.values()
            if isinstance(stored, TensorStorageMetadata)
        )
        self._done = 0
        self._progress: Progress | None = None

    def _items(self, entry: Entry, rank: int, dtype: torch.dtype) -> Iterator[WriteItem]:
        architecture = self._weights.architecture
        shapes, lengths = architecture.shapes, architecture.of_entry(entry)
        whole = whole_shape(entry, lengths, shapes, ranks=self._tp)
        for piece in pieces(entry, lengths, shapes, rank=rank, ranks=self._tp):
            place, sizes, size = piece.offset, piece.shape, whole
            if entry.layer is not None:
                place, sizes, size = (entry.layer, *place), (1, *sizes), (shapes.layers, *size)
            index = MetadataIndex(entry.stored, place)
            self._sources[index] = _Source(entry, rank, piece, dtype)
            data = TensorWriteData(
                ChunkStorageMetadata(torch.Size(place), torch.Size(sizes)), TensorProperties(dtype), torch.Size(size)
            )
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def _states(self, layers: Sequence[int], *, first: bool, last: bool) -> Iterator[WriteItem]:
        """Objects that Megatron asks for beside the tensors."""
        total = self._weights.architecture.shapes.layers
        places = [(key, total, layer) for key in LAYER_STATES for layer in layers]
        places += [(FINAL_STATE, 1, 0)] * last + [("common_state", 1, 0)] * first
        for key, length, place in places:
            name = ShardedObject(key, None, (length,), (place,)).unique_key
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)

    def write(self, directory: Path, progress: Progress) -> None:
        """All ranks' files, one after the other, and the index over them."""
        self._progress = progress
        writer = FileSystemWriter(directory, per_thread_copy_ahead=0)
        plans = writer.prepare_global_plan(self._plans)
        try:
            written = [writer.write_data(plan, self).wait() for plan in plans]
        except RuntimeError as error:
            if isinstance(
                error.__context__, OSError | KeyboardInterrupt
            ):  # what the disk or the user said; torch.save hides it
                raise error.__context__ from None
            raise
        writer.finish(self._index, written)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            out = io.BytesIO()
            torch.save([{} if write_item.index.fqn.startswith("common_state") else None], out)
            return out
        source = self._sources[write_item.index]
        tensor = self._slice(source.entry, source.rank)[source.piece.rows]
        assert self._progress is not None and write_item.tensor_data is not None
        self._done += tensor.numel() * source.dtype.itemsize
        tell(self._progress, "writing", self._done, self.bytes)
        return tensor.to(source.dtype).reshape(write_item.tensor_data.chunk.sizes)

    def _slice(self, entry: Entry, rank: int) -> Tensor:
        """One rank's tensor; the last one is kept, for pieces of one tensor follow each other."""
        if self._last is None or self._last[0] != (entry, rank):
            sources = self._weights.tensors.slices(entry.hf)
            shapes = self._weights.architecture.shapes
            self._last = (entry, rank), to_megatron(entry, sources, shapes, rank=rank, ranks=self._tp)
        return self._last[1]


# From Megatron to Hugging Face


def megatron_to_hf(
    source: Path,
    target: Path,
    *,
    model: Path | None = None,
    max_shard_size: str = "4GB",
    dtype: str | None = None,
    progress: Progress,
) -> Comparison:
    """Write `target`: config.json, tokenizer and processor files of the model and its weights, in files of max_shard_size.

    model: see MegatronCheckpoint; dtype: float32, bfloat16 or float16, for all tensors.
    Raises UserError if something is wrong with `source` or the size, `target` exists, or there is no room.
    """
    limit = _parse_size(max_shard_size)
    if not is_megatron(source):
        raise (
            neither(source, "SRC")
            if not (source / "config.json").exists()
            else UserError(f"SRC={source} is a Hugging Face directory already: use hf-to-megatron")
        )
    weights = MegatronCheckpoint(source, "SRC", model=model, dtype=getattr(torch, dtype) if dtype else None)
    weights.check_files(progress)
    sizes = {
        name: math.prod(weights.architecture.lengths[name]) * kind.itemsize for name, kind in weights.dtypes.items()
    }
    shards = _shards(sizes, limit)
    total = sum(sizes.values())
    with _appearing(target, total) as directory:
        copy_all_but_weights(weights.files, directory)
        if dtype:
            _set_dtype(directory / "config.json", dtype)
        places: dict[str, tuple[Path, int]] = {}
        for file, names in shards.items():
            places |= _write_header(directory / file, names, weights)
        done = 0
        for entry in weights.architecture.entries([weights.architecture.shapes.layers]):
            for name, tensor in zip(entry.hf, weights.read(entry), strict=True):
                path, offset = places[name]
                with path.open("r+b") as opened:
                    opened.seek(offset)
                    opened.write(as_bytes(tensor))
                done += sizes[name]
                tell(progress, "writing", done, total)
        if len(shards) > 1:
            files = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        return _proved(weights, HuggingFaceCheckpoint(directory, "DST"), progress)


def _parse_size(text: str) -> int:
    """Bytes of "4GB", "500MB", … (powers of ten).  Raises UserError."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", text.strip().upper())
    size = int(float(found[1]) * units[found[2]]) if found else 0
    if size <= 0:
        raise UserError(f"--max-shard-size={text} is no size: give a number with a unit, for example 4GB or 500MB")
    return size


def _shards(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Names by file, in order; a tensor larger than the limit has a file of its own."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not groups:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_header(file: Path, names: Sequence[str], weights: MegatronCheckpoint) -> dict[str, tuple[Path, int]]:
    """Begin a safetensors file -> where each tensor's bytes go.  Wider dtypes come first, so that all are aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(names, key=lambda name: -weights.dtypes[name].itemsize):
        dtype, shape = weights.dtypes[name], weights.architecture.lengths[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
    return {name: (file, 8 + len(text) + header[name]["data_offsets"][0]) for name in names}


def _set_dtype(file: Path, dtype: str) -> None:
    """Let config.json say what the weights are now: transformers loads them as it says."""
    config = json.loads(file.read_text())
    for section in (config, config["text_config"], config["vision_config"]):
        for key in {"dtype", "torch_dtype"} & section.keys():
            section[key] = dtype
    file.write_text(json.dumps(config, indent=2) + "\n")


# What both directions do


@contextmanager
def _appearing(target: Path, size: int) -> Iterator[Path]:
    """A folder beside `target` that gets its name at the end; removed on any error.

    size: bytes that will be written.  Raises UserError if `target` exists or cannot be made, or there is no room.
    """
    target = target.absolute()
    if target.exists() or target.is_symlink():
        raise UserError(f"DST={target} exists: give a name that is not taken, or move it away")
    check_writable("DST", target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with _alone(target):
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(target.parent).free
        if size * _ROOM > free:
            raise UserError(
                f"DST={target} needs {size * _ROOM / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free there: make room, or give "
                "another disk"
            )
        try:
            partial.mkdir()
            yield partial
            for file in partial.rglob("*"):
                if file.is_file():
                    with file.open("rb") as opened:
                        os.fsync(opened.fileno())
            partial.rename(target)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                remedy = "make room, or give another disk" if full else "see to that and try again"
                raise UserError(f"DST={target} could not be written ({error}): {remedy}") from error
            raise


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One conversion at a time writes to `target`.  Raises UserError if another does."""
    lock = target.with_name(f".{target.name}.lock")
    with lock.open("a") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"DST={target} is being written by another conversion: wait for it, or give another name"
            ) from None
        if target.exists():
            raise UserError(f"DST={target} exists: give a name that is not taken, or move it away")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _proved(source: Checkpoint, written: Checkpoint, progress: Progress) -> Comparison:
    found = compare(source, written, progress)
    if found.differing:
        raise UserError(
            f"what was written differs from what was read: {found.differing[0]} ({len(found.differing)} tensors): the disk "
            "or the memory is at fault; nothing was kept"
        )
    return found
