"""What asynchrony brings at the paper's scale: η = 2 against η = 0, real coordinator, queue and sockets, scripted service times.

    python -m benchmarks.async_vs_sync [--steps 16] [--speed 200] [--json FILE] [key=value …]

Service times are those of benchmarks/async_vs_sync.yaml, each with where it comes from, made `--speed` times shorter;
`key=value` changes one.  Simulated: pages, engines and trainer, which only wait.  Engines serve in order of arrival, at most
`engine_steps_per_s` together, none faster than `engine_alone_s`, and stand still during a refresh.  Real: the coordinator, its
ledger, the screenshot store (no screenshots are sent) and TCP with CURVE.  The arms differ in `replay.eta` alone; both are
measured from the end of the second train step to the end of the last.

Idle shares: the trainer waits for a batch; the engines serve less than they could; a slot has no episode.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks._table import report, row
from benchmarks.coordinator import AWAY_S, TIMEOUT_S, coordinator_process, store_process
from megatron_webrl.config import RunConfig, validate
from megatron_webrl.trajectory import Assignment, Outcome, Trajectory, encode_steps
from megatron_webrl.wire import BlockingClient, Client, Keys, WireError
from megatron_webrl.wire.messages import (
    Assignments,
    BeginTraining,
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

SERVICE_TIMES = Path(__file__).with_suffix(".yaml")
SLOTS_A_WORKER = 32
SKIPPED_STEPS = 2
PAUSE_S = 0.002

spawn = multiprocessing.get_context("spawn")


def configure(directory: Path, times: Any, eta: int) -> RunConfig:
    return validate(
        {
            "run_dir": str(directory),
            "model": {"path": "none"},
            "tasks": {"names": ["click-test", "focus-text", "enter-text"]},
            "browser": {"slots": SLOTS_A_WORKER, "workers": math.ceil(times.slots / SLOTS_A_WORKER)},
            "replay": {"group_size": times.group_size, "groups_per_step": times.groups_per_step, "eta": eta},
            "trainer": {"steps": 10**9},
            "observe": {"trace": False, "record_every": 10**9},
        },
        "benchmark",
    )


def success_spread(mean: float, mixed: float, group_size: int) -> tuple[float, float]:
    """(a, b) of the Beta distribution of the tasks' success rates with that mean, under which that share of the groups has
    mixed rewards."""

    def share(n: float) -> float:
        a, b = mean * n, (1 - mean) * n

        def all_equal(a: float, b: float) -> float:  # E[p^G]
            return math.exp(
                math.lgamma(a + group_size) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(a + b + group_size)
            )

        return 1 - all_equal(a, b) - all_equal(b, a)

    low, high = 1e-3, 1e3
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if share(middle) < mixed else (low, middle)
    return mean * low, (1 - mean) * low


class Engines:
    """All of them together, in one event loop."""

    def __init__(self, times: Any, speed: float, version: Any, paused: Any) -> None:
        self.served = 0
        self._gap, self._alone = 1 / times.engine_steps_per_s / speed, times.engine_alone_s / speed
        self._version, self._paused = version, paused
        self._free_at = 0.0

    async def reply(self) -> int:
        """One reply; returns the version that it came from."""
        loop = asyncio.get_running_loop()
        start = max(loop.time(), self._free_at)
        self._free_at = start + self._gap
        await asyncio.sleep(start - loop.time())
        while self._paused.value:
            await asyncio.sleep(PAUSE_S)
            self._free_at = max(self._free_at, loop.time() + self._gap)
        version = int(self._version.value)
        await asyncio.sleep(self._alone)
        self.served += 1
        return version


def rollout_process(address: str, keys: Keys, times: Any, speed: float, shared: dict[str, Any]) -> None:
    asyncio.run(_rollout(address, keys, times, speed, shared))


async def _rollout(address: str, keys: Keys, times: Any, speed: float, shared: dict[str, Any]) -> None:
    engines = Engines(times, speed, shared["version"], shared["paused"])
    spread = success_spread(times.success_mean, times.mixed_share, times.group_size)
    slots = [SLOTS_A_WORKER] * (times.slots // SLOTS_A_WORKER) + [times.slots % SLOTS_A_WORKER]
    busy = [0]

    async def account() -> None:
        """Slots in use, integrated over time, and replies: read by whoever measures."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(PAUSE_S * 5)
            now = time.monotonic()
            shared["slot_seconds"].value += busy[0] * (now - last)
            shared["served"].value = engines.served
            last = now

    await asyncio.gather(
        account(),
        *(_worker(address, keys, n, size, engines, times, speed, spread, busy) for n, size in enumerate(slots) if size),
    )


async def _worker(
    address: str,
    keys: Keys,
    index: int,
    slots: int,
    engines: Engines,
    times: Any,
    speed: float,
    spread: tuple[float, float],
    busy: list[int],
) -> None:
    name = f"worker-{index}"
    client = Client(address, "bench", name, keys=keys)
    running: dict[tuple[int, int, int], asyncio.Task[None]] = {}
    nothing = encode_steps([])

    def start(assignment: Assignment) -> None:
        if assignment.key not in running:
            running[assignment.key] = asyncio.create_task(slot(assignment))

    async def slot(assignment: Assignment) -> None:
        busy[0] += 1
        try:
            trajectory = await _episode(assignment, engines, times, speed, spread, name, nothing)
        finally:
            busy[0] -= 1
        message = SubmitTrajectory(trajectory, name, "session", more=True)
        following: list[Assignment] = []
        with contextlib.suppress(WireError):
            following = (await client.request(message, timeout=TIMEOUT_S, expect=Submitted)).assignments
        del running[assignment.key]
        for next_one in following:
            start(next_one)

    while True:
        free = slots - len(running)
        message = GetAssignments(name, "session", free, list(running), 1.0 if free else 0.0)
        try:
            for assignment in (await client.request(message, timeout=TIMEOUT_S, expect=Assignments)).assignments:
                start(assignment)
        except WireError:
            continue
        if len(running) >= slots:
            await asyncio.wait(running.values(), timeout=1.0, return_when=asyncio.FIRST_COMPLETED)


async def _episode(
    assignment: Assignment,
    engines: Engines,
    times: Any,
    speed: float,
    spread: tuple[float, float],
    name: str,
    payload: bytes,
) -> Trajectory:
    hand = random.Random(assignment.group_id)
    rate = hand.betavariate(*spread)
    hand = random.Random(assignment.seed)
    success = hand.random() < rate
    began, versions = time.time(), []
    steps = _steps(hand, times.steps_success if success else times.steps_failure, times)
    for _ in range(steps):
        page = hand.lognormvariate(math.log(times.page_s) - times.page_sigma**2 / 2, times.page_sigma)
        await asyncio.sleep(page / speed)
        versions.append(await engines.reply())
    outcome = Outcome.SUCCESS if success else Outcome.FAILURE
    return Trajectory(
        assignment, outcome, "scripted", float(success), steps, steps, steps, min(versions), max(versions), [], name, began,
        time.time(), payload,
    )  # fmt: skip


def _steps(hand: random.Random, mean: float, times: Any) -> int:
    """Length of an episode: log-normal, cut at the horizon."""
    drawn = hand.lognormvariate(math.log(mean) - times.steps_sigma**2 / 2, times.steps_sigma)
    return max(1, min(times.horizon, round(drawn)))


def run_trainer(
    client: BlockingClient, times: Any, speed: float, steps: int, shared: dict[str, Any]
) -> dict[str, float]:
    """Takes, waits as long as training and a refresh would, publishes; returns the arm's figures."""

    def ask(message: Any, expect: Any) -> Any:
        return client.request(message, timeout=TIMEOUT_S, expect=expect, retry_s=AWAY_S)

    def now() -> dict[str, float]:
        status = ask(GetStatus(), Status)
        read = {name: float(shared[name].value) for name in ("slot_seconds", "served")}
        dropped = {f"dropped_{reason}": float(n) for reason, n in status.account.dropped.items()}
        return {"time": time.monotonic(), "trajectories": float(status.trajectories), **read, **dropped}

    shared["version"].value = ask(TrainerStarted(0, -1), Version).version
    ask(BeginTraining(), Done)
    waited, begin = 0.0, {}
    for step in range(steps):
        asked = time.monotonic()
        while not (manifest := ask(Take(step, shared["version"].value, 2.0), Manifest)).ready:
            if time.monotonic() - asked > AWAY_S * 3:
                raise SystemExit(f"no batch for step {step} in {AWAY_S * 3:.0f} s")
        waited += time.monotonic() - asked
        ask(FetchGroups(manifest.group_ids), Groups)
        time.sleep(times.train_s / speed)
        version = ask(ClaimVersion(shared["version"].value), Version).version
        shared["paused"].value = 1
        time.sleep(times.refresh_s / speed)
        shared["version"].value, shared["paused"].value = version, 0
        ask(StepTrained(step, version, 1, {}), Done)
        if step + 1 == SKIPPED_STEPS:
            waited, begin = 0.0, now()
    end = now()
    took, made = end["time"] - begin["time"], end["trajectories"] - begin["trajectories"]
    stale = end.get("dropped_stale", 0.0) - begin.get("dropped_stale", 0.0)
    served = end["served"] - begin["served"]
    trained = (steps - SKIPPED_STEPS) * times.groups_per_step * times.group_size
    return {
        "trajectories_per_hour": made / took * 3600 / speed,
        "trained_per_hour": trained / took * 3600 / speed,
        "minutes_per_step": took / (steps - SKIPPED_STEPS) * speed / 60,
        "idle_share_trainer": waited / took,
        "idle_share_engines": 1 - served / (times.engine_steps_per_s * speed * took),
        "idle_share_slots": 1 - (end["slot_seconds"] - begin["slot_seconds"]) / (times.slots * took),
        "stale_share": stale / max(1.0, made),
    }


UNITS = {"trajectories_per_hour": "1/h", "trained_per_hour": "1/h", "minutes_per_step": "min"}


def measure(directory: Path, times: Any, eta: int, steps: int, speed: float) -> dict[str, float]:
    from megatron_webrl.launch.cluster import free_port

    directory.mkdir()
    config, keys = configure(directory, times, eta), Keys.make()
    address, store = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    shared = {"version": spawn.Value("i", -1), "paused": spawn.Value("i", 0)}
    shared |= {"slot_seconds": spawn.Value("d", 0.0), "served": spawn.Value("d", 0.0)}
    client = BlockingClient(address, "bench", "trainer", keys=keys)
    started = []
    try:
        for function, arguments in (
            (store_process, (config, store, keys)),
            (coordinator_process, (config, address, store, keys)),
            (rollout_process, (address, keys.for_client(), times, speed, shared)),
        ):
            started.append(spawn.Process(target=function, args=arguments, daemon=True))
            started[-1].start()
        return run_trainer(client, times, speed, steps, shared)
    finally:
        client.close()
        for process in started:
            process.kill()
            process.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16, help="train steps of each arm")
    parser.add_argument("--speed", type=float, default=200.0, help="how much faster than the service times")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="other service times")
    arguments = parser.parse_args()
    if arguments.steps <= SKIPPED_STEPS:
        raise SystemExit(f"--steps={arguments.steps}: the first {SKIPPED_STEPS} are not measured: give more")
    times: Any = OmegaConf.load(SERVICE_TIMES)
    changes = OmegaConf.from_dotlist(arguments.overrides)
    if unknown := set(changes) - set(times):
        raise SystemExit(f"{sorted(map(str, unknown))} are no service times: those are {', '.join(map(str, times))}")
    times = OmegaConf.merge(times, changes)
    directory = Path(tempfile.mkdtemp(prefix="mwebrl-bench-"))
    rows, arms = [], {}
    try:
        for case, eta in (("eta0", 0), (f"eta{times.eta}", times.eta)):
            arms[case] = measure(directory / case, times, eta, arguments.steps, arguments.speed)
            rows += [row(case, metric, value, UNITS.get(metric, "share")) for metric, value in arms[case].items()]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for metric in ("trajectories_per_hour", "trained_per_hour"):
        ratio = arms[f"eta{times.eta}"][metric] / arms["eta0"][metric]
        rows.append(row("ratio", metric, ratio, f"η={times.eta} / η=0"))
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
