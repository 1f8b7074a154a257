"""Tokenizer and image processor of a model: one truth for agent, engine client and trainer.

Prompts travel unexpanded (one image_pad an image); how many tokens an image becomes follows from its size alone.
Only `patches` needs transformers and torch: browser workers import neither (18 CPU seconds and half a gigabyte each).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_webrl.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

END_TOKEN = "<|im_end|>"
MAX_ASPECT_RATIO = 200
Grid = tuple[int, int, int]


class Processor:
    """Processor of a Hugging Face Qwen3-VL directory; made by `Processor.load`.

    stop: texts that end a reply beside the end token.  Raises UserError if one is not a token that a reply may hold.
    """

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, settings: dict[str, Any], vocab_size: int, stop: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        """Rows of the model's embedding: the tokenizer's vocabulary, padded."""
        self.patch_size: int = settings["patch_size"]
        self.merge_size: int = settings["merge_size"]
        self._size: dict[str, int] = settings["size"]
        self.image_token_id = self._id("<|image_pad|>")
        self.video_token_id = self.tokenizer.token_to_id("<|video_pad|>")
        """None where the tokenizer has none."""
        self.end_token_id = self._id(END_TOKEN)
        self._stop = dict.fromkeys([self.end_token_id, *map(self._stop_id, stop)])

    def _stop_id(self, text: str) -> int:
        """Its one token.  SGLang runs without a tokenizer: it can stop at tokens, not at texts."""
        ids = self.encode(text)
        if len(ids) != 1:
            tokens = [self.tokenizer.id_to_token(i) for i in ids]
            raise UserError(
                f"sampling.stop has {text!r}, which is {len(ids)} tokens of the model, {tokens}: give texts that are one token, "
                f"as {END_TOKEN!r}, or leave it out"
            )
        if ids[0] in (self.image_token_id, self.video_token_id):
            raise UserError(f"sampling.stop has {text!r}, which stands for pixels and is never sampled: leave it out")
        return ids[0]

    def _id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no {token}")
        return found

    @classmethod
    def load(cls, directory: Path, stop: Sequence[str] = ()) -> Processor:
        """Read tokenizer and image settings.  stop: `sampling.stop`.  Raises UserError naming the file that is missing or
        malformed, or the text of `stop` that is not one token."""
        try:
            tokenizer = _read_tokenizer(directory / "tokenizer.json")
            settings = _image_settings(directory)
            vocab_size = json.loads((directory / "config.json").read_text())["text_config"]["vocab_size"]
            return cls(directory, tokenizer, settings, vocab_size, stop)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"model.path={directory}: tokenizer or processor not readable ({error}): copy them again"
            ) from None

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens written in the text are parsed as such."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, a final token that ends a reply removed, every other special token shown."""
        ids = [int(i) for i in ids]
        if ids and ids[-1] in self._stop:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def grid(self, width: int, height: int) -> Grid:
        """Patches (1, h, w) that an image of so many pixels becomes."""
        tall, wide = smart_resize(
            height,
            width,
            factor=self.patch_size * self.merge_size,
            min_pixels=self._size["shortest_edge"],
            max_pixels=self._size["longest_edge"],
        )
        return (1, tall // self.patch_size, wide // self.patch_size)

    def image_tokens(self, grid: Grid) -> int:
        """Language tokens of an image: t·h·w / merge²."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2

    def expand(self, prompt_ids: Sequence[int] | np.ndarray, grids: Sequence[Grid]) -> np.ndarray:
        """Each image_pad repeated as often as its image has tokens -> int32 [P'].
        Raises ValueError if pads and grids differ in number."""
        ids = np.asarray(prompt_ids, dtype=np.int32)
        repeats = np.ones(len(ids), dtype=np.int64)
        places = np.flatnonzero(ids == self.image_token_id)
        if len(places) != len(grids):
            raise ValueError(f"prompt has {len(places)} image_pad tokens for {len(grids)} images")
        repeats[places] = [self.image_tokens(grid) for grid in grids]
        return np.repeat(ids, repeats)

    def patches(self, image: bytes) -> tuple[Tensor, Grid]:
        """Encoded image -> its patches uint8 [h·w, C·P·P] (one frame, not normalised) and grid (1, h, w)."""
        from PIL import Image

        out = self._image_processor(
            images=[Image.open(io.BytesIO(image)).convert("RGB")],
            do_rescale=False,
            do_normalize=False,
            return_tensors="pt",
        )
        found, (grid,) = out["pixel_values"], out["image_grid_thw"].tolist()
        frames = found.view(len(found), 3, -1, self.patch_size**2)  # [h·w, C, T, P·P]; the frames of a still are equal
        return frames[:, :, 0].flatten(1).contiguous(), (grid[0], grid[1], grid[2])

    def normalise(self, patches: Tensor) -> Tensor:
        """uint8 [n, C·P·P] -> float32 [n, C·P·P], what the image processor gives for one frame, bit by bit."""
        import torch

        settings = self._image_processor
        scale = 1.0 / settings.rescale_factor
        mean, std = (
            torch.tensor(values, device=patches.device) * scale for values in (settings.image_mean, settings.image_std)
        )
        channels = patches.float().view(len(patches), 3, -1)
        return channels.sub_(mean[:, None]).div_(std[:, None]).flatten(1)

    def banned_ids(self) -> np.ndarray:
        """Tokens never sampled, int32 ascending: every special token that does not end a reply, and padded vocabulary
        rows."""
        special = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        padded = range(self.tokenizer.get_vocab_size(with_added_tokens=True), self.vocab_size)
        return np.array(sorted(special - self._stop.keys() | set(padded)), dtype=np.int32)

    def stop_ids(self) -> list[int]:
        """Tokens that end a reply, and are kept in it: the end token, then those of `sampling.stop`."""
        return list(self._stop)

    @cached_property
    def _image_processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(str(self.directory), local_files_only=True)


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width, multiples of `factor`, to which Qwen's image processor resizes: the nearest ones, scaled so that
    the area lies within [min_pixels, max_pixels].  Raises ValueError for sides that differ more than 200 times.

    As transformers' function of that name (a test holds the equality), whose import costs many seconds.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(f"an image of {width}×{height} pixels is too narrow: at most 1:{MAX_ASPECT_RATIO}")
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if tall * wide > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        tall = max(factor, math.floor(height / scale / factor) * factor)
        wide = max(factor, math.floor(width / scale / factor) * factor)
    elif tall * wide < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        tall, wide = math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return tall, wide


def _image_settings(directory: Path) -> dict[str, Any]:
    """Of the image processor; transformers 5 writes them as a section of processor_config.json."""
    file = directory / "preprocessor_config.json"
    if file.exists():
        return json.loads(file.read_text())
    return json.loads((directory / "processor_config.json").read_text())["image_processor"]


def _read_tokenizer(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file.name}: {error}") from None
