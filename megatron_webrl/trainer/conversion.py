"""Conversion between Hugging Face directories and Megatron's distributed checkpoints, and their comparison.

Tensor by tensor: what is in memory is one whole tensor with its slices, never a model.  What is written appears whole or
not at all, after it was read back and found equal to its source.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

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
    Shapes,
    Slicing,
    pieces,
    table,
    to_hf,
    to_megatron,
    whole_shape,
)
from megatron_webrl.trainer.weights import SafetensorsDirectory, copy_all_but_weights, shapes_of

Progress = Callable[[str, int, int, str], None]
"""(what is being done, done, total, unit)."""

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By the name that safetensors gives them."""
CONVERSION_FILE = "conversion.json"
"""In a checkpoint that was converted: {"dtypes": dtype of each Hugging Face tensor, as safetensors calls it}."""
_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OPTIMIZER = "optimizer."
_ROOM = 1.02
"""Headers, indices and tokenizer files on top of the tensors."""


@dataclass(frozen=True)
class Architecture:
    """What config.json says of a model's tensors."""

    shapes: Shapes
    lengths: Mapping[str, tuple[int, ...]]
    """Shape by Hugging Face name; a tied output layer is not among them."""

    @classmethod
    def of(cls, directory: Path, key: str) -> Architecture:
        """Raises UserError if `directory` has no config.json of a Qwen3-VL.  key: what errors call it."""
        with _called(key):
            model_shape(directory)
        try:
            config = Qwen3VLConfig.from_pretrained(directory)
            with torch.device("meta"):
                model = Qwen3VLForConditionalGeneration(config)
        except Exception as error:
            raise UserError(f"{key}={directory}: config.json is malformed ({error}): fetch the model again") from None
        found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        shapes = shapes_of(config)
        if shapes.tied:
            found.pop("lm_head.weight", None)
        architecture = cls(shapes, found)
        if odd := sorted(set(found) ^ {name for entry in architecture.entries([shapes.layers]) for name in entry.hf}):
            raise UserError(f"{key}={directory}: config.json describes {odd[0]}, which the mapping does not know")
        return architecture

    def entries(self, stages: Sequence[int]) -> list[Entry]:
        """The mapping table with so many decoder layers on each stage, without copies of tied weights."""
        vision = [name for name in self.lengths if name.startswith("model.visual.")]
        return [e for e in table(self.shapes, vision, stages=stages, fused_norms=True) if e.exported]

    def of_entry(self, entry: Entry) -> list[tuple[int, ...]]:
        """Shapes of an entry's Hugging Face tensors, in order."""
        return [self.lengths[name] for name in entry.hf]


class HuggingFaceCheckpoint:
    """A directory with config.json and safetensors.

    key: what errors call it.  Raises UserError naming what is missing, unreadable, unknown or of another shape.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self.directory = self.files = directory
        self.architecture = Architecture.of(directory, key)
        self.tensors = SafetensorsDirectory(directory, key=key)
        if not self.tensors.lengths:
            raise UserError(f"{key}={directory} has no *.safetensors: give a complete Hugging Face directory")
        self.tensors.check_names(self.architecture.entries([self.architecture.shapes.layers]), self.architecture.shapes)
        self.dtypes: dict[str, torch.dtype] = {}
        for name, length in self.architecture.lengths.items():
            if tuple(self.tensors.lengths[name]) != length:
                raise UserError(
                    f"{key}={directory}: {name} has shape {self.tensors.lengths[name]}, but config.json says {list(length)}: "
                    "the files are of different models"
                )
            if self.tensors.dtypes[name] not in DTYPES:
                raise UserError(
                    f"{key}={directory}: {name} is {self.tensors.dtypes[name]}: only {', '.join(DTYPES)} can be converted"
                )
            self.dtypes[name] = DTYPES[self.tensors.dtypes[name]]

    def read(self, entry: Entry) -> list[Tensor]:
        """The entry's tensors, whole, in order of `hf`."""
        return [part[:] for part in self.tensors.slices(entry.hf)]


class MegatronCheckpoint:
    """A distributed checkpoint: of a training run, or converted.  An optimizer in it is passed over.

    key: what errors call it; model: a Hugging Face directory with the model's config.json, for checkpoints without one;
    dtype: what every tensor is read as, instead of as it was before it was converted, or is stored.
    Raises UserError naming what is missing, unreadable, unknown or of another shape.
    """

    def __init__(
        self, directory: Path, key: str, *, model: Path | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.directory, self._called = directory, f"{key}={directory}"
        self.files = model or directory / HF_FOLDER
        if not self.files.is_dir():
            remedy = "give a Hugging Face directory" if model else "give the run's model.path as --model HF_DIR"
            raise UserError(f"{self._called}: there is no {self.files} with the model's config.json: {remedy}")
        self.architecture = Architecture.of(self.files, "--model" if model else key)
        self._reader = FileSystemReader(directory)
        try:
            metadata: Metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            self._stored = {
                key: stored
                for key, stored in metadata.state_dict_metadata.items()
                if isinstance(stored, TensorStorageMetadata)
            }
        except (
            OSError,
            AttributeError,
            EOFError,
            ImportError,
            IndexError,
            ValueError,
            pickle.UnpicklingError,
        ) as error:
            raise self._broken(f".metadata cannot be read ({error!r})") from None
        self._check_tensors()
        recorded = self._recorded_dtypes()
        self.dtypes = {
            name: dtype or recorded.get(name) or self._stored[entry.stored].properties.dtype
            for entry in self.architecture.entries([self.architecture.shapes.layers])
            for name in entry.hf
        }

    def _check_tensors(self) -> None:
        shapes = self.architecture.shapes
        known = set()
        for entry in self.architecture.entries([shapes.layers]):
            known.add(entry.stored)
            if entry.stored not in self._stored:
                raise self._broken(f"it lacks {entry.stored}")
            found = tuple(self._stored[entry.stored].size)
            whole = whole_shape(entry, self.architecture.of_entry(entry), shapes, ranks=1)
            stack = () if entry.layer is None else (shapes.layers,)
            padded = found[0] >= whole[0] and found[1:] == whole[1:]
            if found != (*stack, *whole) and not (entry.slicing is Slicing.VOCAB and padded):
                raise UserError(
                    f"{self._called}: {entry.stored} has shape {list(found)}, but {self.files / 'config.json'} says "
                    f"{[*stack, *whole]}: they are of different models"
                )
        if unknown := sorted(key for key in set(self._stored) - known if not key.startswith(_OPTIMIZER)):
            raise UserError(
                f"{self._called}: it holds {unknown[0]} ({len(unknown)} unknown tensors in all), which a Qwen3-VL of "
                f"{self.files / 'config.json'} has not"
            )

    def _recorded_dtypes(self) -> dict[str, torch.dtype]:
        file = self.directory / CONVERSION_FILE
        try:
            return {name: DTYPES[dtype] for name, dtype in json.loads(file.read_text())["dtypes"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._broken(f"{file.name} is malformed ({error!r})") from None

    def check_files(self, progress: Progress) -> None:
        """Raises UserError naming the file if one is not what was written."""
        try:
            hashes: dict[str, str] = json.loads((self.directory / "integrity.json").read_text())["files"]
            total = sum((self.directory / name).stat().st_size for name in hashes)
            done = 0
            for name, expected in hashes.items():
                found = hashlib.sha256()
                with (self.directory / name).open("rb") as opened:
                    while block := opened.read(1 << 24):
                        found.update(block)
                        done += len(block)
                        _tell(progress, "checking files", done, total)
                if found.hexdigest() != expected:
                    raise self._broken(f"{name} is not what was written (SHA-256)")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._broken(f"integrity.json or a file that it names cannot be read ({error})") from None

    def read(self, entry: Entry) -> list[Tensor]:
        """The entry's tensors, whole, in order of `hf`, without the padding of the vocabulary."""
        stored = self._stored[entry.stored]
        size, offset = torch.Size(stored.size), torch.Size([0] * len(stored.size))
        if entry.layer is not None:
            size, offset = torch.Size([1, *size[1:]]), torch.Size([entry.layer, *offset[1:]])
        whole = torch.empty(size, dtype=stored.properties.dtype)
        items = create_read_items_for_chunk_list(entry.stored, stored, [ChunkStorageMetadata(offset, size)])
        if sum(math.prod(item.lengths) for item in items) != whole.numel():
            raise self._broken(f"parts of {entry.stored} are not in it")
        try:
            self._reader.read_data(LoadPlan(items), _Into(whole))
        except Exception as error:  # of torch.load on bytes that are none of its own: any
            files = sorted({self._reader.storage_data[item.storage_index].relative_path for item in items})
            raise self._broken(f"{', '.join(files)}: {entry.stored} cannot be read ({error})") from None
        heights = [length[0] for length in self.architecture.of_entry(entry)]
        tensors = to_hf(entry, [whole if entry.layer is None else whole[0]], self.architecture.shapes, heights)
        return [tensor.to(self.dtypes[name]) for name, tensor in zip(entry.hf, tensors, strict=True)]

    def _broken(self, problem: str) -> UserError:
        return UserError(f"{self._called}: {' '.join(problem.split())}: take another checkpoint, or convert it again")


Checkpoint = HuggingFaceCheckpoint | MegatronCheckpoint


class _Into(DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._target[tuple(slice(start, start + length) for start, length in places)]


def open_checkpoint(directory: Path, key: str, *, model: Path | None = None) -> Checkpoint:
    """Whichever it is.  Raises UserError if it is neither, or cannot be read."""
    if _is_megatron(directory):
        return MegatronCheckpoint(directory, key, model=model)
    if (directory / "config.json").exists():
        return HuggingFaceCheckpoint(directory, key)
    raise _neither(directory, key)


def _is_megatron(directory: Path) -> bool:
    return (directory / "metadata.json").exists() or (directory / ".metadata").exists()


def _neither(directory: Path, key: str) -> UserError:
    what = "does not exist" if not directory.exists() else "holds neither config.json nor Megatron's metadata.json"
    return UserError(
        f"{key}={directory} {what}: give a Hugging Face directory, or a checkpoint such as RUN/checkpoints/step-000020"
    )


# From Hugging Face to Megatron


def hf_to_megatron(
    source: Path, target: Path, *, tp: int, pp: int, first_stage_layers: int | None, progress: Progress
) -> Comparison:
    """Write `target`, with one file for each rank of the layout; whatever reads it may have another layout.

    Raises UserError if something is wrong with `source` or the layout, `target` exists, or there is no room.
    """
    if not (source / "config.json").exists():
        raise (
            _neither(source, "SRC")
            if not _is_megatron(source)
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
    with _called("SRC"):
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
            if isinstance(error.__context__, OSError):  # what the disk said; torch.save hides it
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
        _tell(self._progress, "writing", self._done, self.bytes)
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
    if not _is_megatron(source):
        raise (
            _neither(source, "SRC")
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
                    opened.write(_bytes(tensor))
                done += sizes[name]
                _tell(progress, "writing", done, total)
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


# Comparison


@dataclass(frozen=True)
class Comparison:
    """Of two checkpoints, tensor by tensor."""

    tensors: int
    parameters: int
    digest: str
    """SHA-256 over those of all tensors of the first."""
    differing: list[str]
    """What differs, a line a tensor."""


def verify(first: Path, second: Path, *, model: Path | None = None, progress: Progress) -> Comparison:
    """Compare two checkpoints of either kind.  model: for a Megatron checkpoint that lacks its config.json.

    Raises UserError if one cannot be read.
    """
    a, b = (open_checkpoint(path, key, model=model) for path, key in ((first, "A"), (second, "B")))
    return compare(a, b, progress)


def compare(a: Checkpoint, b: Checkpoint, progress: Progress) -> Comparison:
    """Names, shapes, dtypes and the SHA-256 of what each tensor holds."""
    lengths, others = a.architecture.lengths, b.architecture.lengths
    differing = [f"{name} is in {c.directory} only" for c, lacks in ((a, others), (b, lengths))
                 for name in c.architecture.lengths if name not in lacks]  # fmt: skip
    total, done = sum(math.prod(length) for length in lengths.values()), 0
    overall = hashlib.sha256()
    for entry in a.architecture.entries([a.architecture.shapes.layers]):
        comparable = all(lengths[name] == others.get(name) for name in entry.hf)
        both = zip(entry.hf, a.read(entry), b.read(entry) if comparable else [None] * len(entry.hf), strict=True)
        for name, one, other in both:
            digest = _digest(one)
            overall.update(f"{name} {digest}\n".encode())
            done += one.numel()
            _tell(progress, "comparing", done, total, "M parameters")
            if name in others and lengths[name] != others[name]:
                differing.append(f"{name} has shape {list(lengths[name])} and {list(others[name])}")
            elif other is not None and one.dtype != other.dtype:
                differing.append(f"{name} is {_name(one.dtype)} and {_name(other.dtype)}")
            elif other is not None and digest != _digest(other):
                differing.append(f"{name} holds other values")
    return Comparison(len(lengths), total, overall.hexdigest(), differing)


def _proved(source: Checkpoint, written: Checkpoint, progress: Progress) -> Comparison:
    found = compare(source, written, progress)
    if found.differing:
        raise UserError(
            f"what was written differs from what was read: {found.differing[0]} ({len(found.differing)} tensors): the disk "
            "or the memory is at fault; nothing was kept"
        )
    return found


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    free = shutil.disk_usage(target.parent).free
    if size * _ROOM > free:
        raise UserError(
            f"DST={target} needs {size * _ROOM / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free there: make room, or give "
            "another disk"
        )
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
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
            raise UserError(f"DST={target} could not be written ({error}): make room, or give another disk") from error
        raise


@contextmanager
def _called(key: str) -> Iterator[None]:
    """Errors of the configuration's checks, in the words of the command line."""
    try:
        yield
    except UserError as error:
        text = re.sub(r"trainer\.parallel\.(\w+)", lambda found: "--" + found[1].replace("_", "-"), str(error))
        text = text.replace("first_stage_layers", "--first-stage-layers")
        raise UserError(text.replace("model.path=", f"{key}=")) from None


def _tell(progress: Progress, what: str, done: int, total: int, unit: str = "MB") -> None:
    progress(what, done // 10**6, total // 10**6, unit)
