"""Whatever it is called: the bytes say what an image is."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from megatron_webrl.screenshots import image_file, image_size, is_jpeg, write_image


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (160, 210)).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize(("kind", "suffix"), [("PNG", ".png"), ("JPEG", ".jpg")])
def test_an_image_is_written_as_what_it_is(tmp_path: Path, kind: str, suffix: str) -> None:
    data = encoded(kind)
    assert image_size(data) == (160, 210)
    assert is_jpeg(data) == (kind == "JPEG")
    write_image(tmp_path, "digest", data)
    assert [file.name for file in tmp_path.iterdir()] == [f"digest{suffix}"]
    assert image_file(tmp_path, "digest").read_bytes() == data


def test_no_image_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot identify"):
        image_size(b"nothing")
    with pytest.raises(FileNotFoundError, match=r"digest\.png"):
        image_file(tmp_path, "digest").read_bytes()
