"""What asynchrony brings at the paper's scale: η = 2 against η = 0, real coordinator, queue and sockets, scripted service times.

    python -m benchmarks.async_vs_sync [--steps 12] [--speed 100] [--json FILE] [key=value …]

Service times are those of benchmarks/async_vs_sync.yaml, each with where it comes from, made `--speed` times shorter;
`key=value` changes one.  Simulated: pages, engines and trainer, which only wait.  Engines serve in order of arrival, at most
`engine_steps_per_s` together, none faster than `engine_alone_s`, and begin nothing during a refresh.  Real: the coordinator, its
ledger, the screenshot store (no screenshots are sent) and TCP with CURVE.  Measured from the end of the second train step to the
end of the last.

`engine_steps_per_s` is what the paper's asynchronous run reached, so that arm can only come out at the paper's rate: what is
found is how far the synchronous arms stay below.

eta0: `replay.eta=0`, nothing else changed.  Groups without mixed rewards are dropped and replaced, and at most
`groups_per_step` groups are there at once, so the last ones of a batch are looked for nearly one by one.
eta0_oversampled: the same, but a step begins as many groups as hold a batch of mixed ones on average, all at once, drops none
and trains in the same time.  Close to the best that a synchronous run could do; what it trains is counted as one batch.

Idle shares: the trainer waits for a batch; the engines serve less than they could; a slot has no episode.  `overslept`: how much
longer pages and engines took than they were to; above a twentieth the machine is too busy, or `--speed` too high, for the rest
to be believed.
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
from typing import Any, NamedTuple

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
LATE = 0.05

spawn = multiprocessing.get_context("spawn")


class Arm(NamedTuple):
    """What differs.  trained: groups a step that training is worth."""

    eta: int
    groups: int
    dynamic_sampling: bool
    trained: int


def arms_of(times: Any) -> dict[str, Arm]:
    batch = times.groups_per_step
    return {
        "eta0": Arm(0, batch, True, batch),
        "eta0_oversampled": Arm(0, math.ceil(batch / times.mixed_share), False, batch),
        f"eta{times.eta}": Arm(times.eta, batch, True, batch),
    }


def configure(directory: Path, times: Any, arm: Arm) -> RunConfig:
    return validate(
        {
            "run_dir": str(directory),
            "model": {"path": "none"},
            "tasks": {"names": ["click-test", "focus-text", "enter-text"]},
            "browser": {"slots": SLOTS_A_WORKER, "workers": math.ceil(times.slots / SLOTS_A_WORKER)},
            "replay": {
                "group_size": times.group_size,
                "groups_per_step": arm.groups,
                "eta": arm.eta,
                "dynamic_sampling": arm.dynamic_sampling,
                "max_concurrent_episodes": times.slots,
            },
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


def median_steps(mean: float, sigma: float, horizon: int) -> float:
    """Median of the log-normal whose whole numbers of steps, cut to 1 … horizon, have that mean."""

    def mean_of(mu: float) -> float:  # 1 + the chances of one step more
        return 1 + sum(math.erfc((math.log(n + 0.5) - mu) / sigma / math.sqrt(2)) / 2 for n in range(1, horizon))

    low, high = -5.0, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_of(middle) < mean else (low, middle)
    return math.exp(low)


class Clock:
    """Sleeps `speed` times shorter than asked to, and adds up by how much it was late."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.asked = self.took = 0.0

    async def sleep(self, seconds: float) -> None:
        began = time.monotonic()
        await asyncio.sleep(seconds / self.speed)
        self.asked += seconds
        self.took += (time.monotonic() - began) * self.speed


class Engines:
    """All of them together, in one event loop.  `serve` is to run beside those who ask."""

    def __init__(self, times: Any, clock: Clock, version: Any, paused: Any) -> None:
        self.served = 0
        self._gap, self._alone = 1 / times.engine_steps_per_s / clock.speed, times.engine_alone_s
        self._clock, self._version, self._paused = clock, version, paused
        self._asked: asyncio.Queue[asyncio.Future[int]] = asyncio.Queue()  # at most one a slot

    async def reply(self) -> int:
        """One reply; returns the version that it came from."""
        begun: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(begun)
        version = await begun
        await self._clock.sleep(self._alone)
        self.served += 1
        return version

    async def serve(self) -> None:
        """Begin one reply each `gap`; one that came late, since sleeps end late, does not delay those after it."""
        free_at = time.monotonic()
        while True:
            if self._asked.empty():
                begun = await self._asked.get()
                free_at = max(free_at, time.monotonic())
            else:
                begun = self._asked.get_nowait()
            await asyncio.sleep(max(0.0, free_at - time.monotonic()))
            while self._paused.value:
                await asyncio.sleep(PAUSE_S)
                free_at = time.monotonic()
            free_at += self._gap
            begun.set_result(int(self._version.value))


def rollout_process(address: str, keys: Keys, times: Any, speed: float, shared: dict[str, Any]) -> None:
    asyncio.run(_rollout(address, keys, times, speed, shared))


async def _rollout(address: str, keys: Keys, times: Any, speed: float, shared: dict[str, Any]) -> None:
    clock = Clock(speed)
    engines = Engines(times, clock, shared["version"], shared["paused"])
    pages = Pages(times, clock)
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
            shared["asked"].value, shared["took"].value = clock.asked, clock.took
            last = now

    await asyncio.gather(
        account(),
        engines.serve(),
        *(_worker(address, keys, n, size, engines, pages, busy) for n, size in enumerate(slots) if size),
    )


async def _worker(
    address: str, keys: Keys, index: int, slots: int, engines: Engines, pages: Pages, busy: list[int]
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
            trajectory = await _episode(assignment, engines, pages, name, nothing)
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
        due = time.monotonic() + 1.0
        while len(running) >= slots and (left := due - time.monotonic()) > 0:
            await asyncio.wait(running.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)


class Pages:
    """Tasks: how likely they are solved, how long episodes and pages are."""

    def __init__(self, times: Any, clock: Clock) -> None:
        self._spread = success_spread(times.success_mean, times.mixed_share, times.group_size)
        self._horizon, self._sigma = times.horizon, times.steps_sigma
        self._medians = {
            success: median_steps(mean, times.steps_sigma, times.horizon)
            for success, mean in ((True, times.steps_success), (False, times.steps_failure))
        }
        self._page = math.log(times.page_s) - times.page_sigma**2 / 2, times.page_sigma
        self._clock = clock

    def draw(self, assignment: Assignment, hand: random.Random) -> tuple[bool, int]:
        """Whether it succeeds, and its steps; hand: of the attempt's seed."""
        success = hand.random() < random.Random(assignment.group_id).betavariate(*self._spread)
        drawn = hand.lognormvariate(math.log(self._medians[success]), self._sigma)
        return success, max(1, min(self._horizon, round(drawn)))

    async def load(self, hand: random.Random) -> None:
        """Action, page and screenshot."""
        await self._clock.sleep(hand.lognormvariate(*self._page))


async def _episode(assignment: Assignment, engines: Engines, pages: Pages, name: str, payload: bytes) -> Trajectory:
    hand = random.Random(assignment.seed)
    success, steps = pages.draw(assignment, hand)
    began, versions = time.time(), []
    for _ in range(steps):
        await pages.load(hand)
        versions.append(await engines.reply())
    outcome = Outcome.SUCCESS if success else Outcome.FAILURE
    return Trajectory(
        assignment, outcome, "scripted", float(success), steps, steps, steps, min(versions), max(versions), [], name, began,
        time.time(), payload,
    )  # fmt: skip


def run_trainer(
    client: BlockingClient, times: Any, arm: Arm, speed: float, steps: int, shared: dict[str, Any]
) -> dict[str, float]:
    """Takes, waits as long as training and a refresh would, publishes; returns the arm's figures."""

    def ask(message: Any, expect: Any) -> Any:
        return client.request(message, timeout=TIMEOUT_S, expect=expect, retry_s=AWAY_S)

    def now() -> dict[str, float]:
        status = ask(GetStatus(), Status)
        read = {name: float(shared[name].value) for name in COUNTED}
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
    asked, slept = end["asked"] - begin["asked"], end["took"] - begin["took"]
    trained = (steps - SKIPPED_STEPS) * arm.trained * times.group_size
    return {
        "trajectories_per_hour": made / took * 3600 / speed,
        "trained_per_hour": trained / took * 3600 / speed,
        "minutes_per_step": took / (steps - SKIPPED_STEPS) * speed / 60,
        "idle_share_trainer": waited / took,
        "idle_share_engines": 1 - served / (times.engine_steps_per_s * speed * took),
        "idle_share_slots": 1 - (end["slot_seconds"] - begin["slot_seconds"]) / (times.slots * took),
        "stale_share": stale / max(1.0, made),
        "overslept": slept / asked - 1,
    }


COUNTED = ("slot_seconds", "served", "asked", "took")
UNITS = {"trajectories_per_hour": "1/h", "trained_per_hour": "1/h", "minutes_per_step": "min"}


def measure(directory: Path, times: Any, arm: Arm, steps: int, speed: float) -> dict[str, float]:
    from megatron_webrl.launch.cluster import free_port

    directory.mkdir()
    config, keys = configure(directory, times, arm), Keys.make()
    address, store = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    shared = {"version": spawn.Value("i", -1), "paused": spawn.Value("i", 0)}
    shared |= {name: spawn.Value("d", 0.0) for name in COUNTED}
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
        return run_trainer(client, times, arm, speed, steps, shared)
    finally:
        client.close()
        for process in started:
            process.kill()
            process.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="train steps of each arm")
    parser.add_argument("--speed", type=float, default=100.0, help="how much faster than the service times")
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
    rows, found = [], {}
    try:
        for case, arm in arms_of(times).items():
            found[case] = measure(directory / case, times, arm, arguments.steps, arguments.speed)
            rows += [row(case, metric, value, UNITS.get(metric, "share")) for metric, value in found[case].items()]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for case in list(found)[:-1]:
        for metric in ("trajectories_per_hour", "trained_per_hour"):
            ratio = found[f"eta{times.eta}"][metric] / found[case][metric]
            rows.append(row(f"eta{times.eta}/{case}", metric, ratio, "×"))
    report(rows, arguments.json)
    late = max(values["overslept"] for values in found.values())
    if late > LATE:
        print(
            f"not to be relied on: sleeps took {late:.0%} longer than asked (give a --speed below {arguments.speed:g}, or wait "
            "for a quieter machine)"
        )


if __name__ == "__main__":
    main()
