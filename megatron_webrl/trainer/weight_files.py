"""Weights on disk, as Hugging Face or Megatron keep them: read tensor by tensor under their Hugging Face names, and compared."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from megatron_webrl.config.checks import model_shape
from megatron_webrl.errors import UserError
from megatron_webrl.trainer.checkpoint import HF_FOLDER
from megatron_webrl.trainer.mapping import Entry, Shapes, Slicing, table, to_hf, whole_shape
from megatron_webrl.trainer.weights import SafetensorsDirectory, shapes_of

Progress = Callable[[str, int, int, str], None]
"""(what is being done, done, total, unit)."""

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By the name that safetensors gives them."""
CONVERSION_FILE = "conversion.json"
"""In a checkpoint that was converted: {"dtypes": dtype of each Hugging Face tensor, as safetensors calls it}."""
_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Architecture:
    """What config.json says of a model's tensors."""

    shapes: Shapes
    lengths: Mapping[str, tuple[int, ...]]
    """Shape by Hugging Face name; a tied output layer is not among them."""

    @classmethod
    def of(cls, directory: Path, key: str) -> Architecture:
        """Raises UserError if `directory` has no config.json of a Qwen3-VL.  key: what errors call it."""
        with called(key):
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
        try:
            return [part[:] for part in self.tensors.slices(entry.hf)]
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(
                f"{self.directory}: {entry.hf[0]} cannot be read ({error}): fetch the files again"
            ) from None


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
        except Exception as error:  # what a pickle of damaged bytes raises has no bounds
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
            if self.files != self.directory / HF_FOLDER:  # another directory stands for them
                hashes = {name: found for name, found in hashes.items() if not name.startswith(f"{HF_FOLDER}/")}
            total = sum((self.directory / name).stat().st_size for name in hashes)
            done = 0
            for name, expected in hashes.items():
                digest = hashlib.sha256()
                with (self.directory / name).open("rb") as opened:
                    while block := opened.read(1 << 24):
                        digest.update(block)
                        done += len(block)
                        tell(progress, "checking files", done, total)
                if digest.hexdigest() != expected:
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
    if is_megatron(directory):
        return MegatronCheckpoint(directory, key, model=model)
    if (directory / "config.json").exists():
        return HuggingFaceCheckpoint(directory, key)
    raise neither(directory, key)


def is_megatron(directory: Path) -> bool:
    return not (directory / "config.json").exists() and (
        (directory / "metadata.json").exists() or (directory / ".metadata").exists()
    )


def neither(directory: Path, key: str) -> UserError:
    what = "does not exist" if not directory.exists() else "holds neither config.json nor Megatron's metadata.json"
    return UserError(
        f"{key}={directory} {what}: give a Hugging Face directory, or a checkpoint such as RUN/checkpoints/step-000020"
    )


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
            tell(progress, "comparing", done, total, "M parameters")
            if name in others and lengths[name] != others[name]:
                differing.append(f"{name} has shape {list(lengths[name])} and {list(others[name])}")
            elif other is not None and one.dtype != other.dtype:
                differing.append(f"{name} is {_name(one.dtype)} and {_name(other.dtype)}")
            elif other is not None and digest != _digest(other):
                differing.append(f"{name} holds other values")
    return Comparison(len(lengths), total, overall.hexdigest(), differing)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor)).hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def called(key: str) -> Iterator[None]:
    """Errors of the configuration's checks, in the words of the command line."""
    try:
        yield
    except UserError as error:
        text = re.sub(r"trainer\.parallel\.(\w+)", lambda found: "--" + found[1].replace("_", "-"), str(error))
        text = text.replace("first_stage_layers", "--first-stage-layers")
        raise UserError(text.replace("model.path=", f"{key}=")) from None


def tell(progress: Progress, what: str, done: int, total: int, unit: str = "MB") -> None:
    progress(what, done // 10**6, total // 10**6, unit)
