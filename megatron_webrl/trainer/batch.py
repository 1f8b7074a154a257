"""Rows to micro-batches within a token budget: expanded prompts, M-RoPE positions, packed end to end or padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_webrl.processor import Grid, Processor
from megatron_webrl.trajectory import FLOAT32, INT32, ImageRef, Trajectory, decode_steps, unpack

LENGTH_BUCKET = 64
"""Among rows whose lengths round to the same multiple, those with the same images come together."""


@dataclass
class Row:
    """One step of a trajectory: what is trained."""

    prompt_ids: np.ndarray
    """int32 [P], unexpanded: one image_pad an image."""
    images: list[ImageRef]
    response_ids: np.ndarray
    """int32 [R]."""
    behave_logprobs: np.ndarray
    """float32 [R]."""
    versions: np.ndarray
    """int32 [R]."""
    advantage: float
    name: str
    """Which step of which episode it is, for messages."""
    begins: bool = True
    """Whether it is its trajectory's first row: it counts the episode."""


def rows_of(trajectory: Trajectory, advantage: float) -> list[Row]:
    """The rows of a trajectory, each step of it with `advantage`; steps without response tokens are left out."""
    steps = [(i, step) for i, step in enumerate(decode_steps(trajectory.payload)) if step.response_ids]
    key = trajectory.assignment
    return [
        Row(
            prompt_ids=unpack(step.prompt_ids, INT32),
            images=step.images,
            response_ids=unpack(step.response_ids, INT32),
            behave_logprobs=unpack(step.logprobs, FLOAT32),
            versions=unpack(step.versions, INT32),
            advantage=advantage,
            name=f"group {key.group_id}, episode {key.sample_index}, step {i}",
            begins=number == 0,
        )
        for number, (i, step) in enumerate(steps)
    ]


@dataclass
class Sample:
    """A row made ready: what of it does not change between passes."""

    row: Row
    ids: np.ndarray
    """int64 [L]: expanded prompt, then response."""
    positions: np.ndarray
    """int64 [3, L]: M-RoPE."""
    image_places: np.ndarray
    """int64: indices in `ids` of the image tokens, in order."""
    digests: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return len(self.row.response_ids)


def prepare(row: Row, processor: Processor, banned: np.ndarray) -> Sample:
    """Expand and place a row.  banned: bool [V], tokens never sampled.

    Raises ValueError naming the row if image_pad tokens and images differ in number, if the prompt holds a video, or if
    the response holds a token outside the vocabulary or one that is never sampled (its logprob would be −inf).
    """
    response = row.response_ids.astype(np.int64)
    if response.size and (response.min() < 0 or response.max() >= len(banned) or banned[response].any()):
        bad = [int(i) for i in response if not 0 <= i < len(banned) or banned[i]]
        raise ValueError(f"{row.name}: the response holds tokens that are never sampled: {bad[:5]}")
    if processor.video_token_id in row.prompt_ids:
        raise ValueError(f"{row.name}: the prompt holds a video (<|video_pad|>): only images are supported")
    grids = [image.grid for image in row.images]
    try:
        prompt = processor.expand(row.prompt_ids, grids).astype(np.int64)
    except ValueError as error:
        raise ValueError(f"{row.name}: {error}") from None
    ids = np.concatenate([prompt, response])
    return Sample(
        row=row,
        ids=ids,
        positions=mrope_positions(row.prompt_ids, len(response), grids, processor),
        image_places=np.flatnonzero(prompt == processor.image_token_id),
        digests=tuple(image.digest for image in row.images),
    )


def mrope_positions(prompt_ids: np.ndarray, response: int, grids: Sequence[Grid], processor: Processor) -> np.ndarray:
    """Positions int64 [3, L] (time, height, width) of the expanded prompt and `response` tokens after it.

    Text counts on in all three axes; an image starts where the text before it ended and moves what follows by the
    larger side of its merged grid (Qwen3-VL's get_rope_index).
    """
    merge = processor.merge_size
    pieces: list[np.ndarray] = []
    start = first = 0
    places = np.flatnonzero(prompt_ids == processor.image_token_id).tolist()
    for place, (t, h, w) in zip(places, grids, strict=True):
        text = place - first
        pieces.append(np.broadcast_to(start + np.arange(text), (3, text)))
        start, first = start + text, place + 1
        tall, wide = h // merge, w // merge
        pieces.append(start + np.indices((t, tall, wide)).reshape(3, -1))
        start += max(tall, wide)
    text = len(prompt_ids) - first + response
    pieces.append(np.broadcast_to(start + np.arange(text), (3, text)))
    return np.concatenate(pieces, axis=1)


def split(samples: Sequence[Sample], max_tokens: int, *, packed: bool) -> list[list[int]]:
    """Indices of samples in micro-batches of at most `max_tokens` tokens, padding included (a longer row is alone).

    packed: Σ lengths counts, and rows go where there is room, longest first; else rows × longest counts, and rows of
    similar length come together.  Rows with the same images meet in one micro-batch, which then encodes them once.
    """
    key = [(-(-len(s.ids) // LENGTH_BUCKET), s.digests, len(s.ids), i) for i, s in enumerate(samples)]
    order = sorted(range(len(samples)), key=key.__getitem__, reverse=packed)
    bins: list[list[int]] = []
    if packed:
        room: list[int] = []
        for i in order:
            length = len(samples[i].ids)
            place = next((b for b, left in enumerate(room) if left >= length), len(bins))
            if place == len(bins):
                bins.append([])
                room.append(max_tokens)
            bins[place].append(i)
            room[place] -= length
        return bins
    longest = 0
    for i in order:
        longest = max(longest, len(samples[i].ids))
        if bins and (len(bins[-1]) + 1) * longest <= max_tokens:
            bins[-1].append(i)
        else:
            bins.append([i])
            longest = len(samples[i].ids)
    return bins


@dataclass
class MicroBatch:
    """Rows end to end (packed: B = 1) or padded on the right.  S: padded length, B: rows, N: response tokens."""

    ids: Tensor
    """int64 [B, S]."""
    positions: Tensor
    """int64 [3, B, S]: of each row by itself."""
    ends: Tensor | None
    """int32 [rows + 1] on the host: where packed rows begin and end in S; None if padded."""
    images: dict[str, Grid]
    """Distinct images by digest, those of one size together; empty on later pipeline stages."""
    patches: Tensor
    """float32 [Σ h·w, C·P·P] of `images`, normalised; filled in later."""
    image_places: Tensor
    """int64: image tokens, as indices into [S, B] flattened."""
    image_features: Tensor
    """int64: which feature, of all distinct images', belongs there."""
    predictors: Tensor
    """int64 [N]: tokens whose successors are response tokens, as indices into [S, B] flattened."""
    targets: Tensor
    """int64 [N]: response tokens, row by row."""
    index: list[int]
    """Which samples the rows are."""


def collate(
    samples: Sequence[Sample],
    index: Sequence[int],
    *,
    packed: bool,
    multiple: int,
    merge_size: int | None,
    device: torch.device,
    least: int = 1,
) -> MicroBatch:
    """Micro-batch of `samples[i]` for i in index.  With no rows it is one padding row without response tokens, which
    lets a rank without work join the collectives.

    multiple, least: S is a multiple of the one and at least the other; the last packed row is the longer for it, which no
    other token sees.
    merge_size: of the image processor; None on pipeline stages after the first, which need no images.
    """
    rows = [samples[i] for i in index]
    lengths = [len(s.ids) for s in rows] or [1]
    length = -(-max(least, sum(lengths) if packed else max(lengths)) // multiple) * multiple
    count = 1 if packed else len(lengths)
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if packed else np.arange(count)
    """Of each row, as an index into [S, B] flattened; its next token is `count` further."""
    ids = np.zeros(length * count, np.int64)
    positions = np.zeros((3, length * count), np.int64)
    none = np.zeros(0, np.int64)
    places, features, predictors = [none], [none], [none]
    images, begin = _distinct(rows, merge_size) if merge_size is not None else ({}, {})
    for start, sample in zip(first, rows, strict=False):
        at = start + np.arange(len(sample.ids)) * count
        ids[at] = sample.ids
        positions[:, at] = sample.positions
        predictors.append(at[len(at) - sample.tokens - 1 : -1])
        if images:
            places.append(at[sample.image_places])
            features += [np.arange(*begin[digest]) for digest in sample.digests]
    ends = None
    if packed:
        ends = torch.from_numpy(np.append(first, length).astype(np.int32))

    def to(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        ids=to(ids.reshape(length, count).T),
        positions=to(positions.reshape(3, length, count).transpose(0, 2, 1)),
        ends=ends,
        images=images,
        patches=torch.empty(0),
        image_places=to(np.concatenate(places)),
        image_features=to(np.concatenate(features)),
        predictors=to(np.concatenate(predictors)),
        targets=to(np.concatenate([none, *(s.row.response_ids.astype(np.int64) for s in rows)])),
        index=list(index),
    )


def _distinct(rows: Sequence[Sample], merge_size: int) -> tuple[dict[str, Grid], dict[str, tuple[int, int]]]:
    """The rows' images in order of size, and of each the first of its features and their end."""
    found = {image.digest: image.grid for sample in rows for image in sample.row.images}
    images = dict(sorted(found.items(), key=lambda item: (item[1], item[0])))
    first, begin = 0, {}
    for digest, (t, h, w) in images.items():
        end = first + t * h * w // merge_size**2
        begin[digest] = (first, end)
        first = end
    return images, begin
