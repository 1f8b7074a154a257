"""What transformers' own image processor makes of screenshots, for references."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def reference_pixels(directory: Path, images: Sequence[bytes]) -> tuple[Any, Any]:
    """pixel_values float32 [Σ h·w, C·T·P·P] and image_grid_thw int64 [n, 3] with the processor files of a model."""
    import io

    from PIL import Image
    from transformers import AutoImageProcessor

    decoded = [Image.open(io.BytesIO(data)).convert("RGB") for data in images]
    out = AutoImageProcessor.from_pretrained(str(directory), local_files_only=True)(images=decoded, return_tensors="pt")
    return out["pixel_values"], out["image_grid_thw"]
