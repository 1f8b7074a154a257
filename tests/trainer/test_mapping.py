"""The table of names: whole tensors to slices and back."""

from __future__ import annotations

import pytest
import torch

from megatron_webrl.trainer.mapping import Entry, Shapes, Slicing, padded_vocab, table, to_hf, to_megatron

SHAPES = Shapes(layers=4, kv_groups=4, vocab=50, tied=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("slicing", "heights"),
    [
        (Slicing.WHOLE, [24]),
        (Slicing.ROW, [24]),
        (Slicing.COLUMN, [24, 24]),
        (Slicing.QKV, [8 * 6, 4 * 6, 4 * 6]),
        (Slicing.VOCAB, [50]),
    ],
)
def test_round_trip(slicing: Slicing, heights: list[int], ranks: int) -> None:
    """to_hf undoes to_megatron bit by bit, at every tensor-parallel size, vocabularies that do not divide included."""
    whole = [torch.randn(height, 16) for height in heights]
    entry = Entry("m", tuple("abc"[: len(heights)]), slicing, 0, "m")
    pieces = [to_megatron(entry, whole, SHAPES, rank=rank, ranks=ranks) for rank in range(ranks)]
    if slicing is Slicing.VOCAB:
        assert sum(len(piece) for piece in pieces) == padded_vocab(50, ranks)
    back = to_hf(entry, pieces, SHAPES, heights)
    assert len(back) == len(whole)
    assert all(torch.equal(a, b) for a, b in zip(back, whole, strict=True))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("fused", [True, False])
def test_names_are_unique(tied: bool, stages: int, fused: bool) -> None:
    """No Megatron name twice on a stage, no exported Hugging Face name twice, all layers there."""
    entries = table(
        SHAPES._replace(tied=tied), ["model.visual.x"], stages=[SHAPES.layers // stages] * stages, fused_norms=fused
    )
    assert len({(e.stage, e.megatron) for e in entries}) == len(entries)
    exported = [name for e in entries if e.exported for name in e.hf]
    assert len(set(exported)) == len(exported)
    assert ("lm_head.weight" in exported) is not tied
    assert sum("q_proj" in name for name in exported) == SHAPES.layers
