"""What the coordinator costs: simulated workers over real TCP sockets with CURVE, the ledger and the trajectories on disk.

    python -m benchmarks.coordinator [--seconds 10] [--slots 64 512 2048] [--rate 0] [--hours 0] [--json FILE]

The coordinator and the screenshot store are the real processes.  Simulated: workers of 32 slots each (a slot sends its
trajectory, and its next attempt comes with the reply, as in the product), and a trainer that takes every batch, fetches all of
its trajectories and saves a checkpoint every five steps.  Trajectories have random tokens and no screenshots.  What counts is
the CPU time of the coordinator's process, all threads (sockets and encryption, asyncio, SQLite, fdatasync), over the
trajectories it accepted.

By default episodes take no time: the load comes as fast as the machine's other cores make it, every slot waits in the
coordinator's queue, and assignment times are slots over throughput.  `--rate` offers so many trajectories a second instead
(episodes take half to one and a half of their mean): assignment times are then what a slot loses between two episodes.

Cases SLOTSslots_12kb and SLOTSslots_200kb.  `--hours 10` adds the case `10h`: as many trajectories of 200 KB as the paper's run
made in ten hours (3,100 an hour: 31,000), as fast as they come, with memory and disk at the end of each quarter.  `--profile
DIRECTORY` writes there a cProfile of the coordinator a case; the figures are then not worth keeping.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks._table import report, row
from megatron_webrl.config import RunConfig, validate
from megatron_webrl.trajectory import Assignment, Outcome, Step, Trajectory, encode_steps
from megatron_webrl.wire import BlockingClient, Client, Keys, WireError
from megatron_webrl.wire.messages import (
    Assignments,
    BeginTraining,
    CheckpointDurable,
    ClaimVersion,
    Done,
    FetchGroups,
    GetAssignments,
    GetStatus,
    Groups,
    Manifest,
    Status,
    StepTrained,
    Submitted,
    SubmitTrajectory,
    Take,
    TrainerStarted,
    Version,
)

SLOTS_A_WORKER = 32
GROUP_SIZE = 8
GROUPS_A_MESSAGE = 8
CHECKPOINT_EVERY = 5
SIZES = {"12kb": 12 << 10, "200kb": 200 << 10}
WARM_UP_S = 3.0
TIMEOUT_S = 30.0
AWAY_S = 120.0
HEARTBEAT_S = 5.0
PAPERS_TRAJECTORIES_PER_HOUR = 3100

spawn = multiprocessing.get_context("spawn")


def configure(directory: Path, slots: int) -> RunConfig:
    """Room for twice the slots, so that they are never held back."""
    return validate(
        {
            "run_dir": str(directory),
            "model": {"path": "none"},
            "tasks": {"names": ["click-test", "focus-text", "enter-text"]},
            "browser": {"slots": SLOTS_A_WORKER, "workers": slots // SLOTS_A_WORKER},
            "replay": {
                "group_size": GROUP_SIZE,
                "groups_per_step": max(16, slots // GROUP_SIZE),
                "eta": 2,
                "max_concurrent_episodes": slots,
            },
            "trainer": {"steps": 10**9},
            "observe": {"trace": False, "record_every": 10**9},
        },
        "benchmark",
    )


def coordinator_process(config: RunConfig, address: str, store: str, keys: Keys, profile: Path | None = None) -> None:
    """Until terminated.  profile: file for a cProfile of it."""
    from megatron_webrl.replay import Coordinator

    role = Coordinator(
        config, run_id="bench", address=address, store_address=store, log_metrics=lambda step, row: None, keys=keys
    )
    if profile is None:
        asyncio.run(role.run())
        return

    async def until_terminated() -> None:
        serving = asyncio.create_task(role.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    statistics = cProfile.Profile(time.process_time)  # of all threads, and not of those who take the CPU meanwhile
    statistics.runcall(asyncio.run, until_terminated())
    statistics.dump_stats(profile)


def store_process(config: RunConfig, address: str, keys: Keys) -> None:
    from megatron_webrl.screenshots import serve_store

    asyncio.run(
        serve_store(address, "bench", Path(config.run_dir) / "screenshots", config.replay.screenshot_bytes, keys=keys)
    )


def trainer_process(address: str, keys: Keys, version: Any) -> None:
    """Takes all there is.  version: shared with the workers."""
    client = BlockingClient(address, "bench", "trainer", keys=keys)

    def ask(message: Any, expect: Any) -> Any:
        return client.request(message, timeout=TIMEOUT_S, expect=expect, retry_s=AWAY_S)

    step = 0
    version.value = ask(TrainerStarted(0, -1), Version).version
    while True:
        manifest = ask(Take(step, version.value, 2.0), Manifest)
        if not manifest.ready:
            continue
        for first in range(0, len(manifest.group_ids), GROUPS_A_MESSAGE):
            ask(FetchGroups(manifest.group_ids[first : first + GROUPS_A_MESSAGE]), Groups)
        version.value = ask(ClaimVersion(version.value), Version).version
        ask(StepTrained(step, version.value, 1, {}), Done)
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            ask(CheckpointDurable(step), Done)


def workers_process(
    address: str, keys: Keys, workers: int, size: int, episode_s: float, version: Any, waits: Any
) -> None:
    """`workers` of them in one event loop.  episode_s: mean length of an episode.  waits: gets seconds from a finished episode
    to the slot's next one."""
    asyncio.run(_workers(address, keys, workers, size, episode_s, version, waits))


async def _workers(
    address: str, keys: Keys, workers: int, size: int, episode_s: float, version: Any, waits: Any
) -> None:
    names = [f"worker-{n}" for n in range(workers)]
    await asyncio.gather(*(_worker(address, keys, name, size, episode_s, version, waits) for name in names))


async def _worker(address: str, keys: Keys, name: str, size: int, episode_s: float, version: Any, waits: Any) -> None:
    client = Client(address, "bench", name, keys=keys)
    payload = encode_steps([Step(b"", [], os.urandom(size), b"", b"", "stop", "", None)])
    running: dict[tuple[int, int, int], asyncio.Task[None]] = {}
    freed: deque[float] = deque(maxlen=SLOTS_A_WORKER)
    seen = 0

    def start(assignment: Assignment) -> None:
        nonlocal seen
        if assignment.key in running:
            return
        running[assignment.key] = asyncio.create_task(slot(assignment))
        if freed:
            waited = time.time() - freed.popleft()
            seen += 1
            if episode_s or seen % 16 == 0:
                waits.put(waited)

    async def slot(assignment: Assignment) -> None:
        if episode_s:
            await asyncio.sleep(random.uniform(0.5, 1.5) * episode_s)  # a longer tail would fill the queue
        began = time.time()
        success = assignment.sample_index % 2 == 0
        outcome = Outcome.SUCCESS if success else Outcome.FAILURE
        trajectory = Trajectory(
            assignment, outcome, "scripted", float(success), 10, 100, 1000, version.value, version.value, [], name, began,
            began, payload,
        )  # fmt: skip
        message = SubmitTrajectory(trajectory, name, "session", more=True)
        following: list[Assignment] = []
        with contextlib.suppress(WireError):
            following = (await client.request(message, timeout=TIMEOUT_S, expect=Submitted)).assignments
        del running[assignment.key]
        freed.append(began)
        for next_one in following:
            start(next_one)

    while True:
        free = SLOTS_A_WORKER - len(running)
        message = GetAssignments(name, "session", free, list(running), HEARTBEAT_S if free else 0.0)
        try:
            for assignment in (await client.request(message, timeout=TIMEOUT_S, expect=Assignments)).assignments:
                start(assignment)
        except WireError:
            continue
        due = time.monotonic() + HEARTBEAT_S
        while len(running) >= SLOTS_A_WORKER and (left := due - time.monotonic()) > 0:
            await asyncio.wait(running.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)


@contextlib.contextmanager
def system(
    directory: Path, slots: int, size: int, episode_s: float = 0.0, profile: Path | None = None
) -> Iterator[tuple[psutil.Process, BlockingClient, Any]]:
    """All processes at work: (the coordinator's, a client of it, the queue of waits)."""
    from megatron_webrl.launch.cluster import free_port

    config, keys = configure(directory, slots), Keys.make()
    directory.mkdir()
    address, store = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    client_keys = keys.for_client()
    version, waits = spawn.Value("i", -1), spawn.Queue(100_000)
    workers = max(1, slots // SLOTS_A_WORKER)
    started = []
    client = BlockingClient(address, "bench", "driver", keys=client_keys)
    try:
        for function, arguments in (
            (store_process, (config, store, keys)),
            (coordinator_process, (config, address, store, keys, profile)),
            (trainer_process, (address, client_keys, version)),
            (workers_process, (address, client_keys, workers, size, episode_s, version, waits)),
        ):
            started.append(spawn.Process(target=function, args=arguments, daemon=True))
            started[-1].start()
        client.request(BeginTraining(), timeout=5.0, expect=Done, retry_s=AWAY_S)
        yield psutil.Process(started[1].pid), client, waits
    finally:
        client.close()
        for process in reversed(started):
            process.terminate()
            process.join(10)
            process.kill()
        shutil.rmtree(directory, ignore_errors=True)


def measure(
    directory: Path, slots: int, size: int, seconds: float, rate: float = 0.0, profile: Path | None = None
) -> dict[str, float]:
    """rate: trajectories a second that are offered; 0: as many as there can be.  profile: file for the coordinator's."""
    episode_s = slots / rate if rate else 0.0
    with system(directory, slots, size, episode_s, profile) as (process, client, waits):
        time.sleep(WARM_UP_S + 2 * episode_s)
        while not waits.empty():
            waits.get()
        before, cpu, began = _status(client), _cpu(process), time.monotonic()
        time.sleep(seconds)
        after, took = _status(client), time.monotonic() - began
        used = _cpu(process) - cpu
        done = after.trajectories - before.trajectories
        found = []
        while not waits.empty():
            found.append(waits.get())
        if not done or not found:
            raise SystemExit(f"{slots} slots: {done} trajectories in {took:.0f} s: give --seconds more")
        found.sort()
        return {
            "trajectories_per_hour": done / took * 3600,
            "cpu_microseconds_per_trajectory": used / done * 1e6,
            "rss_bytes": float(process.memory_info().rss),
            "assignment_ms_p50": found[len(found) // 2] * 1e3,
            "assignment_ms_p99": found[int(len(found) * 0.99)] * 1e3,
            "coordinator_busy": used / took,
        }


UNITS = {
    "trajectories_per_hour": "1/h",
    "cpu_microseconds_per_trajectory": "µs",
    "rss_bytes": "bytes",
    "assignment_ms_p50": "ms from the end of an episode",
    "assignment_ms_p99": "ms from the end of an episode",
    "coordinator_busy": "cores",
}


def endurance(directory: Path, hours: float) -> list[dict[str, Any]]:
    """Memory and disk at the end of each quarter of the trajectories of so many hours."""
    rows, case, trajectories = [], f"{hours:g}h", int(hours * PAPERS_TRAJECTORIES_PER_HOUR)
    with system(directory, 512, SIZES["200kb"]) as (process, client, waits):
        for quarter in range(1, 5):
            deadline = time.monotonic() + 600
            while _status(client).trajectories < trajectories * quarter // 4:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{trajectories // 4} trajectories took more than 600 s")
                time.sleep(0.5)
                while not waits.empty():
                    waits.get()
            rows.append(row(case, f"rss_bytes_q{quarter}", process.memory_info().rss, "bytes"))
            rows.append(row(case, f"disk_bytes_q{quarter}", _disk(directory), "bytes, ledger and trajectories"))
        rows.append(row(case, "trajectories", _status(client).trajectories, ""))
    return rows


def _disk(directory: Path) -> int:
    """Bytes of all files."""
    total = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the coordinator removes some meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def _status(client: BlockingClient) -> Status:
    return client.request(GetStatus(), timeout=TIMEOUT_S, expect=Status, retry_s=AWAY_S)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--rate", type=float, default=0.0, help="trajectories a second; 0: as many as there can be")
    parser.add_argument("--hours", type=float, default=0.0, help="of the paper's trajectories, for growth; 0: none")
    parser.add_argument("--profile", type=Path, metavar="DIRECTORY", help="for a cProfile of each case")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="mwebrl-bench-"))
    rows = []
    if arguments.profile:
        arguments.profile.mkdir(parents=True, exist_ok=True)
    try:
        for slots in arguments.slots:
            for name, size in SIZES.items():
                case = f"{slots}slots_{name}"
                profile = arguments.profile / f"{case}.prof" if arguments.profile else None
                measured = measure(directory / case, slots, size, arguments.seconds, arguments.rate, profile)
                rows += [row(case, metric, value, UNITS[metric]) for metric, value in measured.items()]
        if arguments.hours:
            rows += endurance(directory / "hours", arguments.hours)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
