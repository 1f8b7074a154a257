"""Prompts, and weights with what transformers says about their tokens: the reference of the engine tests."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from reference_pixels import reference_pixels

from megatron_webrl.processor import Processor
from megatron_webrl.trajectory import FLOAT32, INT32, image_digest, unpack
from megatron_webrl.wire.messages import Generated

TOLERANCE = 1e-4
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT_PROMPT = "<|im_start|>user\nClick the button.<|im_end|>\n<|im_start|>assistant\n"
IMAGE_PROMPT = f"<|im_start|>user\n{IMAGE}Click the button.<|im_end|>\n<|im_start|>assistant\n"
TWO_IMAGES_PROMPT = f"<|im_start|>user\n{IMAGE}then{IMAGE}Click the button.<|im_end|>\n<|im_start|>assistant\n"


def screenshot(seed: int) -> bytes:
    """A noisy PNG of the demo's size."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (210, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def named(*images: bytes) -> dict[str, bytes]:
    return {image_digest(data): data for data in images}


class Policy:
    """Weights with a version: their export on disk, and what transformers says about tokens."""

    def __init__(self, directory: Path, processor: Processor) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import Qwen3VLForConditionalGeneration

        self.directory, self.processor = directory, processor
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.tensors = load_file(directory / "model.safetensors")

    def distribution(
        self, prompt: Sequence[int], images: dict[str, bytes], response: Sequence[int], *, banned: Sequence[int] = ()
    ) -> np.ndarray:
        """Log p at every response token [R, V], never-sampled tokens (and `banned`) masked, temperature 1."""
        import torch

        extra: dict[str, Any] = {}
        grids: list[Any] = []
        if images:
            pixels, grid = reference_pixels(self.directory, list(images.values()))
            extra = {"pixel_values": pixels, "image_grid_thw": grid}
            grids = [tuple(g) for g in grid.tolist()]
        ids = torch.tensor([*self.processor.expand(prompt, grids).tolist(), *response])[None]
        if images:
            extra["mm_token_type_ids"] = (ids == self.processor.image_token_id).long()
        with torch.no_grad():
            logits = self.model(input_ids=ids, **extra).logits[0].float()
        logits[:, [*self.processor.banned_ids().tolist(), *banned]] = -torch.inf
        return torch.log_softmax(logits[-len(response) - 1 : -1], -1).numpy()

    def logprobs(
        self, prompt: Sequence[int], images: dict[str, bytes], response: Sequence[int], *, banned: Sequence[int] = ()
    ) -> np.ndarray:
        """Log p of the response tokens [R]."""
        return self.distribution(prompt, images, response, banned=banned)[np.arange(len(response)), response]


def make_policies(model: Path, processor: Processor, directory: Path) -> list[Policy]:
    """The weights of `model`, and two others, all of them perturbed everywhere, in `directory`."""
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    made = [Policy(model, processor)]
    for seed in (1, 2):
        other = directory / f"seed{seed}"
        shutil.copytree(model, other)
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: tensor + 0.3 * (tensor.std(unbiased=False) + 0.01) * torch.randn(tensor.shape, generator=generator)
            for name, tensor in made[0].tensors.items()
        }
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        made.append(Policy(other, processor))
    return made


def difference(
    reply: Generated, policy: Policy, prompt: str, images: dict[str, bytes], *, banned: Sequence[int] = ()
) -> float:
    """Largest |engine − reference| logprob of a reply."""
    response = unpack(reply.response_ids, INT32).tolist()
    reference = policy.logprobs(policy.processor.encode(prompt), images, response, banned=banned)
    return float(np.abs(reference - unpack(reply.logprobs, FLOAT32)).max())
