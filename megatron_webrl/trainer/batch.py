"""Rows to micro-batches: expanded prompts, M-RoPE positions, images decoded once, padding within a token budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_webrl.errors import UserError
from megatron_webrl.processor import Grid, Processor
from megatron_webrl.trajectory import FLOAT32, INT32, ImageRef, Trajectory, decode_steps, unpack

PIXEL_CACHE_BYTES = 1 << 30
"""Decoded pixels kept within a step; what does not fit is decoded again."""
LENGTH_BUCKET = 64
"""Rows whose lengths round to the same multiple may share a micro-batch in the order of their images."""


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
    group_id: int
    begins: bool = True
    """Whether it is its trajectory's first row: it counts the episode."""


def rows_of(trajectory: Trajectory, advantage: float) -> list[Row]:
    """The rows of a trajectory, each step of it with `advantage`; steps without response tokens are left out."""
    steps = [step for step in decode_steps(trajectory.payload) if step.response_ids]
    return [
        Row(
            prompt_ids=unpack(step.prompt_ids, INT32),
            images=step.images,
            response_ids=unpack(step.response_ids, INT32),
            behave_logprobs=unpack(step.logprobs, FLOAT32),
            versions=unpack(step.versions, INT32),
            advantage=advantage,
            group_id=trajectory.assignment.group_id,
            begins=number == 0,
        )
        for number, step in enumerate(steps)
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

    Raises ValueError if image_pad tokens and images differ in number, or if the response holds a token outside the
    vocabulary or one that is never sampled (its logprob would be −inf).
    """
    response = row.response_ids.astype(np.int64)
    if response.size and (response.min() < 0 or response.max() >= len(banned) or banned[response].any()):
        bad = [int(i) for i in response if not 0 <= i < len(banned) or banned[i]]
        raise ValueError(f"group {row.group_id}: response holds tokens that are never sampled: {bad[:5]}")
    grids = [image.grid for image in row.images]
    prompt = processor.expand(row.prompt_ids, grids).astype(np.int64)
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


def pack(samples: Sequence[Sample], max_tokens: int) -> list[list[int]]:
    """Indices of samples in micro-batches: rows × longest ≤ max_tokens (a longer row is alone).

    Rows of similar length come together, and among them those with the same images, which are then encoded once.
    """
    key = [(-(-len(s.ids) // LENGTH_BUCKET), s.digests, len(s.ids), i) for i, s in enumerate(samples)]
    packs: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(samples)), key=key.__getitem__):
        longest = max(longest, len(samples[i].ids))
        if packs and (len(packs[-1]) + 1) * longest <= max_tokens:
            packs[-1].append(i)
        else:
            packs.append([i])
            longest = len(samples[i].ids)
    return packs


class Pixels:
    """Pixels of a step's images by digest: decoded when first asked for, the least recently used ones forgotten."""

    def __init__(self, processor: Processor, images: Mapping[str, bytes]) -> None:
        self.merge_size = processor.merge_size
        self._processor = processor
        self._images = images
        self._decoded: OrderedDict[str, tuple[Tensor, Grid]] = OrderedDict()
        self._bytes = 0

    def get(self, wanted: Mapping[str, Grid]) -> list[Tensor]:
        """Patches float32 [h·w, C·P·P] (one frame) of each image, in order of `wanted`.

        Raises KeyError for an image that was not fetched, UserError if one has another grid than its reference says.
        """
        lacking = [digest for digest in wanted if digest not in self._decoded]
        if lacking:
            self._decode(lacking)
        for digest, grid in wanted.items():
            if self._decoded[digest][1] != grid:
                raise UserError(
                    f"screenshot {digest} becomes {self._decoded[digest][1]} patches, but its reference says {grid}: "
                    "the trainer's processor files differ from the workers'"
                )
            self._decoded.move_to_end(digest)
        found = [self._decoded[digest][0] for digest in wanted]
        while self._bytes > PIXEL_CACHE_BYTES:
            _, (patches, _) = self._decoded.popitem(last=False)
            self._bytes -= patches.nbytes
        return found

    def _decode(self, digests: list[str]) -> None:
        patches, grids = self._processor.pixels([self._images[digest] for digest in digests])
        frame = self._processor.patch_size**2
        frames = patches.view(len(patches), 3, -1, frame)  # [Σ h·w, C, T, P·P]; the frames of a still are equal
        single = frames[:, :, 0].reshape(len(patches), -1)
        for digest, part, grid in zip(digests, single.split(grids.prod(1).tolist()), grids.tolist(), strict=True):
            self._decoded[digest] = (part, (grid[0], grid[1], grid[2]))
            self._bytes += part.nbytes


@dataclass
class MicroBatch:
    """Rows padded on the right.  S: padded length, B: rows, N: response tokens."""

    ids: Tensor
    """int64 [B, S]."""
    positions: Tensor
    """int64 [3, B, S]."""
    patches: Tensor
    """float32 [Σ h·w, C·P·P] of the distinct images, those of one size together; empty on later pipeline stages."""
    grids: list[Grid]
    """Of the distinct images."""
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
    samples: Sequence[Sample], index: Sequence[int], pixels: Pixels | None, *, multiple: int, device: torch.device
) -> MicroBatch:
    """Micro-batch of `samples[i]` for i in index.  With no rows it is one padding row without response tokens, which
    lets a rank without work join the collectives.

    pixels: None on pipeline stages after the first; multiple: S is a multiple of it.
    """
    rows = [samples[i] for i in index]
    count = max(1, len(rows))
    length = -(-max([1, *(len(s.ids) for s in rows)]) // multiple) * multiple
    ids = np.zeros((count, length), np.int64)
    positions = np.zeros((3, count, length), np.int64)
    for b, sample in enumerate(rows):
        ids[b, : len(sample.ids)] = sample.ids
        positions[:, b, : len(sample.ids)] = sample.positions
    none = np.zeros(0, np.int64)
    predictors = [(np.arange(s.tokens) + len(s.ids) - s.tokens - 1) * count + b for b, s in enumerate(rows)]
    wanted: dict[str, Grid] = {}
    patches, places, features = torch.empty(0), [none], [none]
    if pixels is not None:
        found = {image.digest: image.grid for sample in rows for image in sample.row.images}
        wanted = dict(sorted(found.items(), key=lambda item: (item[1], item[0])))
    if pixels is not None and wanted:
        parts = pixels.get(wanted)
        patches = torch.cat(parts)
        first, begin = 0, {}
        for digest, (t, h, w) in wanted.items():
            begin[digest] = first
            first += t * h * w
        merged = pixels.merge_size**2
        for b, sample in enumerate(rows):
            places.append(sample.image_places * count + b)
            for digest in sample.digests:
                t, h, w = wanted[digest]
                features.append(begin[digest] // merged + np.arange(t * h * w // merged))

    def to(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        ids=to(ids),
        positions=to(positions),
        patches=patches.to(device),
        grids=list(wanted.values()),
        image_places=to(np.concatenate(places)),
        image_features=to(np.concatenate(features)),
        predictors=to(np.concatenate([none, *predictors])),
        targets=to(np.concatenate([none, *(s.row.response_ids.astype(np.int64) for s in rows)])),
        index=list(index),
    )
