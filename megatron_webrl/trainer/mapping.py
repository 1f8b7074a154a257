"""One table between Hugging Face names and Megatron's, with how a tensor is sliced; read for loading and for export."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Slicing(Enum):
    """How Hugging Face tensors become one rank's Megatron tensor.  `n` is the tensor-parallel size."""

    WHOLE = "whole"
    """Replicated."""
    COLUMN = "column"
    """Dimension 0 in n pieces; several tensors (gate, up) are joined after slicing."""
    QKV = "qkv"
    """q, k, v in n pieces of dimension 0, interleaved by key-value group: [group, (q heads, k, v), head_dim]."""
    ROW = "row"
    """Dimension 1 in n pieces."""
    VOCAB = "vocab"
    """Dimension 0, padded with zeros to a multiple of n, in n pieces."""


class Entry(NamedTuple):
    """One Megatron parameter."""

    megatron: str
    """Its name in the model of its pipeline stage."""
    hf: tuple[str, ...]
    slicing: Slicing
    stage: int
    exported: bool = True
    """False for the output layer's copy of tied embeddings."""


class Shapes(NamedTuple):
    """What the slicing has to know of the model."""

    layers: int
    kv_groups: int
    vocab: int
    tied: bool


def table(shapes: Shapes, vision_names: Sequence[str], *, stages: Sequence[int], fused_norms: bool) -> list[Entry]:
    """All entries of a model, in order of stages.

    vision_names: the Hugging Face names under `model.visual.`, kept as they are; stages: decoder layers of each pipeline
    stage; fused_norms: transformer-engine's layers, where the norm before a linear layer is part of it.
    """
    text = "model.language_model."
    entries = [Entry(name.removeprefix("model."), (name,), Slicing.WHOLE, 0) for name in sorted(vision_names)]
    embedding = f"{text}embed_tokens.weight"
    entries.append(Entry("language_model.embedding.word_embeddings.weight", (embedding,), Slicing.VOCAB, 0))
    input_norm = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused_norms else "pre_mlp_layernorm.weight"
    places = [(stage, local) for stage, count in enumerate(stages) for local in range(count)]
    for layer, (stage, local) in enumerate(places):
        for megatron, hf, slicing in (
            (input_norm, ["input_layernorm"], Slicing.WHOLE),
            ("self_attention.linear_qkv.weight", [f"self_attn.{x}_proj" for x in "qkv"], Slicing.QKV),
            ("self_attention.q_layernorm.weight", ["self_attn.q_norm"], Slicing.WHOLE),
            ("self_attention.k_layernorm.weight", ["self_attn.k_norm"], Slicing.WHOLE),
            ("self_attention.linear_proj.weight", ["self_attn.o_proj"], Slicing.ROW),
            (mlp_norm, ["post_attention_layernorm"], Slicing.WHOLE),
            ("mlp.linear_fc1.weight", ["mlp.gate_proj", "mlp.up_proj"], Slicing.COLUMN),
            ("mlp.linear_fc2.weight", ["mlp.down_proj"], Slicing.ROW),
        ):
            names = tuple(f"{text}layers.{layer}.{name}.weight" for name in hf)
            entries.append(Entry(f"language_model.decoder.layers.{local}.{megatron}", names, slicing, stage))
    last = len(stages) - 1
    entries.append(Entry("language_model.decoder.final_layernorm.weight", (f"{text}norm.weight",), Slicing.WHOLE, last))
    head = "language_model.output_layer.weight"
    if not shapes.tied:
        entries.append(Entry(head, ("lm_head.weight",), Slicing.VOCAB, last))
    elif last:
        entries.append(Entry(head, (embedding,), Slicing.VOCAB, last, exported=False))
    return entries


def padded_vocab(vocab: int, ranks: int) -> int:
    """Vocabulary rows that Megatron holds over all tensor-parallel ranks."""
    return -(-vocab // ranks) * ranks


def to_megatron(entry: Entry, sources: Sequence[Any], shapes: Shapes, *, rank: int, ranks: int) -> Tensor:
    """One rank's tensor.  sources: tensors, or safetensors slices (only this rank's part is read), in order of `hf`."""
    if entry.slicing is Slicing.WHOLE:
        return sources[0][:]
    if entry.slicing is Slicing.ROW:
        width = _shape(sources[0])[1] // ranks
        return sources[0][:, rank * width : (rank + 1) * width]
    if entry.slicing is Slicing.VOCAB:
        rows = padded_vocab(shapes.vocab, ranks) // ranks
        part = sources[0][rank * rows : min((rank + 1) * rows, shapes.vocab)]
        return torch.nn.functional.pad(part, (0, 0, 0, rows - len(part)))
    parts = []
    for source in sources:
        height = _shape(source)[0] // ranks
        parts.append(source[rank * height : (rank + 1) * height])
    if entry.slicing is Slicing.COLUMN:
        return torch.cat(parts)
    groups = shapes.kv_groups // ranks
    return torch.cat([p.view(groups, -1, p.shape[1]) for p in parts], dim=1).reshape(-1, parts[0].shape[1])


def to_hf(entry: Entry, pieces: Sequence[Tensor], shapes: Shapes, heights: Sequence[int]) -> list[Tensor]:
    """The inverse: tensors in order of `hf` from the pieces of all ranks, in rank order.

    heights: dimension 0 of each whole Hugging Face tensor.
    """
    if entry.slicing is Slicing.WHOLE:
        return [pieces[0]]
    if entry.slicing is Slicing.ROW:
        return [torch.cat(list(pieces), dim=1)]
    if entry.slicing is Slicing.VOCAB:
        return [torch.cat(list(pieces))[: shapes.vocab]]
    ranks = len(pieces)
    if entry.slicing is Slicing.COLUMN:
        split = [piece.split([h // ranks for h in heights]) for piece in pieces]
    else:
        groups = shapes.kv_groups // ranks
        sizes = [h // shapes.kv_groups for h in heights]
        split = [
            tuple(
                part.reshape(-1, piece.shape[1]) for part in piece.view(groups, -1, piece.shape[1]).split(sizes, dim=1)
            )
            for piece in pieces
        ]
    return [torch.cat(parts) for parts in zip(*split, strict=True)]


def _shape(source: Any) -> Sequence[int]:
    return source.shape if isinstance(source, Tensor) else source.get_shape()
