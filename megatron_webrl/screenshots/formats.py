"""What encoded screenshots are, told by their bytes: PNG or JPEG, their size, and the file that anything opens."""

from __future__ import annotations

import io
from pathlib import Path

_JPEG = b"\xff\xd8\xff"
"""How one begins."""


def is_jpeg(data: bytes) -> bool:
    return data.startswith(_JPEG)


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height, pixels, by the header alone.  Raises OSError if it is no image."""
    from PIL import Image

    return Image.open(io.BytesIO(data)).size


def write_image(folder: Path, digest: str, data: bytes) -> None:
    """FOLDER/DIGEST.png or FOLDER/DIGEST.jpg.  Raises OSError."""
    (folder / f"{digest}{'.jpg' if is_jpeg(data) else '.png'}").write_bytes(data)


def image_file(folder: Path, digest: str) -> Path:
    """The file that `write_image` wrote; the name of a PNG if there is none."""
    jpeg = folder / f"{digest}.jpg"
    return jpeg if jpeg.exists() else folder / f"{digest}.png"
