"""Two real SGLangs and a publisher: what dies or joins during a refresh, cells, the disk, and the two modes.

Every reply is recomputed with transformers in float32, each token with the weights of its version.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from policies import IMAGE_PROMPT, TEXT_PROMPT, TOLERANCE, Policy, difference, make_policies, named, screenshot
from rig import Rig, run_config

from megatron_webrl.config import SamplingConfig
from megatron_webrl.engine import EngineHost, GenerationClient
from megatron_webrl.processes import marked
from megatron_webrl.processor import Processor
from megatron_webrl.trajectory import FLOAT32, INT32, unpack
from megatron_webrl.wire import Client
from megatron_webrl.wire.messages import Generated

if TYPE_CHECKING:
    from refresher import Refresher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


class Fleet(Rig):
    """A rig with named hosts, and clients on it that never stop a reply before its length."""

    def __init__(self, model: Path, run_id: str, directory: Path) -> None:
        super().__init__(run_id, directory)
        self.model = model
        self.processor = Processor.load(model)
        self.by_name: dict[str, EngineHost] = {}
        self.ends = [self.processor.end_token_id]

    def start(self, name: str, mode: str = "retract") -> None:
        config = run_config(self.model)
        config.refresh.mode = mode  # type: ignore[assignment]
        self.by_name[name] = self.add_host(config, name)

    def until_states(self, timeout: float = 300.0, **states: str) -> None:
        """Until the coordinator heard that of the hosts, `_` in a keyword standing for `-`."""
        wanted = {name.replace("_", "-"): state for name, state in states.items()}
        self.until(
            lambda: all(n in self.statuses and self.statuses[n].state == s for n, s in wanted.items()),
            timeout,
            str(wanted),
        )

    @contextmanager
    def client(self, tokens: int) -> Iterator[GenerationClient]:
        banned = np.concatenate([self.processor.banned_ids(), self.ends])

        async def make() -> tuple[Client, GenerationClient]:
            coordinator = Client(self.address, self.run_id, f"client-{time.monotonic_ns()}")
            sampling = SamplingConfig(max_new_tokens=tokens)
            return coordinator, GenerationClient(coordinator, sampling, banned, self.ends, 300.0)

        coordinator, client = self.wait(make())
        yield client

        async def close() -> None:
            await client.close()
            coordinator.close()

        self.wait(close())

    def begin(self, client: GenerationClient, count: int, images: dict[str, bytes]) -> list[Any]:
        """Start so many replies; futures."""
        prompt = self.processor.encode(IMAGE_PROMPT if images else TEXT_PROMPT)
        return [
            self.submit(client.generate(prompt, images, seed=i, temperature=1.0, timeout_s=250.0)) for i in range(count)
        ]

    def scheduler(self, name: str) -> psutil.Process:
        return next(p for p in marked(f"{self.run_id}/{name}/sglang") if p.name() == "sglang::scheduler")

    def check(self, reply: Generated, by_version: dict[int, Policy], images: dict[str, bytes]) -> set[int]:
        """Each token's logprob is that of its version's weights over all that came before.  Returns the versions."""
        prompt = self.processor.encode(IMAGE_PROMPT if images else TEXT_PROMPT)
        response, versions = unpack(reply.response_ids, INT32).tolist(), unpack(reply.versions, INT32)
        got = unpack(reply.logprobs, FLOAT32)
        assert (np.diff(versions) >= 0).all()
        for version in set(versions.tolist()):
            mine = versions == version
            reference = by_version[version].logprobs(prompt, images, response, banned=self.ends)
            assert np.abs(reference - got)[mine].max() < TOLERANCE, version
        return set(versions.tolist())


@pytest.fixture(scope="module")
def fleet(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    run_id = f"test-fleet-{os.getpid()}"
    fleet = Fleet(tiny_model_dir, run_id, tmp_path_factory.mktemp("fleet"))
    fleet.start("a")
    fleet.start("b")
    yield fleet
    fleet.close()
    assert not marked(run_id)


@pytest.fixture(scope="module")
def policies(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    return make_policies(fleet.model, fleet.processor, tmp_path_factory.mktemp("policies"))


@pytest.fixture
def refresher(fleet: Fleet, tmp_path: Path) -> Iterator[Any]:
    """Makes publishers; each is closed at the end."""
    from refresher import Refresher

    made: list[Refresher] = []

    def make(**refresh: Any) -> Refresher:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        made.append(Refresher(fleet, fleet.model, directory, **refresh))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


def disturb(publisher: Refresher, bucket: int, act: Any) -> None:
    """`act` just before that bucket is sent, once."""
    snapshot = publisher.snapshots[publisher.plan[bucket].stage]
    get = snapshot.get

    def disturbed(index: int, version: int, **options: Any) -> Any:
        if index == bucket:
            snapshot.get = get  # type: ignore[method-assign]
            act()
        return get(index, version, **options)

    snapshot.get = disturbed  # type: ignore[method-assign]


def test_both_are_refreshed_and_verified(fleet, policies, refresher):
    """One broadcast reaches both, and their checksums are those of a second load of the export."""
    fleet.until_states(a="waiting_weights", b="waiting_weights")
    publisher = refresher(verify_every=2, stages=2)
    for version, verified in ((1, 2), (2, 0), (3, 2)):
        report = publisher.publish(version, policies[version % 3].tensors)
        assert (report.hosts, report.failed, report.from_disk, report.verified) == (["a", "b"], [], [], verified)
        assert 0 < report.pause_s < report.seconds + 0.001
    with fleet.client(8) as client:
        for flight in fleet.begin(client, 6, named(screenshot(1))):
            assert fleet.check(flight.result(60), {3: policies[0]}, named(screenshot(1))) == {3}


def test_a_changed_bit_is_found(fleet, policies, refresher, monkeypatch):
    """A broadcast that does not deliver what was exported ends the run, with the engines' names."""
    from megatron_webrl.trainer.refresh import RefreshError
    from megatron_webrl.trainer.source import _WeightGroup

    publisher = refresher(verify_every=1)
    broadcast = _WeightGroup.broadcast

    def flipped(group: Any, flat: Any) -> None:
        flat = flat.clone()
        flat[100] ^= 1
        broadcast(group, flat)

    monkeypatch.setattr(_WeightGroup, "broadcast", flipped)
    with pytest.raises(RefreshError, match=r"version 4 the weights of a, b are not those"):
        publisher.publish(4, policies[1].tensors)


def test_killed_in_a_broadcast(fleet, policies, refresher):
    """kill -9 of one SGLang between two buckets: the other has the new weights from disk soon after, and what runs there
    goes on exactly; the killed one comes back with them."""
    publisher = refresher(timeout_s=30.0)
    assert publisher.publish(5, policies[0].tensors).failed == []
    publisher.load_joiners()
    images = named(screenshot(2))
    with fleet.client(500) as client:
        flights = fleet.begin(client, 6, images)
        fleet.until(lambda: sum(s.running for s in fleet.statuses.values()) >= 6, 30, "in flight")
        time.sleep(0.7)
        disturb(publisher, 3, lambda: fleet.scheduler("b").send_signal(signal.SIGKILL))
        report = publisher.publish(6, policies[1].tensors)
        print(f"killed in a broadcast: the other served again after {report.pause_s:.2f} s")
        assert (report.hosts, report.failed, report.from_disk) == (["a"], ["b"], ["a"])
        assert report.pause_s < 5.0 + 10.0, "far below the deadline of a step"
        seen = [fleet.check(f.result(250), {5: policies[0], 6: policies[1]}, images) for f in flights]
        assert {5, 6} in seen
    fleet.until_states(a="serving", b="serving")
    assert fleet.statuses["b"].version == 6
    report = publisher.publish(7, policies[2].tensors)
    assert (report.hosts, report.failed, report.from_disk) == (["a", "b"], [], [])


def test_stuck_in_a_broadcast(fleet, policies, refresher):
    """One SGLang hangs inside a broadcast: its host kills it at the deadline, and the other waits no longer than that, the
    grace of a lost broadcast, and a load from disk."""
    publisher = refresher(timeout_s=6.0)
    assert publisher.publish(8, policies[0].tensors).failed == []
    publisher.load_joiners()
    disturb(publisher, 2, lambda: fleet.scheduler("a").send_signal(signal.SIGSTOP))
    report = publisher.publish(9, policies[1].tensors)
    print(f"stuck in a broadcast (deadline 6 s): the other served again after {report.pause_s:.2f} s")
    assert (report.failed, report.from_disk) == (["a"], ["b"])
    assert report.pause_s < 6.0 + 5.0 + 6.0
    with fleet.client(8) as client:
        for flight in fleet.begin(client, 4, {}):
            assert fleet.check(flight.result(60), {9: policies[1]}, {}) == {9}
    fleet.until_states(a="serving")
    assert fleet.statuses["a"].version == 9


def test_a_new_engine_joins(fleet, policies, refresher):
    """An engine that starts during a run serves the newest weights first, and takes its share of the next refresh."""
    publisher = refresher()
    assert publisher.publish(10, policies[0].tensors).failed == []
    publisher.load_joiners()
    fleet.start("c")
    images = named(screenshot(4))
    with fleet.client(60) as client:
        fleet.until_states(c="serving")
        assert fleet.statuses["c"].version == 10
        time.sleep(1.1)  # until the client has heard of it
        flights = fleet.begin(client, 9, images)
        fleet.until(lambda: all(h.status().running for h in fleet.by_name.values()), 20, "all three have requests")
        for flight in flights:
            assert fleet.check(flight.result(60), {10: policies[0]}, images) == {10}
    report = publisher.publish(11, policies[1].tensors)
    assert (report.hosts, report.from_disk) == (["a", "b", "c"], [])
    fleet.remove("c")


def shut_times(hosts: Sequence[EngineHost]) -> dict[str, list[tuple[float, float]]]:
    """Records from now on when each host's gate was shut."""
    found: dict[str, list[tuple[float, float]]] = {host.name: [] for host in hosts}
    for host in hosts:
        shut, opened = host.gate.shut, host.gate.open
        since = [0.0]

        def on_shut(shut: Any = shut, since: list[float] = since) -> None:
            since[0] = since[0] or time.monotonic()
            shut()

        def on_open(opened: Any = opened, since: list[float] = since, name: str = host.name) -> None:
            found[name].append((since[0], time.monotonic()))
            since[0] = 0.0
            opened()

        host.gate.shut, host.gate.open = on_shut, on_open  # type: ignore[method-assign]
    return found


def test_cells_are_refreshed_in_turn(fleet, policies, refresher):
    """With `refresh.cell: 1` one engine serves while the other is refreshed."""
    times = shut_times([fleet.by_name["a"], fleet.by_name["b"]])
    publisher = refresher(cell=1)
    for version in (12, 13):
        assert publisher.publish(version, policies[version % 3].tensors).hosts == ["a", "b"]
    for (began_a, ended_a), (began_b, ended_b) in zip(times["a"], times["b"], strict=True):
        assert ended_a <= began_b or ended_b <= began_a
    assert publisher.publisher._groups_made == 2, "a group a cell, kept"


def test_from_disk(fleet, policies, refresher):
    """`refresh.transport: disk` needs no group; older exports are removed."""
    publisher = refresher(transport="disk", verify_every=1)
    for version in (14, 15):
        report = publisher.publish(version, policies[version % 3].tensors)
        assert (report.hosts, report.from_disk, report.verified) == (["a", "b"], ["a", "b"], 2)
    assert [d.name for d in publisher.publisher._export_dir.iterdir()] == ["v15"]
    assert publisher.publisher._groups_made == 0


def test_in_place(fleet, policies, refresher):
    """`refresh.mode: in_place`: requests in flight go on with their KV, and their tags are exact up to the refresh; requests
    begun after it use no KV of the weights before, though their prompt is the same."""
    fleet.remove("a")
    fleet.remove("b")
    fleet.start("p", "in_place")
    fleet.until_states(p="waiting_weights")
    publisher = refresher()
    publisher.publish(20, policies[0].tensors)
    images = named(screenshot(5))
    with fleet.client(500) as client, fleet.client(40) as short:
        flights = fleet.begin(client, 3, images)
        fleet.until(lambda: fleet.statuses["p"].running >= 3, 30, "in flight")
        time.sleep(0.7)
        report = publisher.publish(21, policies[1].tensors)
        assert (report.hosts, report.from_disk) == (["p"], [])
        after = fleet.begin(short, 3, images)
        for flight in after:
            assert fleet.check(flight.result(100), {21: policies[1]}, images) == {21}
        split = 0
        for flight in flights:
            reply = flight.result(200)
            versions, got = unpack(reply.versions, INT32), unpack(reply.logprobs, FLOAT32)
            prompt, response = fleet.processor.encode(IMAGE_PROMPT), unpack(reply.response_ids, INT32).tolist()
            old = versions == 20
            assert set(versions) == {20, 21}
            assert (np.diff(versions) >= 0).all()
            reference = policies[0].logprobs(prompt, images, response, banned=fleet.ends)
            assert np.abs(reference - got)[old].max() < TOLERANCE
            assert np.abs(reference - got)[~old].max() > 0.01, "the tokens after it are of other weights"
            split += 1
        assert split == 3
    with fleet.client(
        8
    ) as client:  # the retracted are prefilled anew, so this is the prefix that was cached in between
        for flight in fleet.begin(client, 2, images):
            reply = flight.result(60)
            assert difference(reply, policies[1], IMAGE_PROMPT, images, banned=fleet.ends) < TOLERANCE
