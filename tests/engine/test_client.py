"""Routing and retries of the generation client, over real sockets with fake hosts (no SGLang)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from megatron_webrl.config import SamplingConfig
from megatron_webrl.engine import EngineUnreachable, GenerationClient
from megatron_webrl.trajectory import INT32, pack, unpack
from megatron_webrl.wire import Client, Server
from megatron_webrl.wire.messages import (
    Engines,
    EngineStatus,
    EngineUnavailable,
    Generate,
    Generated,
    ListEngines,
    Message,
    NeedImages,
)

RUN = "run"


def generated(name: int = 0) -> Generated:
    return Generated(pack([name], INT32), b"", b"", "stop", waited_s=0.0, running=0)


class FakeHost:
    """Answers Generate as it is told, and keeps what it got."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name, self.requests = name, list[Generate]()
        self.answer: Callable[[Generate], Awaitable[Message]] = self._plain
        self.server = Server(f"ipc://{directory}/{name}", RUN, {Generate: self._generate})
        self.status = EngineStatus(
            name, self.server.address, "serving", 1, incarnation=101, ranks=1, running=0, starts=1
        )

    async def _generate(self, sender: str, message: Generate) -> Message:
        self.requests.append(message)
        return await self.answer(message)

    async def _plain(self, message: Generate) -> Message:
        return generated()


class Fleet:
    """Fake hosts and the coordinator that lists them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hosts: list[FakeHost] = []
        self.lists = 0
        self.server = Server(f"ipc://{directory}/coordinator", RUN, {ListEngines: self._list})

    async def _list(self, sender: str, message: Message) -> Engines:
        self.lists += 1
        return Engines([host.status for host in self.hosts])

    async def add(self, name: str) -> FakeHost:
        host = FakeHost(self.directory, name)
        await host.server.start()
        self.hosts.append(host)
        return host


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    await fleet.server.start()
    yield fleet
    for server in (fleet.server, *(host.server for host in fleet.hosts)):
        await server.close()


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[GenerationClient]:
    coordinator = Client(fleet.server.address, RUN, "w")
    client = GenerationClient(coordinator, SamplingConfig(max_new_tokens=9), [7, 8], [2], 60.0)
    yield client
    await client.close()
    coordinator.close()


async def ask(client: GenerationClient, images: dict[str, bytes] | None = None, timeout_s: float = 10.0) -> Generated:
    return await client.generate([1, 2, 3], images or {}, seed=5, temperature=0.5, timeout_s=timeout_s)


async def test_request_carries_what_was_asked(fleet, client):
    host = await fleet.add("a")
    await ask(client)
    (request,) = host.requests
    assert unpack(request.prompt_ids, INT32).tolist() == [1, 2, 3]
    assert unpack(request.banned_ids, INT32).tolist() == [7, 8]
    assert unpack(request.stop_ids, INT32).tolist() == [2]
    assert (request.max_new_tokens, request.temperature, request.seed) == (9, 0.5, 5)
    assert 9 < request.deadline_s <= 10


async def test_newest_image_goes_along_and_others_on_demand(fleet, client):
    """Only the newest screenshot's bytes are sent; all of them if the host asks."""
    host = await fleet.add("a")
    images = {"old": b"1", "new": b"2"}

    async def lacking(message: Generate) -> Message:
        return generated() if "old" in message.images else NeedImages(["old"])

    host.answer = lacking
    await ask(client, images)
    assert [request.images for request in host.requests] == [{"new": b"2"}, images]
    assert host.requests[0].digests == ["old", "new"]


async def test_fewest_in_flight(fleet, client):
    """Requests spread over the hosts that serve; one that waits for weights gets none while another serves."""
    hosts = [await fleet.add(name) for name in "abc"]
    hosts[2].status.state = "waiting_weights"
    release = asyncio.Event()

    async def slow(message: Generate) -> Message:
        await release.wait()
        return generated()

    for host in hosts:
        host.answer = slow
    tasks = [asyncio.create_task(ask(client)) for _ in range(6)]
    async with asyncio.timeout(5):
        while sum(len(host.requests) for host in hosts) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    release.set()
    await asyncio.gather(*tasks)
    assert [len(host.requests) for host in hosts] == [3, 3, 0]


async def test_an_unavailable_host_is_left_for_another(fleet, client):
    bad, good = await fleet.add("a"), await fleet.add("b")

    async def unavailable(message: Generate) -> Message:
        return EngineUnavailable("starting")

    bad.answer = unavailable
    for _ in range(3):
        await ask(client)
    assert (len(bad.requests), len(good.requests)) == (1, 3)


async def test_no_host_until_the_deadline(fleet, client):
    """Without a host that serves the call ends at its deadline, never later."""
    began = time.monotonic()
    with pytest.raises(EngineUnreachable, match="no engine"):
        await ask(client, timeout_s=0.5)
    silent = await fleet.add("a")

    async def never(message: Generate) -> Message:
        await asyncio.sleep(60)
        return generated()

    silent.answer = never
    await asyncio.sleep(1.0)
    with pytest.raises(EngineUnreachable):
        await ask(client, timeout_s=0.5)
    assert time.monotonic() - began < 5


async def test_a_replaced_host_has_lost_the_request(fleet, client):
    """When the host's process was replaced, the request is sent again at once; its SGLang's restart alone keeps it."""
    host = await fleet.add("a")
    hanging = asyncio.Event()

    async def first_hangs(message: Generate) -> Message:
        if len(host.requests) == 1:
            hanging.set()
            await asyncio.sleep(60)
        return generated()

    host.answer = first_hangs
    task = asyncio.create_task(ask(client, timeout_s=30.0))
    await hanging.wait()
    host.status.incarnation, host.status.starts = 102, 2  # its SGLang restarted: the host still has the request
    await asyncio.sleep(2.2)
    assert len(host.requests) == 1
    host.status.incarnation, host.status.starts = 901, 1
    reply = await asyncio.wait_for(task, 5)
    assert len(host.requests) == 2
    assert reply.waited_s > 2


async def test_routes_are_asked_for_once_a_second(fleet, client):
    """However many requests wait, the coordinator hears one question a second."""
    await fleet.add("a")
    await asyncio.gather(*(ask(client) for _ in range(50)))
    assert fleet.lists == 1
