"""Screenshots are decoded once, in the background, within a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ranks import picture

from megatron_webrl.errors import UserError
from megatron_webrl.processor import Grid, Processor
from megatron_webrl.trainer.pixels import PixelStore


class CountingProcessor:
    """Decodes for real, counts it by image, and waits while `go` is not set."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self.decoded: list[bytes] = []
        self.go = threading.Event()
        self.go.set()

    def patches(self, image: bytes) -> tuple:
        assert self.go.wait(30)
        self.decoded.append(image)
        return self._processor.patches(image)


@pytest.fixture(scope="module")
def real(tiny_model_dir: Path) -> Processor:
    return Processor.load(tiny_model_dir)


@pytest.fixture
def processor(real: Processor) -> Iterator[CountingProcessor]:
    counting = CountingProcessor(real)
    yield counting
    counting.go.set()


IMAGES = {f"image-{i}": picture(np.random.default_rng(i), 96, 64) for i in range(6)}


def store(processor: CountingProcessor, limit: int = 1 << 30) -> PixelStore:
    return PixelStore(processor, threads=2, limit_bytes=limit)  # type: ignore[arg-type]


def grids(real: Processor) -> dict[str, Grid]:
    return dict.fromkeys(IMAGES, real.grid(96, 64))


def test_each_is_decoded_once_and_ahead(processor: CountingProcessor, real: Processor) -> None:
    """`add` returns before anything is decoded; `get` waits for what it wants; epochs decode nothing again."""
    pixels = store(processor)
    processor.go.clear()
    pixels.add(IMAGES)
    pixels.add(IMAGES)
    assert pixels.lacking([*IMAGES, "other"]) == ["other"]
    assert processor.decoded == []
    processor.go.set()
    for _ in range(3):
        found = pixels.get(grids(real))
        for patches, data in zip(found, IMAGES.values(), strict=True):
            assert patches.equal(real.patches(data)[0])
    assert sorted(processor.decoded) == sorted(IMAGES.values())
    until(lambda: pixels.bytes == sum(p.nbytes for p in found))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_bound_holds(processor: CountingProcessor, real: Processor) -> None:
    """Beyond it, the least recently used go: of the step they are decoded again, those decoded ahead are forgotten."""
    one = real.patches(IMAGES["image-0"])[0].nbytes
    pixels = store(processor, limit=2 * one)
    names = list(IMAGES)
    assert pixels.begin_step(names[:4]) == names[:4]
    pixels.add(IMAGES)
    for _ in range(2):
        for name in names[:4]:
            assert pixels.get({name: grids(real)[name]})[0].equal(real.patches(IMAGES[name])[0])
    assert pixels.get({name: grids(real)[name] for name in names[:4]})  # more at once than the bound lets it keep
    until(lambda: pixels.bytes <= 2 * one)
    assert pixels.lacking(IMAGES) == names[4:]
    assert len(processor.decoded) > 6


def test_a_new_step_forgets_the_one_before(processor: CountingProcessor, real: Processor) -> None:
    """But not what was decoded ahead of it."""
    pixels = store(processor)
    names = list(IMAGES)
    pixels.begin_step(names[:3])
    pixels.add(IMAGES)
    pixels.settle()
    assert pixels.begin_step([*names[2:4], "other"]) == ["other"]
    assert pixels.lacking(IMAGES) == names[:2]
    one = real.patches(IMAGES["image-0"])[0].nbytes
    until(lambda: pixels.bytes == 4 * one)


def test_what_was_decoded_ahead_in_vain_makes_room(processor: CountingProcessor, real: Processor) -> None:
    """Half of the bound may be ahead of the step, however much the step itself holds; wrong guesses do not stay."""
    one = real.patches(IMAGES["image-0"])[0].nbytes
    names = list(IMAGES)
    pixels = store(processor, limit=4 * one)
    pixels.begin_step(names[:3])
    pixels.add({name: IMAGES[name] for name in names[:3]})
    pixels.get({name: grids(real)[name] for name in names[:3]})
    assert not pixels.far_ahead
    pixels.begin_step([])
    for guess in (names[3:5], names[1:3], names[3:5]):
        pixels.keep_ahead(guess)
        assert not pixels.far_ahead
        pixels.add({name: IMAGES[name] for name in guess})
        pixels.settle()
        until(lambda: pixels.far_ahead)
        assert pixels.lacking(names) == sorted(set(names) - set(guess))


def test_decoding_that_stands_still_is_told(processor: CountingProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As such, and not as a broken image; the deadline is one of progress."""
    monkeypatch.setattr("megatron_webrl.trainer.pixels.STALL_S", 0.2)
    pixels = store(processor)
    processor.go.clear()
    pixels.add(IMAGES)
    with pytest.raises(UserError, match=r"no screenshot was decoded .* trainer\.image_threads"):
        pixels.get({"image-5": (1, 4, 6)})


def test_broken_images_are_told(processor: CountingProcessor, real: Processor) -> None:
    """By digest: bytes that are no image, and a grid that the processor does not make."""
    pixels = store(processor)
    pixels.add({"broken": b"\x89PNG no", **IMAGES})
    with pytest.raises(UserError, match="screenshot broken cannot be decoded"):
        pixels.get({"broken": (1, 2, 2)})
    with pytest.raises(UserError, match=r"screenshot image-0 becomes .* processor files differ"):
        pixels.get({"image-0": (1, 2, 2)})
    with pytest.raises(KeyError):
        pixels.get({"unknown": (1, 2, 2)})
