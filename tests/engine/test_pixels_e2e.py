"""The engine sees the pixels that the trainer trains on: SGLang's own loader and processor, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_webrl.engine.generation import request_body
from megatron_webrl.engine.sglang_server import STANDIN
from megatron_webrl.processor import Processor
from megatron_webrl.screenshots import image_size
from megatron_webrl.wire.messages import Generate

BY_SGLANG = """
import base64, hashlib, json, sys
from sglang.srt.utils import common
from sglang.srt.utils.hf_transformers.processor import get_processor
processor = get_processor(sys.argv[1], tokenizer_mode="auto", trust_remote_code=False, use_fast=True)
found = []
for line in sys.stdin:
    data = base64.b64decode(line)
    common.is_cuda = lambda: True
    assert not common.is_jpeg_with_cuda(data), "a GPU would decode it to other pixels"
    common.is_cuda = lambda: False
    image, _ = common.load_image(data)
    out = processor.image_processor(images=[image], return_tensors="pt")
    pixels = out["pixel_values"].float().contiguous().numpy()
    found.append([out["image_grid_thw"][0].tolist(), hashlib.sha256(pixels.tobytes()).hexdigest()])
print(json.dumps(found))
"""


def screenshot(width: int, height: int) -> Image.Image:
    """Text-like edges, areas and gradients."""
    rng = np.random.default_rng(width)
    y, x = np.mgrid[:height, :width]
    base = np.stack([x * 255 // width, y * 255 // height, (x // 7 + y // 11) % 2 * 255], -1).astype(np.uint8)
    base[rng.random((height, width)) < 0.1] = 0
    return Image.fromarray(base)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_grids_and_pixels_are_the_engines(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Bit by bit, for PNG and for JPEG, as they are sent to SGLang."""
    import hashlib

    import torch

    files = []
    for size in ((160, 210), (500, 320), (97, 203)):
        for kind in ("png", "jpeg"):
            file = tmp_path / f"{size[0]}.{kind}"
            screenshot(*size).save(file, quality=90)
            files.append(file)
    environment = {**os.environ, "PYTHONPATH": str(STANDIN)}
    message = Generate("", b"", [], {}, 1, 0.0, 0, b"", b"", 1.0, 1.0)
    sent = request_body(message, [file.read_bytes() for file in files], version=0)["image_data"]
    line = [sys.executable, "-c", BY_SGLANG, str(tiny_model_dir)]
    done = subprocess.run(line, env=environment, input="\n".join(sent), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    processor = Processor.load(tiny_model_dir)
    for file, (grid, digest) in zip(files, json.loads(done.stdout.splitlines()[-1]), strict=True):
        patches, ours = processor.patches(file.read_bytes())
        assert list(ours) == grid == list(processor.grid(*image_size(file.read_bytes())))
        frames = processor.normalise(patches).view(len(patches), 3, 1, -1).expand(-1, -1, 2, -1).flatten(1)
        assert frames.dtype is torch.float32
        assert hashlib.sha256(frames.contiguous().numpy().tobytes()).hexdigest() == digest, file.name
