"""What it costs to bring screenshots from a browser worker to a trainer: bytes held meanwhile, processor time and time.

    python -m benchmarks.screenshots [--rounds 3] [--sets photo miniwob] [--cases ours …] [--json FILE]

16 trajectories of 10 screenshots at 1280 × 768 are handed over by one process, one trajectory after another, then held, then
fetched by another process, one trajectory after another, then released.  Only that is timed: screenshots, and the tensors of
the actors, are there before; decoding is left out on both sides.

  ours           the real store process, a worker's `upload` (the hash included), a trainer's `fetch_images`, over ipc
  pixel_actor    the public systems' way: what the image processor makes of them (two frames of a still), float32 [3840, 1536],
                 23.6 MB, in the dictionary of one Ray actor; takes 12 GB of memory
  frame_actor    the same with one frame, float32 [3, 768, 1280], 11.8 MB; by --cases only
  ray_png        the PNG bytes in Ray's object store: memory of one machine, without hashes, lost with Ray

`peak_bytes`: most that is held between the two, above what the idle processes hold: the store's files (disk) and its own private
memory; for Ray the shared memory that its object store took and the private memory of raylet and actor.  Page cache, which the
system takes back when it likes, and what the two ends have themselves are not counted.  `cpu_seconds`: all threads of all
processes but the one that watches (worker, trainer, store; or Ray's: workers, actor, raylet, gcs), less what the same processes
take when idle.  Both, and `wall_seconds`, are of one round: 160 screenshots in and out.

Sets: `photo`: smooth noise, PNGs of about 0.8 MB; `miniwob`: pages of MiniWoB++ in Chromium with random clicks, of which many
repeat, as they do in a run.  Of each, `png_…` and `jpeg_…` (quality 90) tell the mean bytes of a screenshot, and the processor
time to decode it as the trainer does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import logging
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks._table import report, row

ROOT = Path(__file__).parent.parent
TRAJECTORIES, SCREENSHOTS = 16, 10
WIDTH, HEIGHT = 1280, 768
CASES = ["ours", "pixel_actor", "ray_png"]
FRAMES = {"frame_actor": 1, "pixel_actor": 2}
"""Of one image, in the tensors of a case."""
SETS = ["photo", "miniwob"]
UNITS = {"peak_bytes": "B", "cpu_seconds": "s", "wall_seconds": "s"}
TIMEOUT_S = 120.0
IDLE_S = 3.0

Pages = list[list[bytes]]
"""Encoded screenshots of each trajectory."""


# What is carried ------------------------------------------------------------------------------------------------------


def photos() -> Pages:
    """Smooth noise of two scales and a little grain."""
    from PIL import Image

    rng = np.random.default_rng(0)

    def photo() -> bytes:
        picture = np.zeros((HEIGHT, WIDTH, 3), np.float32)
        for cells in (4, 16):
            grid = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            picture += np.asarray(grid.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32) / 2
        picture += rng.random(picture.shape, np.float32) / 2
        buffer = io.BytesIO()
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    return [[photo() for _ in range(SCREENSHOTS)] for _ in range(TRAJECTORIES)]


async def miniwob() -> Pages:
    """Each trajectory a task of its own: the page, and again after each of nine clicks at random."""
    from megatron_webrl.config import validate
    from megatron_webrl.tasks import MiniWob
    from megatron_webrl.tasks.miniwob import ORACLES
    from megatron_webrl.trajectory import Task

    rng = random.Random(0)
    config = {"model": {"path": "unused"}, "tasks": {"names": sorted(ORACLES)}, "browser": {"slots": 1}}
    environment = MiniWob(validate(config, "benchmark"))
    pages = []
    try:
        for number in range(TRAJECTORIES):
            name = sorted(ORACLES)[number % len(ORACLES)]
            episode = environment.episode(Task(name, "miniwob", name, number, SCREENSHOTS))
            seen = [(await episode.reset()).screenshot]
            while len(seen) < SCREENSHOTS:
                await episode.act({"action": "left_click", "coordinate": [rng.randrange(1000), rng.randrange(1000)]})
                seen.append((await episode.observe()).screenshot)
            await episode.close()
            pages.append(seen)
    finally:
        await environment.close()
    return pages


def formats(name: str, pages: Pages) -> list[dict[str, Any]]:
    """Bytes and decoding of PNG and JPEG."""
    from PIL import Image

    def decode(data: bytes) -> Image.Image:
        return Image.open(io.BytesIO(data)).convert("RGB")

    def jpeg(data: bytes) -> bytes:
        buffer = io.BytesIO()
        decode(data).save(buffer, "JPEG", quality=90)
        return buffer.getvalue()

    first = [screenshots[0] for screenshots in pages]
    rows = []
    for kind, images in (("png", first), ("jpeg", list(map(jpeg, first)))):
        began = time.process_time()
        for data in images:
            decode(data)
        seconds = (time.process_time() - began) / len(images)
        rows.append(row(f"{kind}_{name}", "mean_bytes", sum(map(len, images)) / len(images), "B"))
        rows.append(row(f"{kind}_{name}", "decode_ms", 1000 * seconds, "ms"))
    return rows


# Ours -----------------------------------------------------------------------------------------------------------------


def store_process(address: str, directory: Path) -> None:
    from megatron_webrl.screenshots import serve_store

    asyncio.run(serve_store(address, "bench", directory, 8 << 30))


def worker_process(address: str, pages: Path, orders: Connection) -> None:
    """Puts all at an order that is true, releases all at one that is false."""
    from megatron_webrl.screenshots import upload
    from megatron_webrl.trajectory import image_digest
    from megatron_webrl.wire import Client
    from megatron_webrl.wire.messages import Done, ReleaseImages

    trajectories = pickle.loads(pages.read_bytes())

    async def work() -> None:
        client = Client(address, "bench", "worker")
        owners = [(number, 0, 0) for number in range(TRAJECTORIES)]
        orders.send(None)
        while True:
            if await asyncio.to_thread(orders.recv):
                digests = []
                for owner, screenshots in zip(owners, trajectories, strict=True):
                    images = {image_digest(data): data for data in screenshots}
                    await upload(client, owner, images)
                    digests.append(list(images))
                orders.send(digests)
            else:
                await client.request(ReleaseImages(owners), timeout=TIMEOUT_S, expect=Done)
                orders.send(None)

    asyncio.run(work())


def trainer_process(address: str, orders: Connection) -> None:
    from megatron_webrl.screenshots import fetch_images
    from megatron_webrl.wire import BlockingClient

    client = BlockingClient(address, "bench", "trainer")
    orders.send(None)
    while True:
        for digests in orders.recv():
            found, _ = fetch_images(client, digests)
            assert len(found) == len(digests)
        orders.send(None)


class Ours:
    """The store and its two ends, each a process."""

    def __init__(self, pages: Path, directory: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._directory = directory / "store"
        address = f"ipc://{directory}/socket"
        (self._worker, worker), (self._trainer, trainer) = spawn.Pipe(), spawn.Pipe()
        self._processes = [
            spawn.Process(target=store_process, args=(address, self._directory), daemon=True),
            spawn.Process(target=worker_process, args=(address, pages, worker), daemon=True),
            spawn.Process(target=trainer_process, args=(address, trainer), daemon=True),
        ]
        for process in self._processes:
            process.start()
        for end in (self._worker, self._trainer):
            self._answer(end)
        while not (directory / "socket").exists():
            time.sleep(0.1)
        self._store = psutil.Process(self._processes[0].pid)

    def _answer(self, end: Connection) -> Any:
        if not end.poll(TIMEOUT_S):
            raise SystemExit("a process of the case `ours` does not answer")
        return end.recv()

    def round(self) -> None:
        self._worker.send(True)
        digests = self._answer(self._worker)
        self._trainer.send(digests)
        self._answer(self._trainer)
        self._worker.send(False)
        self._answer(self._worker)

    def held(self) -> int:
        disk = 0
        for file in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                disk += file.stat().st_blocks * 512
        return disk + private(self._store)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


# Ray ------------------------------------------------------------------------------------------------------------------


class Rays:
    """A producer, a consumer and, for tensors, the actor that holds them."""

    def __init__(self, pages: Path, directory: Path, frames: int) -> None:
        """frames: of one image in its tensor; 0: the encoded bytes."""
        import ray

        environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_worker_niceness": "0"}
        os.environ.update(environment, RAY_memory_monitor_refresh_ms="0")
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=8 << 30,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(directory / "ray"),
        )

        class Holder:
            def __init__(self) -> None:
                self.tensors: dict[tuple[int, int], Any] = {}

            def pid(self) -> int:
                return os.getpid()

            def put(self, trajectory: int, *tensors: Any) -> None:
                self.tensors |= {(trajectory, step): tensor for step, tensor in enumerate(tensors)}

            def get(self, trajectory: int) -> list[Any]:
                return [self.tensors[trajectory, step] for step in range(SCREENSHOTS)]

            def release(self) -> None:
                self.tensors.clear()

        class Producer:
            def __init__(self, pages: Path, holder: Any) -> None:
                self.trajectories = pickle.loads(pages.read_bytes())
                self.holder = holder
                if frames:
                    self.trajectories = [[decoded(data, frames) for data in pages] for pages in self.trajectories]

            def ready(self) -> None:
                pass

            def put(self) -> list[list[Any]]:
                if not frames:
                    return [[ray.put(data) for data in screenshots] for screenshots in self.trajectories]
                for number, screenshots in enumerate(self.trajectories):
                    ray.get(self.holder.put.remote(number, *screenshots))
                return []

        class Consumer:
            def __init__(self, holder: Any) -> None:
                self.holder = holder

            def ready(self) -> None:
                pass

            def get(self, references: list[list[Any]]) -> None:
                for number in range(TRAJECTORIES):
                    found = ray.get(references[number] if references else self.holder.get.remote(number))
                    assert len(found) == SCREENSHOTS

        remote: Any = ray.remote
        self._holder = remote(Holder).remote()
        self._producer = remote(Producer).remote(pages, self._holder)
        self._consumer = remote(Consumer).remote(self._holder)
        ray.get([self._producer.ready.remote(), self._consumer.ready.remote()], timeout=TIMEOUT_S)
        self._raylet = next(p for p in psutil.Process().children(recursive=True) if p.name() == "raylet")
        self._actor = psutil.Process(ray.get(self._holder.pid.remote()))

    def round(self) -> None:
        import ray

        references = ray.get(self._producer.put.remote(), timeout=TIMEOUT_S)
        ray.get(self._consumer.get.remote(references), timeout=TIMEOUT_S)
        ray.get(self._holder.release.remote(), timeout=TIMEOUT_S)

    def held(self) -> int:
        return shared_files(self._raylet) + private(self._raylet) + private(self._actor)

    def close(self) -> None:
        import ray

        ray.shutdown()


def shared_files(process: psutil.Process) -> int:
    """Bytes in the files in shared memory that it has open, deleted ones too, as Ray's are."""
    files = {}
    for number in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(number).startswith("/dev/shm/"):
                status = number.stat()
                files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


def decoded(data: bytes, frames: int) -> Any:
    """float32 tensor [3, H, W] of one frame; of two as much as their patches, [H/16 * W/16, 3 * 2 * 16 * 16]."""
    import torch
    from PIL import Image

    frame = torch.from_numpy(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).copy()).permute(2, 0, 1) / 255
    return frame if frames == 1 else torch.cat([frame] * frames).reshape(-1, 3 * frames * 16 * 16)


# Measuring ------------------------------------------------------------------------------------------------------------


def private(process: psutil.Process) -> int:
    """Bytes of memory that are its own."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def cpu_seconds() -> float:
    """Of all processes below this one."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(t.user + t.system for t in times)


@contextlib.contextmanager
def most(value: Callable[[], int]) -> Iterator[list[int]]:
    """The list's one element is the largest value meanwhile."""
    peak, stop = [value()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], value())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def measure(case: str, pages: Path, rounds: int) -> dict[str, float]:
    """In this process, which only watches."""
    with tempfile.TemporaryDirectory(prefix="mwebrl-") as folder:
        directory = Path(folder)
        transport = Ours(pages, directory) if case == "ours" else Rays(pages, directory, FRAMES.get(case, 0))
        try:
            before = transport.held()
            with most(transport.held) as peak:
                transport.round()
            began = cpu_seconds()
            time.sleep(IDLE_S)
            idle = (cpu_seconds() - began) / IDLE_S
            began, at = cpu_seconds(), time.monotonic()
            for _ in range(rounds):
                transport.round()
            wall = time.monotonic() - at
            used = cpu_seconds() - began - idle * wall
        finally:
            transport.close()
    return {"peak_bytes": float(peak[0] - before), "cpu_seconds": used / rounds, "wall_seconds": wall / rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measured, after one to warm up")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "frame_actor"], default=CASES)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=[*CASES, "frame_actor"], help=argparse.SUPPRESS)
    parser.add_argument("--pages", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.pages, arguments.rounds)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.sets:
            pages = photos() if name == "photo" else asyncio.run(miniwob())
            file = Path(folder) / name
            file.write_bytes(pickle.dumps(pages))
            each = [data for screenshots in pages for data in screenshots]
            rows.append(row(f"png_{name}", "different", len(set(each)), f"of {len(each)}"))
            rows += formats(name, pages)
            found = {}
            for case in arguments.cases:
                line = [sys.executable, "-m", "benchmarks.screenshots", "--only", case, "--pages", str(file)]
                line += ["--rounds", str(arguments.rounds)]
                done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=900)
                if done.returncode:
                    raise SystemExit(f"{case}_{name} failed: {done.stderr.strip().splitlines()[-1]}")
                found[case] = json.loads(done.stdout.splitlines()[-1])
                rows += [row(f"{case}_{name}", metric, value, UNITS[metric]) for metric, value in found[case].items()]
            for case, metrics in found.items():
                if case != "ours" and "ours" in found:
                    ratios = {metric: value / found["ours"][metric] for metric, value in metrics.items()}
                    rows += [row(f"{case}_{name} / ours_{name}", m, ratio, "ratio") for m, ratio in ratios.items()]
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
