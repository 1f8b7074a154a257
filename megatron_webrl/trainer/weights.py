"""Weights of a Hugging Face directory into the model, and back out of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import Qwen3VLConfig

from megatron_webrl.errors import UserError
from megatron_webrl.run_directory import replaced_path
from megatron_webrl.trainer.layout import Layout
from megatron_webrl.trainer.mapping import Entry, Shapes, Slicing, table, to_hf, to_megatron

if TYPE_CHECKING:
    from megatron_webrl.trainer.export import Bucket

_WEIGHT_SUFFIXES = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5",
    ".msgpack", ".npz",
)  # fmt: skip


class SafetensorsDirectory:
    """Names, shapes and dtypes of the tensors in a directory's *.safetensors, those that the index names if there is one;
    what they hold is read when it is asked for.

    key: what errors call the directory.  Raises UserError naming the file if one is unreadable, or lacking though the index
    names it, and for a tensor that is in two files.
    """

    def __init__(self, directory: Path, *, key: str = "model.path") -> None:
        self._files: dict[str, Path] = {}
        self.lengths: dict[str, list[int]] = {}
        """Shape by name."""
        self.dtypes: dict[str, str] = {}
        """As safetensors calls them, by name."""
        self._called = f"{key}={directory}"
        index = _index(directory, self._called)
        single = directory / "model.safetensors"  # it goes before others, as in transformers
        plain = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
        files = plain if index is None else sorted(set(index.values()))
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (not a dict)
                        if index is not None and index.get(name) != file:
                            continue
                        if name in self._files:
                            raise UserError(
                                f"{self._called}: {name} is in {self._files[name].name} and in {file.name}, and there is no "
                                "index: remove what is left of another download"
                            )
                        self._files[name] = file
                        found = opened.get_slice(name)
                        self.lengths[name], self.dtypes[name] = found.get_shape(), found.get_dtype()
            except (OSError, SafetensorError) as error:
                raise UserError(f"{self._called}: {file.name} is not readable ({error}): fetch it again") from None

    def check_names(self, entries: Sequence[Entry], shapes: Shapes) -> None:
        """Raises UserError unless the tensors are those of the table (tied models may hold their output layer too, if it is
        that)."""
        expected = {name for entry in entries for name in entry.hf}
        spare = set(self._files) - expected - ({"lm_head.weight"} if shapes.tied else set())
        if lacking := sorted(expected - set(self._files)) or sorted(spare):
            lack = bool(expected - set(self._files))
            remedy = (
                "fetch them again" if lack else "only plain Qwen3-VL weights can be read, no adapters or quantized ones"
            )
            if lacking == ["lm_head.weight"] and lack:
                remedy = "if the model is tied, set tie_word_embeddings at the top level of config.json"
            raise UserError(
                f"{self._called}: the safetensors {'lack' if lack else 'hold unknown'} {lacking[0]} ({len(lacking)} in all): "
                f"{remedy}"
            )
        if shapes.tied and "lm_head.weight" in self._files:
            head, embedding = self.slices(["lm_head.weight", "model.language_model.embed_tokens.weight"])
            if not torch.equal(head[:], embedding[:]):
                raise UserError(
                    f"{self._called}: lm_head.weight differs from the embeddings, though config.json ties them: set "
                    "tie_word_embeddings to false there"
                )

    def slices(self, names: Sequence[str]) -> list[Any]:
        """To be indexed like tensors.  A file stays mapped into memory as long as what was read from it, no longer."""
        return [safe_open(self._files[name], framework="pt").get_slice(name) for name in names]


def _index(directory: Path, called: str) -> dict[str, Path] | None:
    """The file of each tensor, there or not; None if the directory has no index, or a single file beside it."""
    index = directory / "model.safetensors.index.json"
    try:
        found = {str(name): directory / str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        single = directory / "model.safetensors"
        return None if single.exists() and single not in found.values() else found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{called}: {index.name} is malformed ({error!r}): fetch it again") from None


def shapes_of(hf: Qwen3VLConfig) -> Shapes:
    """What the mapping has to know of a model."""
    text: Any = hf.text_config
    return Shapes(
        layers=text.num_hidden_layers,
        kv_groups=text.num_key_value_heads,
        vocab=text.vocab_size,
        tied=bool(hf.tie_word_embeddings),
    )


class HuggingFaceWeights:
    """A directory's safetensors, and the table that maps them.

    Raises UserError naming the file if one is unreadable or the names are not those of the model.
    """

    def __init__(self, directory: Path, hf: Qwen3VLConfig, layout: Layout, *, fused_norms: bool) -> None:
        self.directory = directory
        self._tensors = SafetensorsDirectory(directory)
        self.lengths = self._tensors.lengths
        self.shapes = shapes_of(hf)
        vision = [name for name in self.lengths if name.startswith("model.visual.")]
        stages = layout.parallel.stage_layers(self.shapes.layers)
        self.entries = table(self.shapes, vision, stages=stages, fused_norms=fused_norms)
        self._tensors.check_names(self.entries, self.shapes)

    def load(self, chunks: Sequence[torch.nn.Module], layout: Layout) -> None:
        """Copy this rank's slices into its chunks of the model."""
        parameters = _parameters(chunks, layout)
        mine = [entry for entry in self.entries if entry.stage % layout.pp == layout.pp_rank]
        if odd := sorted(set(parameters) ^ {(entry.stage, entry.megatron) for entry in mine}):
            raise UserError(
                f"model.path={self.directory}: its tensors and its config.json differ in {odd[0][1]} ({len(odd)} in all): the "
                "files are of different models"
            )
        for entry in mine:
            sources = self._tensors.slices(entry.hf)
            value = to_megatron(entry, sources, self.shapes, rank=layout.tp_rank, ranks=layout.tp)
            target = parameters[entry.stage, entry.megatron]
            cut = entry.slicing is Slicing.VOCAB and self.lengths[entry.hf[0]][0] != self.shapes.vocab
            if cut or target.shape != value.shape:
                raise UserError(
                    f"model.path={self.directory}: {entry.hf[0]} has shape {self.lengths[entry.hf[0]]}, which does not fit "
                    "its config.json: the files are of different models"
                )
            target.data.copy_(value)

    @torch.no_grad()
    def export(
        self, chunks: Sequence[torch.nn.Module], layout: Layout, plan: Sequence[Bucket]
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """This stage's buckets, by index in `plan`, each as its Hugging Face tensors, in the order of its names; they are
        gone with the next one.

        Collective for the tensor-parallel ranks of the first data-parallel shard, which gather one bucket at a time.  Only
        rank 0 of the group gets tensors, the others empty lists; other shards get nothing.
        """
        if layout.dp_rank != 0:
            return
        parameters = _parameters(chunks, layout)
        for index, bucket in enumerate(plan):
            if bucket.stage != layout.pp_rank:
                continue
            own = [parameters[entry.stage, entry.megatron].detach() for entry in bucket.entries]
            if odd := [e.megatron for e, p in zip(bucket.entries, own, strict=True) if p.dtype != bucket.dtype]:
                raise TypeError(f"{odd[0]} is not {bucket.dtype}")
            pieces = self._gather(bucket.entries, own, layout)
            whole: list[Tensor] = []
            if layout.tp_rank == 0:
                for entry, parts in zip(bucket.entries, pieces, strict=True):
                    whole += to_hf(entry, parts, self.shapes, [self.lengths[name][0] for name in entry.hf])
            yield index, whole

    def _gather(self, entries: Sequence[Entry], own: Sequence[Tensor], layout: Layout) -> list[list[Tensor]]:
        """Every tensor-parallel rank's piece of each entry, in rank order, by one collective; of replicated ones, this rank's."""
        sliced = [i for i, entry in enumerate(entries) if entry.slicing is not Slicing.WHOLE and layout.tp > 1]
        pieces = [[tensor] for tensor in own]
        if sliced:
            mine = torch.cat([own[i].reshape(-1) for i in sliced]).view(torch.uint8)
            everyone = torch.empty(layout.tp * len(mine), dtype=torch.uint8, device=mine.device)
            dist.all_gather_single(everyone, mine, group=layout.tp_group)
            sizes = [own[i].numel() for i in sliced]
            ranks = [part.view(own[0].dtype).split(sizes) for part in everyone.split(len(mine))]
            for place, i in enumerate(sliced):
                pieces[i] = [rank[place].view(own[i].shape) for rank in ranks]
        return pieces


def _parameters(chunks: Sequence[torch.nn.Module], layout: Layout) -> dict[tuple[int, str], torch.nn.Parameter]:
    """This rank's, by chunk in order of layers and name."""
    return {
        (layout.pp_rank + i * layout.pp, name): parameter
        for i, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def copy_all_but_weights(model_path: Path, directory: Path) -> None:
    """Configuration, tokenizer and processor files of a model into `directory`, made if it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in model_path.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, directory / file.name)  # not its mode: it may be read-only


def replace_directory(new: Path, target: Path) -> None:
    """Rename `new` to `target`, in place of what was there."""
    old = replaced_path(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
