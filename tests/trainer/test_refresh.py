"""What the publisher says to whom, and what it makes of the answers: over real sockets, with fake engine hosts and a fake
stage that only note what they were told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.config import RefreshConfig
from megatron_webrl.trainer.export import Bucket
from megatron_webrl.trainer.refresh import RefreshError, WeightPublisher
from megatron_webrl.wire import Client, Server
from megatron_webrl.wire.messages import (
    BeginRefresh,
    Checksum,
    ChecksumValue,
    Done,
    DropGroup,
    EndRefresh,
    Engines,
    EngineStatus,
    GiveUpBroadcast,
    JoinWeightGroup,
    LeaveWeightGroup,
    ListEngines,
    LoadBucket,
    LoadFromDisk,
    Message,
    OpenRendezvous,
    Rendezvous,
    SendBucket,
    StandGroup,
    WriteStage,
)

PLAN = [Bucket(stage, (), (f"w{i}",), ((2,),), torch.float32) for i, stage in enumerate((0, 0, 1))]


class FakeEngineHost:
    """Says yes to everything, unless told otherwise."""

    def __init__(self, system: FakeSystem, name: str) -> None:
        self.name, self.system = name, system
        self.said: list[Message] = []
        self.refuse: Callable[[Message], Any] = lambda message: False
        """Whether a message fails; may be a coroutine's result."""
        self.weights = ""
        kinds = (JoinWeightGroup, LeaveWeightGroup, BeginRefresh, LoadBucket, GiveUpBroadcast, EndRefresh, LoadFromDisk)
        handlers: dict[Any, Any] = dict.fromkeys((*kinds, Checksum), self.hear)
        self.server = Server(f"ipc://{system.directory}/{name}", "run", handlers)
        self.status = EngineStatus(name, self.server.address, "waiting_weights", -1, 1, 1, 0)

    async def hear(self, sender: str, message: Message) -> Message:
        self.said.append(message)
        self.system.said.append((self.name, message))
        if asyncio.iscoroutine(refused := self.refuse(message)):
            refused = await refused
        if refused:
            raise RuntimeError(f"no {type(message).__name__}")
        if isinstance(message, EndRefresh | LoadFromDisk):
            self.status.state, self.status.version = "serving", message.version
            by = self.system.weights if isinstance(message, EndRefresh) else "disk"
            self.weights = f"{by}-{message.version}"
        return ChecksumValue(self.weights, self.status.version) if isinstance(message, Checksum) else Done()

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.said]


class FakeSystem:
    """Coordinator, two stages and engine hosts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hosts: dict[str, FakeEngineHost] = {}
        self.said: list[tuple[str, Message]] = []
        self.weights = "disk"
        """What a broadcast makes of the export; the same as loading it."""
        self.writing = asyncio.Event()
        self.written = asyncio.Event()
        self.written.set()
        self.servers = [Server(f"ipc://{directory}/coordinator", "run", {ListEngines: self.list})]
        for stage in (0, 1):
            handlers: dict[Any, Any] = {OpenRendezvous: self.open, WriteStage: self.write}
            for kind in (StandGroup, SendBucket, DropGroup):
                handlers[kind] = self.stage
            self.servers.append(Server(f"ipc://{directory}/stage-{stage}", "run", handlers))

    async def list(self, sender: str, message: Message) -> Engines:
        return Engines([host.status for host in self.hosts.values()])

    async def open(self, sender: str, message: Message) -> Rendezvous:
        return Rendezvous("127.0.0.1", 1)

    async def stage(self, sender: str, message: Message) -> Done:
        self.said.append(("stage", message))
        return Done()

    async def write(self, sender: str, message: WriteStage) -> Done:
        self.said.append(("stage", message))
        self.writing.set()
        await self.written.wait()
        return Done()

    async def add(self, name: str) -> FakeEngineHost:
        host = self.hosts[name] = FakeEngineHost(self, name)
        await host.server.start()
        self.servers.append(host.server)
        return host

    def order(self, *kinds: type[Message]) -> list[Any]:
        """What was said of these kinds, in order: (to whom, kind)."""
        return [(who, type(message).__name__) for who, message in self.said if isinstance(message, kinds)]


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[FakeSystem]:
    system = FakeSystem(tmp_path)
    for server in system.servers:
        await server.start()
    yield system
    for server in system.servers:
        await server.close()


@pytest.fixture
async def make(system: FakeSystem, tmp_path: Path) -> AsyncIterator[Any]:
    """Makes publishers."""
    made: list[tuple[WeightPublisher, Client]] = []
    (tmp_path / "model").mkdir()

    def make(**refresh: Any) -> WeightPublisher:
        coordinator = Client(f"ipc://{tmp_path}/coordinator", "run", "publisher")
        publisher = WeightPublisher(
            RefreshConfig(**{"verify_every": 0, "timeout_s": 2.0, **refresh}),
            coordinator,
            PLAN,
            [f"ipc://{tmp_path}/stage-{stage}" for stage in (0, 1)],
            backend="gloo",
            export_dir=tmp_path / "export",
            model_path=tmp_path / "model",
        )
        made.append((publisher, coordinator))
        return publisher

    yield make
    for publisher, coordinator in made:
        await publisher.close()
        coordinator.close()


async def publish(publisher: WeightPublisher, version: int) -> Any:
    await publisher.reserve()
    return await publisher.publish(version)


async def test_begin_one_bucket_after_another_end(system, make):
    """One order over both stages and both engines, the version with the last bucket only; the groups, one a stage, stay."""
    hosts = [await system.add(name) for name in "ab"]
    publisher = make()
    for version in (7, 8):
        system.said.clear()
        report = await publish(publisher, version)
        assert (report.hosts, report.failed, report.from_disk) == (["a", "b"], [], [])
        steps = system.order(BeginRefresh, LoadBucket, EndRefresh)
        assert [kind for _, kind in steps] == ["BeginRefresh"] * 2 + ["LoadBucket"] * 6 + ["EndRefresh"] * 2
        loads = [m for m in hosts[0].said if isinstance(m, LoadBucket)][-3:]
        assert [m.names for m in loads] == [["w0"], ["w1"], ["w2"]]
        assert [m.version for m in loads] == [None, None, version]
        assert loads[0].group == loads[1].group != loads[2].group
    assert hosts[0].kinds().count("JoinWeightGroup") == 2


@pytest.mark.parametrize("step", [BeginRefresh, LoadBucket, EndRefresh])
async def test_a_failed_step_sends_the_others_to_the_disk(system, make, step):
    """Whichever step fails at one engine: the other gets the same version from disk, and a new group next time."""
    good, bad = [await system.add(name) for name in "ab"]
    publisher = make()
    await publish(publisher, 1)
    bad.refuse = lambda message: isinstance(message, step | LoadFromDisk)
    report = await publish(publisher, 2)
    assert (report.hosts, report.failed, report.from_disk) == (["a"], ["b"], ["a"])
    assert good.status.version == 2 and good.kinds().count("LoadFromDisk") == 1
    assert (system.directory / "export" / "v2").is_dir()
    bad.refuse = lambda message: False
    report = await publish(publisher, 3)
    assert (report.hosts, report.from_disk) == (["a", "b"], [])
    assert good.kinds().count("JoinWeightGroup") == 4, "two stages, twice"


async def test_others_are_told_of_a_lost_broadcast_at_once(system, make):
    """While they are still in it."""
    waiting, bad = [await system.add(name) for name in "ab"]
    publisher = make(timeout_s=20.0)
    told = asyncio.Event()

    async def until_told(message: Message) -> bool:
        if isinstance(message, GiveUpBroadcast):
            told.set()
        elif isinstance(message, LoadBucket):
            await told.wait()
            return True
        return False

    waiting.refuse = until_told
    bad.refuse = lambda message: isinstance(message, LoadBucket | LoadFromDisk)
    async with asyncio.timeout(10):
        report = await publish(publisher, 1)
    assert (report.hosts, report.from_disk) == (["a"], ["a"])
    assert system.order(DropGroup), "our side of the broadcast is ended"


@pytest.mark.parametrize("step", [BeginRefresh, LoadBucket])
async def test_a_host_whose_process_is_gone_is_not_waited_for(system, make, step):
    """It does not answer; as soon as the coordinator misses it, or hears of its successor, the others go on."""
    good, gone = [await system.add(name) for name in "ab"]
    publisher = make(timeout_s=60.0)
    silent = asyncio.Event()

    async def never(message: Message) -> bool:
        if isinstance(message, step | LoadFromDisk):
            old = gone.status
            gone.status = EngineStatus("b", old.address, "starting", -1, old.incarnation + 1000, 1, 0, 1)
            await silent.wait()
        return False

    gone.refuse = never
    async with asyncio.timeout(10):
        report = await publish(publisher, 1)
    assert (report.hosts, report.failed, good.status.version) == (["a"], ["b"], 1)
    silent.set()


async def test_one_that_does_not_come_to_the_rendezvous_is_left_out(system, make, monkeypatch):
    """The others are refreshed by broadcast; nobody was paused for it."""
    monkeypatch.setattr("megatron_webrl.trainer.refresh.REJOIN_AFTER_S", 0.01)
    await system.add("a")
    bad = await system.add("b")
    bad.refuse = lambda message: isinstance(message, JoinWeightGroup)
    report = await publish(make(), 1)
    assert (report.hosts, report.failed, report.from_disk) == (["a"], ["b"], [])
    assert "BeginRefresh" not in bad.kinds()


async def test_dead_and_draining_engines_are_left_alone(system, make):
    for name, state in (("a", "serving"), ("b", "dead"), ("c", "draining"), ("d", "starting")):
        (await system.add(name)).status.state = state
    assert (await publish(make(), 1)).hosts == ["a"]
    assert not any(system.hosts[name].said for name in "bcd")


async def test_cells_in_turn_and_an_engine_stays_in_its_own(system, make):
    """Never a begin in one cell before the end in the other; one that joins fills a cell, others keep their groups."""
    for name in "abc":
        await system.add(name)
    publisher = make(cell=2)
    await publish(publisher, 1)
    steps = [who for who, _ in system.order(BeginRefresh, EndRefresh)]
    assert [set(steps[:4]), set(steps[4:])] == [{"a", "b"}, {"c"}]
    await system.add("d")
    del system.hosts["a"]
    joins = {name: system.hosts[name].kinds().count("JoinWeightGroup") for name in "bc"}
    system.said.clear()
    await publish(publisher, 2)
    assert {who for who, _ in system.order(BeginRefresh)} == {"b", "c", "d"}
    assert system.hosts["d"].kinds().count("JoinWeightGroup") == 2 and joins == {"b": 2, "c": 2}


async def test_a_joiner_loads_the_newest_version_from_disk(system, make, monkeypatch):
    """Without a pause of the others; and one that serves older weights does, too."""
    monkeypatch.setattr("megatron_webrl.trainer.refresh.LOOK_EVERY_S", 0.02)
    old = await system.add("a")
    publisher = make()
    await publish(publisher, 1)
    joiners = asyncio.create_task(publisher.load_joiners())
    new = await system.add("b")
    await until(lambda: new.status.version == 1)
    assert new.kinds() == ["LoadFromDisk"] and old.kinds().count("BeginRefresh") == 1
    await publish(publisher, 2)
    assert new.status.version == old.status.version == 2
    new.status = EngineStatus("b", new.server.address, "serving", 1, 2, 1, 0)  # another incarnation, with older weights
    await until(lambda: new.status.version == 2)
    joiners.cancel()


async def test_one_that_refuses_the_export_again_and_again_ends_the_run(system, make, monkeypatch):
    monkeypatch.setattr("megatron_webrl.trainer.refresh.LOOK_EVERY_S", 0.02)
    publisher = make()
    await publish(publisher, 1)
    (await system.add("a")).refuse = lambda message: True
    with pytest.raises(RefreshError, match=r"a did not load .*v1 in 3 tries"):
        async with asyncio.timeout(10):
            await publisher.load_joiners()


async def test_snapshots_are_not_filled_while_an_export_reads_them(system, make, monkeypatch):
    """`reserve` waits for the stages that write."""
    monkeypatch.setattr("megatron_webrl.trainer.refresh.LOOK_EVERY_S", 0.02)
    publisher = make()
    await publish(publisher, 1)
    system.written.clear()
    joiners = asyncio.create_task(publisher.load_joiners())
    await system.add("a")
    await system.writing.wait()
    reserved = asyncio.create_task(publisher.reserve())
    await asyncio.sleep(0.1)
    assert not reserved.done()
    system.written.set()
    await asyncio.wait_for(reserved, 5)
    await publisher.publish(2)
    joiners.cancel()


async def test_checksums_are_compared_every_so_many_refreshes(system, make):
    """With those of one engine after it loaded the export; the first refresh is one of them."""
    for name in "ab":
        await system.add(name)
    publisher = make(verify_every=3)
    assert [(await publish(publisher, version)).verified for version in range(1, 6)] == [2, 0, 0, 2, 0]
    system.weights = "mixture"
    await publish(publisher, 6)
    with pytest.raises(RefreshError, match=r"version 7 the weights of a, b are not those"):
        await publish(publisher, 7)


async def test_older_exports_are_removed(system, make):
    await system.add("a")
    publisher = make(transport="disk")
    for version in (1, 2, 3):
        assert (await publish(publisher, version)).from_disk == ["a"]
    assert [d.name for d in (system.directory / "export").iterdir()] == ["v3"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
