"""From rows to micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from ranks import Recorded

from megatron_webrl.errors import UserError
from megatron_webrl.processor import Processor
from megatron_webrl.trainer import rows_of
from megatron_webrl.trainer.batch import Pixels, collate, pack, prepare

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def processor(tiny_model_dir: Path) -> Processor:
    return Processor.load(tiny_model_dir)


@pytest.fixture(scope="module")
def recorded(processor: Processor) -> Recorded:
    return Recorded(processor, groups=3, steps=3)


def samples_of(recorded: Recorded, processor: Processor) -> list:
    banned = np.zeros(processor.vocab_size, bool)
    banned[processor.banned_ids()] = True
    trajectories = [t for group in recorded.groups.values() for t in group.trajectories]
    return [prepare(row, processor, banned) for t in trajectories for row in rows_of(t, 1.0)]


def test_positions_are_those_of_transformers(recorded: Recorded, processor: Processor, tiny_model_dir: Path) -> None:
    """M-RoPE positions equal get_rope_index for prompts with one and two images of different sizes."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_pretrained(tiny_model_dir)).model
    samples = samples_of(recorded, processor)
    assert {len(s.digests) for s in samples} == {1, 2}
    for sample in samples:
        ids = torch.from_numpy(sample.ids)[None]
        expected, _ = model.get_rope_index(
            ids,
            image_grid_thw=torch.tensor([image.grid for image in sample.row.images]),
            mm_token_type_ids=(ids == processor.image_token_id).int(),
        )
        np.testing.assert_array_equal(sample.positions, expected[:, 0].numpy())


def test_packs_hold_every_row_once_within_the_budget(recorded: Recorded, processor: Processor) -> None:
    """Rows × longest ≤ budget, a longer row alone."""
    samples = samples_of(recorded, processor)
    for budget in (1, 150, 400, 10_000):
        packs = pack(samples, budget)
        assert sorted(chain(*packs)) == list(range(len(samples)))
        for part in packs:
            assert len(part) == 1 or len(part) * max(len(samples[i].ids) for i in part) <= budget
    assert len(pack(samples, 10_000)) == 1


def test_distinct_images_are_encoded_once(recorded: Recorded, processor: Processor) -> None:
    """A micro-batch holds each picture once, and every image token its own feature."""
    samples = samples_of(recorded, processor)
    batch = collate(samples, range(len(samples)), Pixels(processor, recorded.images), multiple=1, device=CPU)
    distinct = {digest for s in samples for digest in s.digests}
    assert len(batch.grids) == len(distinct) < sum(len(s.digests) for s in samples)
    assert sum(h * w for _, h, w in batch.grids) == len(batch.patches)
    assert batch.grids == sorted(batch.grids)
    flat = batch.ids.transpose(0, 1).reshape(-1)
    assert (flat[batch.image_places] == processor.image_token_id).all()
    assert len(batch.image_places) == len(batch.image_features) == (batch.ids == processor.image_token_id).sum()
    assert batch.image_features.unique().numel() == len(batch.patches) // processor.merge_size**2
    assert batch.targets.tolist() == [int(i) for s in samples for i in s.row.response_ids]


def test_malformed_rows_are_refused(recorded: Recorded, processor: Processor) -> None:
    """A banned response token, a missing image, and a grid that the processor does not make."""
    banned = np.zeros(processor.vocab_size, bool)
    banned[processor.banned_ids()] = True
    row = rows_of(recorded.groups[10].trajectories[0], 1.0)[0]
    with pytest.raises(ValueError, match="never sampled"):
        prepare(replace(row, response_ids=processor.banned_ids()[:2]), processor, banned)
    with pytest.raises(ValueError, match="image_pad"):
        prepare(replace(row, images=[]), processor, banned)
    image = row.images[0]
    pixels = Pixels(processor, recorded.images)
    with pytest.raises(UserError, match="processor files differ"):
        pixels.get({image.digest: msgspec.structs.replace(image, grid=(1, 2, 2)).grid})
