"""What the hop costs: the same requests through GenerationClient and engine host, and by plain HTTP to the same SGLang.

    python -m benchmarks.generation [--concurrent 1 4 16] [--kinds …] [--rounds 3] [--json FILE]

A real SGLang on the CPU with a tiny Qwen3-VL; every reply has 64 tokens with logprobs, none is cut short.  No prompt shares a
prefix with another, so that both arms give SGLang the same work.  The arms take turns, and the median round counts.

  plain   aiohttp, this process to SGLang's /generate, all images of a prompt in base64, the reply at once
  ours    this process over TCP with CURVE to the engine host's process, which streams from its SGLang

Kinds: `text`; `image`, one screenshot of 100 KB; `window`, four of them, of which the newest is new in each step of an episode
(ours sends that one, the host has the others).  `cpu_seconds` a request: of this process and the host's, which is what the hop
adds to; `all_cpu_seconds`: SGLang's too, which streams for ours.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil

from benchmarks._table import report, row
from megatron_webrl.config import RunConfig
from megatron_webrl.engine import EngineHost, GenerationClient
from megatron_webrl.engine.generation import request_body
from megatron_webrl.engine.sglang_server import KEEP_ALIVE_S
from megatron_webrl.processes import reap
from megatron_webrl.processor import Processor
from megatron_webrl.tiny_model import make_tiny_model
from megatron_webrl.trajectory import INT32, image_digest, pack
from megatron_webrl.wire import Client, Keys, Server
from megatron_webrl.wire.messages import Done, Engines, EngineStatus, Generate, ListEngines, LoadFromDisk, Message

TOKENS = 64
VERSION = 1
RUN = "benchmark-of-generation"
WINDOW = {"text": 0, "image": 1, "window": 4}
REQUESTS = {1: 6, 4: 16, 16: 32}
"""A round, by concurrency; as many as 4 times the concurrency otherwise."""
TIMEOUT_S = 300.0
IDLE_S = 5.0
UNITS = {"wall_seconds": "s", "requests_per_second": "1/s", "cpu_seconds": "s", "all_cpu_seconds": "s"}
METRICS = list(UNITS)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

Ask = Callable[[int, list[int], dict[str, bytes]], Awaitable[int]]
"""(slot, prompt, images by digest, oldest first) -> number of tokens."""


def serve(config: RunConfig, keys: Keys, coordinator: str, directory: str) -> None:
    """The engine host's process."""
    host = EngineHost(
        config,
        run_id=RUN,
        name="engine-0",
        index=0,
        address="tcp://127.0.0.1:*",
        coordinator_address=coordinator,
        log_dir=Path(directory),
        keys=keys,
    )
    asyncio.run(host.run())


class FakeCoordinator:
    """Lists the one host."""

    def __init__(self, keys: Keys) -> None:
        self.server = Server("tcp://127.0.0.1:*", RUN, {ListEngines: self._list, EngineStatus: self._hear}, keys=keys)
        self.status: EngineStatus | None = None

    async def _list(self, _: str, message: Message) -> Engines:
        return Engines([self.status] if self.status else [])

    async def _hear(self, _: str, status: EngineStatus) -> Done:
        self.status = status
        return Done()

    async def until(self, state: str) -> EngineStatus:
        """The host's word that it is in that state."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.status is None or self.status.state != state:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return self.status


class Prompts:
    """Prompts without common prefixes, and the screenshots of each slot's episode."""

    def __init__(self, processor: Processor, kind: str) -> None:
        self._processor, self._window = processor, WINDOW[kind]
        self._numbers = itertools.count()
        self._images: dict[int, dict[str, bytes]] = {}

    def next(self, slot: int) -> tuple[list[int], dict[str, bytes]]:
        """Of that slot's next step."""
        number = next(self._numbers)
        shown = self._images.setdefault(slot, {})
        for _ in range(1 if len(shown) == self._window else self._window):
            if self._window:
                data = screenshot()
                shown[image_digest(data)] = data
        for old in list(shown)[: -self._window or None]:
            del shown[old]
        text = f"{number} is the number of this step.\n{IMAGE * len(shown)}" + "Click the button.\n" * 20
        return self._processor.encode(text), dict(shown)


def screenshot() -> bytes:
    """A noisy PNG of 210 × 160, 100 KB."""
    from PIL import Image

    file = io.BytesIO()
    pixels = np.frombuffer(np.random.bytes(210 * 160 * 3), np.uint8).reshape(210, 160, 3)
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


@contextlib.asynccontextmanager
async def engine(directory: Path) -> AsyncIterator[tuple[Processor, dict[str, Ask], psutil.Process]]:
    """An engine host that serves, what asks it in each arm, and its process."""
    model = make_tiny_model(directory / "model", [f"Click the button {i}. step number\n" for i in range(400)])
    processor = Processor.load(model)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as held:
        port = held.getsockname()[1]
    config = RunConfig.model_validate(
        {
            "device": "cpu",
            "model": {"path": str(model)},
            "tasks": {"names": ["click-test"]},
            "trainer": {"dtype": "float32"},
            "sampling": {"max_new_tokens": TOKENS},
            "engine": {"port": port, "max_total_tokens": 32768, "threads": 1},
        }
    )
    keys = Keys.make()
    coordinator = FakeCoordinator(keys)
    await coordinator.server.start()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(config, keys, coordinator.server.address, str(directory)))
    process.start()
    asker = Client(coordinator.server.address, RUN, "worker-0", keys=keys)
    banned = np.concatenate([processor.banned_ids(), [processor.end_token_id]])
    client = GenerationClient(asker, config.sampling, banned, [], TIMEOUT_S, keys=keys)
    http = aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    )

    async def ours(slot: int, prompt: list[int], images: dict[str, bytes]) -> int:
        reply = await client.generate(prompt, images, seed=1, temperature=1.0, timeout_s=TIMEOUT_S, affinity=slot)
        return len(reply.response_ids) // INT32.itemsize

    async def plain(slot: int, prompt: list[int], images: dict[str, bytes]) -> int:
        message = Generate(
            "", pack(prompt, INT32), [], {}, TOKENS, 1.0, 1, pack(banned, INT32), b"", TIMEOUT_S, TIMEOUT_S
        )
        body = request_body(message, list(images.values()), version=VERSION) | {"stream": False}
        del body["sampling_params"]["stream_interval"]
        headers = {"Content-Type": "application/json"}
        async with http.post("/generate", data=msgspec.json.encode(body), headers=headers) as answer:
            reply = msgspec.json.decode(await answer.read())
        return len(reply["meta_info"]["output_token_logprobs"])

    try:
        status = await coordinator.until("waiting_weights")
        control = Client(status.address, RUN, "trainer", keys=keys)
        await control.request(LoadFromDisk(str(model), VERSION, 60.0), timeout=70.0, expect=Done)
        control.close()
        await coordinator.until("serving")
        yield processor, {"plain": plain, "ours": ours}, psutil.Process(process.pid)
    finally:
        await http.close()
        await client.close()
        asker.close()
        process.terminate()
        await asyncio.to_thread(process.join, 10)
        await asyncio.to_thread(reap, RUN)
        await coordinator.server.close()


def cpu_seconds(process: psutil.Process, *, below: bool = False) -> float:
    """Of a process, or of all that are below it; by the scheduler's own account of their threads, in nanoseconds."""
    total = 0
    for found in process.children(recursive=True) if below else [process]:
        for file in Path(f"/proc/{found.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread that just ended
                total += int(file.read_text().split()[0])
    return total / 1e9


async def measure(ask: Ask, prompts: Prompts, concurrent: int, host: psutil.Process, idle: float) -> dict[str, float]:
    """One round.  idle: CPU seconds a second of the host without requests, which are taken off."""
    requests = REQUESTS.get(concurrent, 4 * concurrent)
    walls: list[float] = []
    asked = [[prompts.next(slot) for _ in range(requests // concurrent)] for slot in range(concurrent)]

    async def slot(number: int) -> None:
        for prompt, images in asked[number]:
            began = time.monotonic()
            tokens = await ask(number, prompt, images)
            walls.append(time.monotonic() - began)
            assert tokens == TOKENS, tokens

    here = psutil.Process()
    cpu, sglang = cpu_seconds(here) + cpu_seconds(host), cpu_seconds(host, below=True)
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(concurrent):
            group.create_task(slot(number))
    wall = time.monotonic() - began
    cpu = cpu_seconds(here) + cpu_seconds(host) - cpu - idle * wall
    sglang = cpu_seconds(host, below=True) - sglang
    return {
        "wall_seconds": statistics.fmean(walls),
        "requests_per_second": requests / wall,
        "cpu_seconds": cpu / requests,
        "all_cpu_seconds": (cpu + sglang) / requests,
    }


async def idle_share(host: psutil.Process) -> float:
    """CPU seconds a second of the host while nothing is asked: its watch and its heartbeats."""
    before, began = cpu_seconds(host), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (cpu_seconds(host) - before) / (time.monotonic() - began)


async def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All figures of both arms."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="mwebrl-") as folder:
        async with engine(Path(folder)) as (processor, arms, host):
            for kind, concurrent in itertools.product(arguments.kinds, arguments.concurrent):
                idle = await idle_share(host)
                found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
                prompts = {arm: Prompts(processor, kind) for arm in arms}
                for number in range(arguments.rounds + 1):
                    for arm in list(arms)[:: -1 if number % 2 else 1]:
                        figures = await measure(arms[arm], prompts[arm], concurrent, host, idle)
                        if number:  # the first warms up
                            found[arm].append(figures)
                median = {
                    arm: {m: statistics.median(f[m] for f in rounds) for m in METRICS} for arm, rounds in found.items()
                }
                case = f"{kind}_{concurrent}"
                for arm, figures in median.items():
                    rows += [_fine(f"{arm}_{case}", metric, figures[metric], UNITS[metric]) for metric in METRICS]
                ratios = {m: median["ours"][m] / median["plain"][m] for m in METRICS if m != "cpu_seconds"}
                rows += [row(f"ours_{case} / plain_{case}", m, ratio, "ratio") for m, ratio in ratios.items()]
                added = 1000 * (median["ours"]["cpu_seconds"] - median["plain"]["cpu_seconds"])
                rows.append(row(f"ours_{case} - plain_{case}", "cpu_milliseconds", added, "ms"))
                print(f"{case}: {added:.2f} ms; " + ", ".join(f"{m} {r:.3f}" for m, r in ratios.items()), flush=True)
    return rows


def _fine(case: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    """Seconds as milliseconds: a request costs few."""
    if unit == "s":
        return row(case, metric.replace("_seconds", "_milliseconds"), 1000 * value, "ms")
    return row(case, metric, value, unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--kinds", nargs="+", choices=WINDOW, default=list(WINDOW))
    parser.add_argument("--rounds", type=int, default=3, help="measured, after one to warm up")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    report(asyncio.run(compare(arguments)), arguments.json)


if __name__ == "__main__":
    main()
