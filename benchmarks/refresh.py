"""How long engines stand still for a refresh, against the bare broadcast of the same bytes, and what generation loses.

    python -m benchmarks.refresh [--rounds 5] [--cases receivers2_retract_64MB …] [--seconds 40] [--json FILE]

A real trainer rank (float32, a Qwen3-VL of some 260 MB) publishes to real SGLang servers on this machine, over gloo.

`pause_seconds`: from the first `BeginRefresh` until the last engine goes on; idle engines; median of the rounds after a first
one, which makes the weight group.  `raw_broadcast_seconds`: the same buckets, from a buffer in this process to plain receiver
processes, by gloo's broadcast, one after another; between the refreshes of the same case, so that both meet the same noise.
`publish_seconds`: from the call until all is over, the copy out of the model included, which overlaps.

Cases: receiversN_MODE_SIZE, N servers, buckets of at most SIZE; receiversN_disk: all from an export on disk.

`tokens_lost_share`, of receivers2_retract_64MB: 1 − tokens a second with a refresh every 20 s / without any, at 4 replies at once
a server, in blocks of --seconds, alternating.  0 s leaves it out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks._table import report, row

CASES = [
    "receivers1_retract_64MB",
    "receivers2_retract_64MB",
    "receivers2_retract_4MB",
    "receivers2_retract_16MB",
    "receivers2_retract_256MB",
    "receivers2_in_place_64MB",
    "receivers2_disk",
]
HEADLINE = "receivers2_retract_64MB"
REFRESH_EVERY_S = 20.0
REPLIES, REPLY_TOKENS = 4, 64
START_S = 300.0
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Of the decoder: 64 M parameters."""
MROPE_SECTION = [12, 10, 10]
"""Half of head_dim, shared out over time, height and width."""


def make_model(directory: Path) -> Path:
    """A tiny model's files around a larger decoder with random weights."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from megatron_webrl.tiny_model import make_tiny_model

    make_tiny_model(directory, ["Click the button.", "user\nassistant\n"])
    file = directory / "config.json"
    data = json.loads(file.read_text())
    text = data["text_config"] = {k: v for k, v in data["text_config"].items() if k != "layer_types"} | SHAPE
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": MROPE_SECTION}
    data["vision_config"]["out_hidden_size"] = SHAPE["hidden_size"]
    config = Qwen3VLConfig.from_dict(data)
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(directory)
    return directory


class Fleet:
    """Engine hosts, and the coordinator that lists them, in an event loop of its own."""

    def __init__(self, model: Path, directory: Path, count: int, mode: str) -> None:
        from megatron_webrl.config import RunConfig
        from megatron_webrl.trainer.source import LoopThread

        self.directory = directory
        self.settings = {
            "device": "cpu",
            "run_dir": str(directory / "run"),
            "model": {"path": str(model)},
            "tasks": {"names": ["click-test"]},
            "trainer": {"dtype": "float32", "threads": 1},
            "sampling": {"max_new_tokens": REPLY_TOKENS},
            "engine": {"max_total_tokens": 8192, "max_running_requests": 16, "threads": 1, "hosts": count},
        }
        self.mode = mode
        self.config = RunConfig.model_validate({**self.settings, "refresh": {"mode": mode}})
        self.run_id = f"refresh-{os.getpid()}-{time.monotonic_ns()}"
        self.address = f"ipc://{directory}/coordinator"
        self.thread = LoopThread("fleet")
        self.statuses: dict[str, Any] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.thread.submit(self._start(count)).result(30)
        self.wait_for("waiting_weights", "serving")

    async def _start(self, count: int) -> None:
        from megatron_webrl.engine import EngineHost
        from megatron_webrl.wire import Server
        from megatron_webrl.wire.messages import Done, Engines, EngineStatus, ListEngines

        async def list_engines(_: str, message: ListEngines) -> Engines:
            return Engines(list(self.statuses.values()))

        async def hear(_: str, message: EngineStatus) -> Done:
            self.statuses[message.name] = message
            return Done()

        self.server = Server(self.address, self.run_id, {ListEngines: list_engines, EngineStatus: hear})
        await self.server.start()
        for index in range(count):
            name = f"engine-{index}"
            host = EngineHost(
                self.config,
                run_id=self.run_id,
                name=name,
                index=index,
                address=f"ipc://{self.directory}/{name}",
                coordinator_address=self.address,
                log_dir=self.directory,
            )
            self.tasks.append(asyncio.create_task(host.run()))

    def wait_for(self, *states: str) -> None:
        """Until all hosts are in one of these states.  Raises SystemExit after START_S."""
        deadline = time.monotonic() + START_S
        while len(self.statuses) < len(self.tasks) or any(s.state not in states for s in self.statuses.values()):
            if time.monotonic() > deadline or any(task.done() for task in self.tasks):
                raise SystemExit(f"the engines did not start: {self.statuses} (logs: {self.directory})")
            time.sleep(0.1)

    def close(self) -> None:
        async def stop() -> None:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            await self.server.close()

        self.thread.submit(stop()).result(60)
        self.thread.close()


@contextmanager
def publishing(fleet: Fleet, bucket_bytes: int, transport: str) -> Iterator[tuple[Any, int]]:
    """A trainer's `Publishing`, and the bytes of its weights."""
    from megatron_webrl.config import RunConfig
    from megatron_webrl.trainer import PolicyTrainer
    from megatron_webrl.trainer.publishing import Publishing

    refresh = {"bucket_bytes": bucket_bytes, "transport": transport, "mode": fleet.mode, "verify_every": 0}
    config = RunConfig.model_validate({**fleet.settings, "refresh": refresh})
    place: dict[str, Any] = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1", "master_port": 0}
    trainer = PolicyTrainer(config, **place, total_steps=1)
    part = Publishing(
        trainer, run_id=fleet.run_id, coordinator_address=fleet.address, master_address="127.0.0.1", keys=None
    )
    try:
        yield part, sum(bucket.nbytes for bucket in trainer.plan)
    finally:
        part.close()
        trainer.close()


def _receive(rank: int, world: int, port: int, sizes: Any) -> None:
    """A receiver of bare broadcasts; `sizes` is a queue of lists of bucket sizes, None ends it."""
    import torch

    torch.set_num_threads(1)
    group = _gloo(rank, world, port, master=False)
    while (wanted := sizes.get()) is not None:
        buffers = [torch.empty(size, dtype=torch.uint8) for size in wanted]
        group.barrier().wait()
        for buffer in buffers:
            group.broadcast([buffer], _root()).wait()
        group.barrier().wait()


def _root() -> Any:
    from torch import distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options


def _gloo(rank: int, world: int, port: int, *, master: bool) -> Any:
    from torch import distributed as dist

    store = dist.TCPStore("127.0.0.1", port, world, is_master=master, wait_for_workers=False)
    return dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=600))


class RawBroadcast:
    """Plain receiver processes, and their sender here."""

    def __init__(self, receivers: int) -> None:
        import socket

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.queues = [context.Queue() for _ in range(receivers)]
        self.processes = [
            context.Process(target=_receive, args=(rank, receivers + 1, port, queue), daemon=True)
            for rank, queue in enumerate(self.queues, 1)
        ]
        for process in self.processes:
            process.start()
        self.group = _gloo(0, receivers + 1, port, master=True)

    def seconds(self, sizes: list[int]) -> float:
        """Of one broadcast of each size, one after another, until all have all."""
        import torch

        buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        for queue in self.queues:
            queue.put(sizes)
        self.group.barrier().wait()
        began = time.monotonic()
        for buffer in buffers:
            self.group.broadcast([buffer], _root()).wait()
        self.group.barrier().wait()
        return time.monotonic() - began

    def close(self) -> None:
        for queue in self.queues:
            queue.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def measure(case: str, fleet: Fleet, raw: RawBroadcast, rounds: int) -> list[dict[str, Any]]:
    """The rows of one case."""
    size = case.rpartition("_")[2]
    disk = size == "disk"
    bucket_bytes = (64 if disk else int(size.removesuffix("MB"))) << 20
    pauses, whole, bare = [], [], []
    with publishing(fleet, bucket_bytes, "disk" if disk else "broadcast") as (part, total):
        sizes = [bucket.nbytes for bucket in part._trainer.plan]
        for _ in range(rounds + 1):
            bare.append(raw.seconds(sizes))
            part.reserve()
            began = time.monotonic()
            part.publish(time.monotonic_ns() // 1_000_000)
            done = part.wait()
            whole.append(time.monotonic() - began)
            assert len(done.engines) == len(fleet.tasks) and not done.failed, done
            pauses.append(done.pause_s)
    rows = [
        row(case, "bytes", total, "B"),
        row(case, "buckets", len(sizes), ""),
        row(case, "pause_seconds", statistics.median(pauses[1:]), "s"),
        row(case, "raw_broadcast_seconds", statistics.median(bare[1:]), "s"),
        row(case, "publish_seconds", statistics.median(whole[1:]), "s"),
    ]
    rows.append(row(case, "pause_over_raw", rows[2]["value"] / rows[3]["value"], "x"))
    return rows


def tokens_lost(case: str, fleet: Fleet, seconds: float, blocks: int = 2) -> list[dict[str, Any]]:
    """Generation without and with refreshes, in turns."""
    from megatron_webrl.engine import GenerationClient
    from megatron_webrl.processor import Processor
    from megatron_webrl.wire import Client

    processor = Processor.load(fleet.config.model.path)
    banned = [*processor.banned_ids().tolist(), processor.end_token_id]
    prompt = processor.encode("<|im_start|>user\nClick the button.<|im_end|>\n<|im_start|>assistant\n" * 4)
    tokens = [0]

    async def generate() -> None:
        coordinator = Client(fleet.address, fleet.run_id, "worker")
        client = GenerationClient(coordinator, fleet.config.sampling, banned, processor.stop_ids(), 300.0)

        async def one(seed: int) -> None:
            while True:
                reply = await client.generate(prompt, {}, seed=seed, temperature=1.0, timeout_s=120.0)
                tokens[0] += len(reply.response_ids) // 4
                seed += 1000

        try:
            await asyncio.gather(*(one(i) for i in range(REPLIES * len(fleet.tasks))))
        finally:
            await client.close()
            coordinator.close()

    def rate(act: Callable[[], None] | None) -> float:
        before, began = tokens[0], time.monotonic()
        while time.monotonic() - began < seconds:
            due = min(began + seconds, time.monotonic() + REFRESH_EVERY_S)
            if act is not None:
                act()
            time.sleep(max(0.0, due - time.monotonic()))
        return (tokens[0] - before) / (time.monotonic() - began)

    with publishing(fleet, 64 << 20, "broadcast") as (part, _):

        def refresh() -> None:
            part.reserve()
            part.publish(time.monotonic_ns() // 1_000_000)
            part.wait()

        refresh()
        running = fleet.thread.submit(generate())
        time.sleep(5)
        without, with_refresh = [], []
        for _ in range(blocks):
            without.append(rate(None))
            with_refresh.append(rate(refresh))
        if running.done():
            running.result()
        running.cancel()
        time.sleep(1)
    one, other = statistics.mean(without), statistics.mean(with_refresh)
    return [
        row(case, "tokens_per_second", one, "1/s"),
        row(case, "tokens_per_second_refreshed", other, "1/s"),
        row(case, "tokens_lost_share", 1 - other / one, ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--seconds", type=float, default=40.0, help="of a block of tokens_lost_share")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="refresh-") as folder:
        model = make_model(Path(folder) / "model")
        print(f"model: {json.dumps(SHAPE)}, {(model / 'model.safetensors').stat().st_size / 1e6:.0f} MB")
        for receivers, mode in ((1, "retract"), (2, "retract"), (2, "in_place")):
            prefix = f"receivers{receivers}_{mode}_"
            mine = [case for case in options.cases if case.startswith(prefix)]
            if prefix == "receivers2_retract_":
                mine += [case for case in options.cases if case == "receivers2_disk"]
            if not mine:
                continue
            directory = Path(tempfile.mkdtemp(dir=folder))
            raw = RawBroadcast(receivers)
            fleet = Fleet(model, directory, receivers, mode)
            try:
                for case in mine:
                    rows += measure(case, fleet, raw, options.rounds)
                    print(f"{case}: {rows[-4]['value']:.3f} s, bare {rows[-3]['value']:.3f} s", flush=True)
                if HEADLINE in mine and options.seconds:
                    rows += tokens_lost(HEADLINE, fleet, options.seconds)
            finally:
                fleet.close()
                raw.close()
    report(rows, options.json)


if __name__ == "__main__":
    main()
