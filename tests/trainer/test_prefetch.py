"""Screenshots of queued groups are decoded before the batch is taken; over real sockets, with a stand-in behind them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ranks import picture

from megatron_webrl.processor import Processor
from megatron_webrl.screenshots import IMAGES_A_MESSAGE, fetch_images
from megatron_webrl.trainer.pixels import PixelStore
from megatron_webrl.trainer.prefetch import Prefetcher
from megatron_webrl.trajectory import image_digest
from megatron_webrl.wire import BlockingClient, Server
from megatron_webrl.wire.messages import GetImages, Images, ListUpcoming, Upcoming

IMAGES = {image_digest(data): data for data in (picture(np.random.default_rng(i), 64, 64) for i in range(80))}


class FakeQueueAndStore:
    """Answers as coordinator and store do, from what a test puts here."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/both"
        self.groups: list[tuple[int, list[str]]] = []
        self.asked: list[list[str]] = []
        self.versions: list[int] = []
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = Server(self.address, "run", {ListUpcoming: self._upcoming, GetImages: self._images})
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await server.close()

    async def _upcoming(self, _: str, m: ListUpcoming) -> Upcoming:
        self.versions.append(m.version)
        return Upcoming(self.groups)

    async def _images(self, _: str, m: GetImages) -> Images:
        self.asked.append(m.digests)
        return Images({d: IMAGES[d] for d in m.digests if d in IMAGES}, [d for d in m.digests if d not in IMAGES])

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[FakeQueueAndStore]:
    fake = FakeQueueAndStore(tmp_path)
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def processor(tiny_model_dir: Path) -> Processor:
    return Processor.load(tiny_model_dir)


def start(
    queue: FakeQueueAndStore, pixels: PixelStore, version: int = 3, shard: int = 0, shards: int = 1
) -> Prefetcher:
    addresses = {"coordinator_address": queue.address, "store_address": queue.address}
    place = {"run_id": "run", "keys": None, "name": f"prefetch-{shard}", "shard": shard, "shards": shards}
    return Prefetcher(pixels, **addresses, **place, version=lambda: version)


def until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_shards_decode_all_that_is_queued(queue: FakeQueueAndStore, processor: Processor) -> None:
    """Together they fetch every screenshot, each shard about half of them, none twice; one the store lacks is left."""
    names = list(IMAGES)
    queue.groups = [(i, names[8 * i : 8 * i + 8]) for i in range(10)]
    queue.groups[3][1].append("not in the store")
    stores = [PixelStore(processor, threads=1, limit_bytes=1 << 30) for _ in "ab"]
    both = [start(queue, pixels, shard=i, shards=2) for i, pixels in enumerate(stores)]
    until(lambda: not set.intersection(*(set(s.lacking(names)) for s in stores)))
    for prefetcher in both:
        prefetcher.close()
    assert set(queue.versions) == {3}
    here = [set(names) - set(s.lacking(names)) for s in stores]
    assert here[0] | here[1] == set(names)
    assert not here[0] & here[1]
    assert abs(len(here[0]) - len(here[1])) <= 16


def test_it_stops_at_half_of_the_bound(queue: FakeQueueAndStore, processor: Processor) -> None:
    """Nothing is fetched that would push out what is there; and nothing before weights were published."""
    names = list(IMAGES)
    queue.groups = [(0, names)]
    one = processor.patches(IMAGES[names[0]])[0].nbytes
    pixels = PixelStore(processor, threads=1, limit_bytes=50 * one)
    prefetcher = start(queue, pixels)
    until(lambda: len(queue.versions) >= 3)
    prefetcher.close()
    assert len(queue.asked) == 1 and len(queue.asked[0]) == IMAGES_A_MESSAGE
    until(lambda: pixels.bytes == IMAGES_A_MESSAGE * one)
    asked = len(queue.versions)
    early = start(queue, pixels, version=-1)
    time.sleep(1.5)
    early.close()
    assert len(queue.versions) == asked


def test_requests_are_bounded(queue: FakeQueueAndStore) -> None:
    """Many screenshots come in several messages; those that lack are named."""
    client = BlockingClient(queue.address, "run", "me")
    found, missing = fetch_images(client, [*IMAGES, "gone"])
    client.close()
    assert found == IMAGES and missing == ["gone"]
    assert max(map(len, queue.asked)) == IMAGES_A_MESSAGE and len(queue.asked) == 3
