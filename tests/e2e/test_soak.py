"""Random faults over real processes and sockets: coordinator, screenshot store, four workers and a trainer are killed,
stopped and cut off, by a seeded hand; then the account must balance, no group be trained twice, no token be older than η, and
memory be flat.

Real: coordinator, store, the worker's own loop and deliveries, TCP with CURVE.  Simulated, and called so: episodes (scripted,
fast, no browser), the trainer (takes, checks and publishes; its checkpoint is a file), the engines (a version that the trainer
tells).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.launch.cluster import free_port
from megatron_webrl.replay import Lineage
from megatron_webrl.screenshots import fetch_images, serve_store
from megatron_webrl.trajectory import INT32, Lane, Outcome, decode_steps, unpack
from megatron_webrl.wire import BlockingClient, Keys, WireError
from megatron_webrl.wire.messages import (
    BeginTraining,
    CheckpointDurable,
    ClaimVersion,
    Done,
    EndRun,
    EngineStatus,
    FetchGroups,
    Groups,
    Manifest,
    Status,
    StepTrained,
    Take,
    TrainerStarted,
    Version,
)

WORKERS, SLOTS, ETA, SIZE, GROUPS = 4, 8, 2, 4, 6
CHECKPOINT_EVERY = 3
AWAY_S = 60.0
"""Every question is repeated so long."""

spawn = multiprocessing.get_context("spawn")


def configure(directory: Path) -> RunConfig:
    return validate(
        {
            "run_dir": str(directory),
            "model": {"path": "none"},
            "tasks": {"names": ["click-test", "focus-text", "enter-text"]},
            "browser": {"slots": SLOTS, "workers": WORKERS},
            "replay": {"group_size": SIZE, "groups_per_step": GROUPS, "eta": ETA, "lease_s": 3.0, "max_attempts": 20},
            "trainer": {"steps": 10**6},
            "observe": {"trace": False, "record_every": 10**6},
        },
        "soak",
    )


# Processes ------------------------------------------------------------------------------------------------------------


def to_log(directory: Path, name: str) -> None:
    import logging

    file = (directory / f"{name}.log").open("a")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )


def coordinator_process(config: RunConfig, address: str, store: str, keys: Keys) -> None:
    from megatron_webrl.replay import Coordinator

    to_log(Path(config.run_dir), "coordinator")
    role = Coordinator(
        config, run_id="soak", address=address, store_address=store, log_metrics=lambda step, row: None, keys=keys
    )
    asyncio.run(role.run())


def store_process(config: RunConfig, address: str, keys: Keys) -> None:
    to_log(Path(config.run_dir), "store")
    directory = Path(config.run_dir) / "screenshots"
    asyncio.run(serve_store(address, "soak", directory, config.replay.screenshot_bytes, keys=keys))


def worker_process(config: RunConfig, name: str, coordinator: str, store: str, keys: Keys, seed: int) -> None:
    """The real worker around scripted episodes."""
    from soak_episodes import scripted_worker

    to_log(Path(config.run_dir), name)
    worker = scripted_worker(
        config, run_id="soak", name=name, coordinator_address=coordinator, store_address=store, keys=keys, seed=seed
    )
    asyncio.run(worker.run())


def trainer_process(config: RunConfig, coordinator: str, store: str, keys: Keys) -> None:
    to_log(Path(config.run_dir), "trainer")
    SimulatedTrainer(config, coordinator, store, keys).run()


class SimulatedTrainer:
    """Takes batches, checks them token by token, publishes; a checkpoint is checkpoint.json.  What it trained is in
    trained.jsonl."""

    def __init__(self, config: RunConfig, coordinator: str, store: str, keys: Keys) -> None:
        self.directory = Path(config.run_dir)
        self.coordinator = BlockingClient(coordinator, "soak", "trainer", keys=keys)
        self.store = BlockingClient(store, "soak", "trainer", keys=keys)
        self.log = (self.directory / "trained.jsonl").open("a")
        self.checkpoint = self.directory / "checkpoint.json"
        self.published = -1
        threading.Thread(target=self.heartbeat, args=(coordinator, keys), daemon=True).start()

    def heartbeat(self, address: str, keys: Keys) -> None:
        """The engines' words."""
        client = BlockingClient(address, "soak", "engine", keys=keys)
        while True:
            status = EngineStatus("engine-0", "none", "serving", self.published, 1, 1, 0)
            with contextlib.suppress(WireError):
                client.request(status, timeout=2.0, expect=Done)
            time.sleep(0.1)

    def ask(self, message: Any, expect: Any) -> Any:
        return self.coordinator.request(message, timeout=5.0, expect=expect, retry_s=AWAY_S)

    def say(self, **row: Any) -> None:
        self.log.write(json.dumps(row) + "\n")
        self.log.flush()

    def run(self) -> None:
        step, version = 0, -1
        if self.checkpoint.exists():
            step, version = json.loads(self.checkpoint.read_text())
        version = self.published = self.ask(TrainerStarted(step, version), Version).version
        self.say(start=step, version=version)
        while True:
            manifest = self.ask(Take(step, version, 1.0), Manifest)
            if manifest.stop:
                return
            if manifest.ready:
                keys, lag = self.check(manifest, version)
                after = version
                version = self.ask(ClaimVersion(version), Version).version
                self.published = version
                self.ask(StepTrained(step, version, 1, {}), Done)
                self.say(step=step, groups=manifest.group_ids, keys=keys, lag=lag, version=after)
                step += 1
            if manifest.save or step % CHECKPOINT_EVERY == 0:
                new = self.checkpoint.with_suffix(".new")
                new.write_text(json.dumps([step, version]))
                os.replace(new, self.checkpoint)
                self.ask(CheckpointDurable(step), Done)
            time.sleep(0.02)

    def check(self, manifest: Manifest, version: int) -> tuple[list[Any], int]:
        """Whole groups, fresh tokens, every screenshot."""
        groups = self.ask(FetchGroups(manifest.group_ids), Groups).groups
        lineage, largest, keys = Lineage(manifest.lineage), 0, []
        for group in groups:
            assert [t.assignment.sample_index for t in group.trajectories] == list(range(SIZE)), group.group_id
            assert len({t.reward for t in group.trajectories}) > 1
            for trajectory in group.trajectories:
                keys.append(trajectory.assignment.key)
                assert trajectory.outcome in (Outcome.SUCCESS, Outcome.FAILURE)
                for row in decode_steps(trajectory.payload):
                    lags = lineage.position(version) - lineage.positions(unpack(row.versions, INT32))
                    largest = max(largest, int(lags.max(initial=0)))
            _, missing = fetch_images(self.store, group.digests)
            assert not missing, missing
        assert largest <= ETA, f"lag {largest}"
        return keys, largest


class Proxy:
    """TCP between peers and a server, which can be cut: everything is swallowed, or all connections end."""

    def __init__(self, target: int) -> None:
        self.port, self.target = free_port(), target
        self.cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        threading.Thread(target=self._run, args=(started,), daemon=True).start()
        assert started.wait(10)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", self.port))
        started.set()
        self.loop.run_until_complete(server.serve_forever())

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(there_writer)
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
            self._writers.discard(there_writer)
        self._writers.discard(writer)
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                while self.cut:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                writer.write(data)
                await writer.drain()
        writer.close()

    def drop_connections(self) -> None:
        self.loop.call_soon_threadsafe(lambda: [w.close() for w in list(self._writers)])


class System:
    """All processes, and the seeded hand."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.random = directory, random.Random(seed)
        self.config, self.keys = configure(directory), Keys.make()
        self.seed = seed
        ports = {name: free_port() for name in ("coordinator", "store")}
        self.proxies = {name: Proxy(port) for name, port in ports.items()}
        bound = {name: f"tcp://127.0.0.1:{port}" for name, port in ports.items()}
        via = {name: proxy.address for name, proxy in self.proxies.items()}
        client = self.keys.for_client()
        self.makers: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
            "store": (store_process, (self.config, bound["store"], self.keys)),
            "coordinator": (coordinator_process, (self.config, bound["coordinator"], bound["store"], self.keys)),
            "trainer": (trainer_process, (self.config, via["coordinator"], via["store"], client)),
        }
        for n in range(WORKERS):
            arguments = (self.config, f"worker-{n}", via["coordinator"], via["store"], client, seed + n)
            self.makers[f"worker-{n}"] = (worker_process, arguments)
        self.processes: dict[str, Any] = {}
        self.faults: dict[str, int] = {}
        self.expected_deaths: set[int] = set()
        self.driver = BlockingClient(bound["coordinator"], "soak", "driver", keys=client)

    def start(self, name: str) -> None:
        function, arguments = self.makers[name]
        process = spawn.Process(target=function, args=arguments, name=name)
        process.start()
        self.processes[name] = process

    def check(self) -> None:
        """Only those die that were killed."""
        for name, process in self.processes.items():
            if process.exitcode is not None:
                log = (self.directory / f"{name}.log").read_text()[-3000:]
                pytest.fail(f"{name} ended by itself ({process.exitcode}):\n{log}")

    def one_fault(self) -> None:
        role = self.random.choice(["coordinator", "store", "trainer", "worker"])
        name = self.random.choice([name for name in self.processes if name.startswith(role)])
        kind = self.random.choice(["kill", "kill", "stop", "cut", "connections"])
        if kind in ("cut", "connections"):
            name = self.random.choice(list(self.proxies))
        self.faults[f"{kind} {name.split('-')[0]}"] = self.faults.get(f"{kind} {name.split('-')[0]}", 0) + 1
        seconds = self.random.uniform(0.2, 5.0)
        if kind == "kill":
            self.processes[name].kill()
            self.processes[name].join(10)
            time.sleep(seconds / 5)
            self.start(name)
        elif kind == "stop":
            os.kill(self.processes[name].pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(self.processes[name].pid, signal.SIGCONT)
        elif kind == "cut":
            self.proxies[name].cut = True
            time.sleep(seconds)
            self.proxies[name].cut = False
        else:
            self.proxies[name].drop_connections()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(10)
        self.driver.close()


def trained_rows(directory: Path) -> dict[int, dict[str, Any]]:
    """What counts: a start takes back the steps from its own on."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (directory / "trained.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "start" in row:
            rows = {step: r for step, r in rows.items() if step < row["start"]}
        else:
            rows[row["step"]] = row
    return rows


def soak(directory: Path, seconds: float, seed: int, rest_s: float = 8.0) -> None:
    system = System(directory, seed)
    memory: list[float] = []
    try:
        for name in system.makers:
            system.start(name)
        system.driver.request(BeginTraining(), timeout=5, expect=Done, retry_s=AWAY_S)
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(system.random.uniform(0.0, 2.0))
            system.check()
            system.one_fault()
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(system.processes["coordinator"].pid)
                if time.time() - process.create_time() > 3:
                    memory.append(process.memory_info().rss)
        before = max(trained_rows(directory), default=-1)
        deadline = time.monotonic() + AWAY_S
        while max(trained_rows(directory), default=-1) < before + 3:  # it goes on, whatever was done to it
            assert time.monotonic() < deadline, "nothing is trained any more"
            system.check()
            time.sleep(0.2)
        status = system.driver.request(EndRun(), timeout=5, expect=Status, retry_s=AWAY_S)
        time.sleep(1.5)
    finally:
        system.close()
    account = status.account
    print(f"seed {seed}, {passed:.0f} s: {system.faults}; {account}; step {status.step}")
    assert account.issued == account.trained + sum(account.dropped.values()) and account.in_flight == 0
    rows = trained_rows(directory)
    assert sorted(rows) == list(range(max(rows) + 1)), "every step, once"
    keys = [tuple(key) for row in rows.values() for key in row["keys"]]
    groups = [i for row in rows.values() for i in row["groups"]]
    assert len(set(keys)) == len(keys) and len(set(groups)) == len(groups), "no group is trained twice"
    assert all(row["lag"] <= ETA for row in rows.values())
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        ledger = {tuple(k) for k in db.execute(
            "SELECT group_id, sample_index, attempt FROM attempts WHERE state='trained' AND lane=?", (str(Lane.TRAIN),)
        )}  # fmt: skip
        assert {k[:3] for k in ledger} == set(keys), "the ledger says the same as the trainer"
        lost = db.execute("SELECT count(*) FROM attempts WHERE reason IN ('images_lost', 'damaged')").fetchone()[0]
        assert lost == 0, "nothing that was acknowledged is lost"
    spool = sum(f.stat().st_size for f in (directory / "spool").iterdir())
    assert spool < 200 << 20
    if len(memory) >= 8:
        early, late = memory[len(memory) // 4 : len(memory) // 2], memory[len(memory) * 3 // 4 :]
        assert max(late) < 1.3 * max(early) + (16 << 20), [round(m / 1e6) for m in memory]


@pytest.mark.e2e
@pytest.mark.parametrize("seed", [0])
def test_a_minute_of_faults(tmp_path: Path, seed: int) -> None:
    soak(tmp_path, 60.0, seed)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_minutes_of_faults(tmp_path: Path) -> None:
    soak(tmp_path, 600.0, int(os.environ.get("SOAK_SEED", "1")))
