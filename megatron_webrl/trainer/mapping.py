"""One table between Hugging Face names and Megatron's, with how a tensor is sliced; read for loading and for export."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LAYERS = "language_model.decoder.layers."

LAYER_STATES = tuple(
    f"{_LAYERS}{module}._extra_state"
    for module in (
        "self_attention.linear_qkv",
        "self_attention.core_attention",
        "self_attention.q_layernorm",
        "self_attention.k_layernorm",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
)
"""Keys, in a distributed checkpoint, of what a decoder layer's modules keep beside their weights.  It is empty (but under
FP8), and which of them there are depends on the layers' implementation, but a model that has one asks for it."""
FINAL_STATE = "language_model.decoder.final_layernorm._extra_state"


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
    """Its name in its chunk of the model."""
    hf: tuple[str, ...]
    slicing: Slicing
    stage: int
    """Pipeline stage; in a virtual pipeline of pp stages, chunk j in order of layers, which is on stage j mod pp."""
    stored: str
    """Its key in a distributed checkpoint, where names are transformer-engine's and the decoder layers lie in a stack."""
    layer: int | None = None
    """Its place in that stack: the decoder layer, counted over all stages."""
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
    stage (or chunk); fused_norms: transformer-engine's layers, where the norm before a linear layer is part of it.
    """
    text = "model.language_model."
    vision = {name.removeprefix("model."): name for name in sorted(vision_names)}
    entries = [Entry(megatron, (hf,), Slicing.WHOLE, 0, megatron) for megatron, hf in vision.items()]
    embedding, words = f"{text}embed_tokens.weight", "language_model.embedding.word_embeddings.weight"
    entries.append(Entry(words, (embedding,), Slicing.VOCAB, 0, words))
    local_names = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    places = [(stage, local) for stage, count in enumerate(stages) for local in range(count)]
    for layer, (stage, local) in enumerate(places):
        for megatron, hf, slicing in (
            ("self_attention.linear_qkv.layer_norm_weight", ["input_layernorm"], Slicing.WHOLE),
            ("self_attention.linear_qkv.weight", [f"self_attn.{x}_proj" for x in "qkv"], Slicing.QKV),
            ("self_attention.q_layernorm.weight", ["self_attn.q_norm"], Slicing.WHOLE),
            ("self_attention.k_layernorm.weight", ["self_attn.k_norm"], Slicing.WHOLE),
            ("self_attention.linear_proj.weight", ["self_attn.o_proj"], Slicing.ROW),
            ("mlp.linear_fc1.layer_norm_weight", ["post_attention_layernorm"], Slicing.WHOLE),
            ("mlp.linear_fc1.weight", ["mlp.gate_proj", "mlp.up_proj"], Slicing.COLUMN),
            ("mlp.linear_fc2.weight", ["mlp.down_proj"], Slicing.ROW),
        ):
            names = tuple(f"{text}layers.{layer}.{name}.weight" for name in hf)
            name = megatron if fused_norms else local_names.get(megatron, megatron)
            entries.append(Entry(f"{_LAYERS}{local}.{name}", names, slicing, stage, _LAYERS + megatron, layer))
    last = len(stages) - 1
    norm, head = "language_model.decoder.final_layernorm.weight", "language_model.output_layer.weight"
    entries.append(Entry(norm, (f"{text}norm.weight",), Slicing.WHOLE, last, norm))
    if not shapes.tied:
        entries.append(Entry(head, ("lm_head.weight",), Slicing.VOCAB, last, head))
    elif last:
        entries.append(Entry(head, (embedding,), Slicing.VOCAB, last, words, exported=False))
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


class Piece(NamedTuple):
    """Rows of one rank's tensor that lie together in the whole tensor of a distributed checkpoint."""

    rows: slice
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Of their first element in the whole tensor."""


def whole_shape(entry: Entry, lengths: Sequence[Sequence[int]], shapes: Shapes, *, ranks: int) -> tuple[int, ...]:
    """Shape of the whole tensor in a distributed checkpoint, the stack's dimension apart.

    lengths: shapes of the Hugging Face tensors, in order of `hf`.
    """
    height = padded_vocab(shapes.vocab, ranks) if entry.slicing is Slicing.VOCAB else sum(s[0] for s in lengths)
    return (height, *lengths[0][1:])


def pieces(entry: Entry, lengths: Sequence[Sequence[int]], shapes: Shapes, *, rank: int, ranks: int) -> list[Piece]:
    """Where one rank's `to_megatron` lies in the whole tensor; nowhere if another rank writes it."""
    height, *rest = whole_shape(entry, lengths, shapes, ranks=ranks)
    if entry.slicing is Slicing.WHOLE:
        return [] if rank else [Piece(slice(None), (height, *rest), (0,) * (1 + len(rest)))]
    if entry.slicing is Slicing.ROW:
        width = rest[0] // ranks
        return [Piece(slice(None), (height, width), (0, rank * width))]
    # gate and up: each sliced, and one after the other in the whole
    joined = [length[0] for length in lengths] if entry.slicing is Slicing.COLUMN else [height]
    found, start = [], 0
    for part in joined:
        own = part // ranks
        rows = slice(start // ranks, start // ranks + own)
        found.append(Piece(rows, (own, *rest), (start + rank * own, *(0 for _ in rest))))
        start += part
    return found


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
