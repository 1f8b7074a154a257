"""What trainer tests share: configurations and synthetic trajectories."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.processor import Processor
from megatron_webrl.trajectory import (
    FLOAT32,
    INT32,
    Assignment,
    Group,
    ImageRef,
    Lane,
    Outcome,
    Step,
    Task,
    Trajectory,
    encode_steps,
    image_digest,
    pack,
    unpack,
)  # fmt: skip

TEXTS = ["Click the button.", "user\nassistant\n", *(f'"coordinate": [{20 * i}, {15 * i}]' for i in range(50))]
"""What the tokenizers of these tests are trained on."""


def run_config(model: Path, **sections: Any) -> RunConfig:
    """A float32 CPU configuration around `model`."""
    data: dict[str, Any] = {
        "device": "cpu",
        "model": {"path": str(model)},
        "tasks": {"names": ["click-test"]},
        "algorithm": {"epochs": 2, "minibatches": 2},
        "trainer": {
            "dtype": "float32",
            "threads": 1,
            "collective_timeout_s": 60,
            "max_tokens_per_microbatch": 1024,
            "optimizer": {"lr": 1e-3},
        },
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section} if isinstance(section, dict) else section
    return validate(data, "test")


def picture(rng: np.random.Generator, width: int, height: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


class Recorded:
    """Random groups of trajectories with their screenshots, and the fetchers a trainer asks."""

    def __init__(
        self, processor: Processor, *, groups: int, size: int = 4, steps: int = 2, version: int = 3, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        allowed = np.setdiff1d(np.arange(processor.vocab_size), processor.banned_ids())
        self.images: dict[str, bytes] = {}
        self.groups: dict[int, Group] = {}
        self.fetched: list[int] = []

        def image(width: int, height: int) -> ImageRef:
            data = picture(rng, width, height)
            digest = image_digest(data)
            self.images[digest] = data
            return ImageRef(digest, width, height, processor.grid(width, height))

        for group_id in range(10, 10 + groups):
            task = Task(f"miniwob/click-test/{group_id}", "miniwob", "click-test", group_id, 10)
            first = image(*((160, 128) if group_id % 2 else (96, 128)))
            trajectories = []
            for sample in range(size):
                turns = []
                for turn in range(1 + int(rng.integers(steps)) if steps > 1 else 1):
                    seen = [first] if turn == 0 else [first, image(128, 96)]
                    text = "<|im_start|>user\n" + "<|vision_start|><|image_pad|><|vision_end|>" * len(seen)
                    prompt = processor.encode(text + "Click the button.<|im_end|>\n<|im_start|>assistant\n")
                    response = rng.choice(allowed, int(rng.integers(3, 12)) * (12 if group_id == 12 else 1))
                    turns.append(
                        Step(
                            prompt_ids=pack(prompt, INT32),
                            images=seen,
                            response_ids=pack(response, INT32),
                            logprobs=pack(rng.uniform(-7.5, -4.5, len(response)), FLOAT32),
                            versions=pack(np.full(len(response), version), INT32),
                            finish_reason="stop",
                            text="",
                            action=None,
                        )
                    )
                tokens = sum(len(turn.response_ids) // 4 for turn in turns)
                prompts = sum(
                    len(processor.expand(unpack(turn.prompt_ids, INT32), [image.grid for image in turn.images]))
                    for turn in turns
                )
                trajectories.append(
                    Trajectory(
                        assignment=Assignment(task, group_id, sample, 0, Lane.TRAIN, 0, 1.0, 60.0),
                        outcome=Outcome.SUCCESS if sample % 2 else Outcome.FAILURE,
                        reason="",
                        reward=float(sample % 2 or rng.integers(2)),
                        num_steps=len(turns),
                        response_tokens=tokens,
                        tokens=prompts + tokens,
                        min_version=version,
                        max_version=version,
                        digests=sorted({image.digest for turn in turns for image in turn.images}),
                        worker="w",
                        started_at=0.0,
                        finished_at=0.0,
                        payload=encode_steps(turns),
                    )
                )
            trajectories[0].reward = 0.0
            self.groups[group_id] = Group(group_id, task, trajectories)

    def fetch_groups(self, ids: list[int]) -> list[Group]:
        self.fetched.extend(ids)
        return [self.groups[i] for i in ids]

    def fetch_images(self, digests: list[str]) -> dict[str, bytes]:
        return {digest: self.images[digest] for digest in digests}
