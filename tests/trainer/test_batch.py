"""From rows to micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Recorded

from megatron_webrl.processor import Processor
from megatron_webrl.trainer import rows_of
from megatron_webrl.trainer.batch import collate, prepare, split

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


def test_micro_batches_hold_every_row_once_within_the_budget(recorded: Recorded, processor: Processor) -> None:
    """Packed: Σ lengths ≤ budget; padded: rows × longest ≤ budget; a longer row alone.  Packing never needs more."""
    samples = samples_of(recorded, processor)
    lengths = [len(s.ids) for s in samples]
    for budget in (1, 150, 400, 10_000):
        found = {}
        for packed in (True, False):
            found[packed] = parts = split(samples, budget, packed=packed)
            assert sorted(chain(*parts)) == list(range(len(samples)))
            for part in parts:
                size = sum(lengths[i] for i in part) if packed else len(part) * max(lengths[i] for i in part)
                assert len(part) == 1 or size <= budget
        assert len(found[True]) <= len(found[False])
        if budget >= max(lengths):  # first fit: at most one micro-batch is half empty
            assert len(found[True]) <= 2 * -(-sum(lengths) // budget)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("multiple", [1, 4])
def test_a_micro_batch_holds_its_rows(recorded: Recorded, processor: Processor, packed: bool, multiple: int) -> None:
    """Ids and positions of every row where `ends`, or its padded row, say; each picture once; every image token its own
    feature; predictors are one before their targets."""
    samples = samples_of(recorded, processor)
    index = [3, 0, 5, 1]
    batch = collate(samples, index, packed=packed, multiple=multiple, merge_size=processor.merge_size, device=CPU)
    length = batch.ids.shape[1]
    assert length % multiple == 0
    rows = [samples[i] for i in index]
    for b, sample in enumerate(rows):
        if packed:
            assert batch.ends is not None
            start = int(batch.ends[b])
            ids, positions = batch.ids[0, start:], batch.positions[:, 0, start:]
        else:
            ids, positions = batch.ids[b], batch.positions[:, b]
        assert ids[: len(sample.ids)].tolist() == sample.ids.tolist()
        assert positions[:, : len(sample.ids)].tolist() == sample.positions.tolist()
    if packed:
        assert batch.ids.shape[0] == 1
        assert batch.ends is not None and int(batch.ends[-1]) == length < sum(len(s.ids) for s in rows) + multiple
    distinct = {digest for s in rows for digest in s.digests}
    assert set(batch.images) == distinct and len(distinct) < sum(len(s.digests) for s in rows)
    assert list(batch.images.values()) == sorted(batch.images.values())
    features = sum(h * w for _, h, w in batch.images.values()) // processor.merge_size**2
    flat = batch.ids.transpose(0, 1).reshape(-1)
    assert (flat[batch.image_places] == processor.image_token_id).all()
    assert len(batch.image_places) == len(batch.image_features) == (batch.ids == processor.image_token_id).sum()
    assert batch.image_features.unique().tolist() == list(range(features))
    assert batch.targets.tolist() == [int(i) for s in rows for i in s.row.response_ids]
    assert flat[batch.predictors + len(batch.ids)].tolist() == batch.targets.tolist()


@pytest.mark.parametrize("packed", [True, False])
def test_an_empty_micro_batch_is_one_padding_row(packed: bool) -> None:
    batch = collate([], [], packed=packed, multiple=2, merge_size=2, device=CPU)
    assert batch.ids.shape == (1, 2)
    assert batch.predictors.numel() == batch.targets.numel() == batch.image_places.numel() == len(batch.images) == 0


def test_malformed_rows_are_refused(recorded: Recorded, processor: Processor) -> None:
    """A banned response token, a missing image, a video: the error names the step of the episode."""
    banned = np.zeros(processor.vocab_size, bool)
    banned[processor.banned_ids()] = True
    row = rows_of(recorded.groups[10].trajectories[1], 1.0)[0]
    with pytest.raises(ValueError, match=r"group 10, episode 1, step 0: .*never sampled"):
        prepare(replace(row, response_ids=processor.banned_ids()[:2]), processor, banned)
    with pytest.raises(ValueError, match=r"group 10, episode 1, step 0: .*image_pad"):
        prepare(replace(row, images=[]), processor, banned)
    video = np.append(row.prompt_ids, np.int32(processor.video_token_id))
    with pytest.raises(ValueError, match=r"group 10, episode 1, step 0: .*only images"):
        prepare(replace(row, prompt_ids=video), processor, banned)
