"""Routing and retries of the generation client, over real sockets with fake hosts (no SGLang)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fake_generations import FakeGenerations, generated, tokens

from megatron_webrl.config import SamplingConfig
from megatron_webrl.engine import EngineUnreachable, GenerationClient
from megatron_webrl.engine import client as client_module
from megatron_webrl.trajectory import FLOAT32, INT32, unpack
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
    PollGeneration,
)

RUN = "run"
STOP = 2


class FakeHost(FakeGenerations):
    """A fake engine host: answers Generate as it is told, and keeps what it got."""

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(self._plain)
        self.name, self.address = name, f"ipc://{directory}/{name}"
        self.status = EngineStatus(name, self.address, "serving", 1, incarnation=101, ranks=1, running=0, starts=1)

    async def start(self) -> None:
        self.server = Server(self.address, RUN, self.handlers())
        await self.server.start()

    async def _plain(self, message: Generate) -> Message:
        return generated([STOP])


async def never(message: Generate) -> Message:
    await asyncio.sleep(60)
    return generated([STOP])


class Fleet:
    """Fake hosts and the coordinator that lists them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hosts: list[FakeHost] = []
        self.asked: list[ListEngines] = []
        self.server = Server(f"ipc://{directory}/coordinator", RUN, {ListEngines: self._list})

    async def _list(self, sender: str, message: ListEngines) -> Engines:
        self.asked.append(message)
        return Engines([host.status for host in self.hosts])

    async def add(self, name: str) -> FakeHost:
        host = FakeHost(self.directory, name)
        await host.start()
        self.hosts.append(host)
        return host


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits."""
    monkeypatch.setattr(client_module, "POLL_S", 0.1)
    monkeypatch.setattr(client_module, "REPLY_S", 0.4)
    monkeypatch.setattr(client_module, "SILENT_S", 3.0)
    monkeypatch.setattr(client_module, "LIST_S", 0.3)


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
    client = GenerationClient(coordinator, SamplingConfig(max_new_tokens=9), [7, 8], [STOP], 60.0)
    yield client
    await client.close()
    coordinator.close()


async def ask(
    client: GenerationClient, images: dict[str, bytes] | None = None, timeout_s: float = 10.0, affinity: object = None
) -> Generated:
    return await client.generate(
        [1, 2, 3], images or {}, seed=5, temperature=0.5, timeout_s=timeout_s, affinity=affinity
    )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def ids(reply: Generated) -> list[int]:
    """Response tokens, after a check that logprobs and versions are theirs."""
    found = unpack(reply.response_ids, INT32).tolist()
    assert unpack(reply.logprobs, FLOAT32).tolist() == [-float(i) for i in found]
    assert len(unpack(reply.versions, INT32)) == len(found)
    return found


async def test_request_carries_what_was_asked(fleet, client):
    host = await fleet.add("a")
    await ask(client)
    await client.generate([1], {}, seed=5, temperature=0.5, timeout_s=5.0, top_p=0.9, top_k=3)
    request, narrow = host.requests
    assert unpack(request.prompt_ids, INT32).tolist() == [1, 2, 3]
    assert unpack(request.banned_ids, INT32).tolist() == [7, 8]
    assert unpack(request.stop_ids, INT32).tolist() == [STOP]
    assert (request.max_new_tokens, request.temperature, request.seed, request.prefix_ids) == (9, 0.5, 5, b"")
    assert 9 < request.deadline_s <= 10
    assert (request.top_p, request.top_k, narrow.top_p, narrow.top_k) == (1.0, 0, 0.9, 3)
    assert request.request != narrow.request


# Images ---------------------------------------------------------------------------------------------------------------


async def test_newest_image_goes_along_and_others_on_demand(fleet, client):
    """Only the newest screenshot's bytes are sent, then those that the host asks for, to the same host."""
    hosts = [await fleet.add(name) for name in "abc"]
    images = {"old": b"1", "older": b"2", "new": b"3"}

    async def lacking(message: Generate) -> Message:
        return generated([STOP]) if "old" in message.images else NeedImages(["old"])

    for host in hosts:
        host.answer = lacking
    await ask(client, images)
    [host] = [host for host in hosts if host.requests]
    assert [request.images for request in host.requests] == [{"new": b"3"}, {"old": b"1"}]
    assert host.requests[0].digests == ["old", "older", "new"]


async def test_a_host_with_a_small_cache_gets_all_at_once(fleet, client):
    """What was asked for is sent along from then on, so that asking comes to an end."""
    host = await fleet.add("a")
    images = {"1": b"1", "2": b"2", "3": b"3"}

    async def forgetful(message: Generate) -> Message:
        lacking = [digest for digest in images if digest not in message.images]
        return NeedImages(lacking[:1]) if lacking else generated([STOP])

    host.answer = forgetful
    await ask(client, images)
    assert [sorted(request.images) for request in host.requests] == [["3"], ["1"], ["1", "2"], ["1", "2", "3"]]


async def test_an_image_that_nobody_gave_is_an_error(fleet, client):
    host = await fleet.add("a")

    async def lacking(message: Generate) -> Message:
        return NeedImages(["unknown"])

    host.answer = lacking
    with pytest.raises(ValueError, match="unknown"):
        await ask(client, {"new": b"2"})


# Routing --------------------------------------------------------------------------------------------------------------


async def test_less_loaded_of_two(fleet, client):
    """Requests spread over the hosts that serve; one that waits for weights gets none while another serves."""
    hosts = [await fleet.add(name) for name in "abc"]
    hosts[2].status.state = "waiting_weights"
    release = asyncio.Event()

    async def slow(message: Generate) -> Message:
        await release.wait()
        return generated([STOP])

    for host in hosts:
        host.answer = slow
    tasks = [asyncio.create_task(ask(client)) for _ in range(6)]
    await until(lambda: sum(len(host.requests) for host in hosts) == 6)
    release.set()
    await asyncio.gather(*tasks)
    assert [len(host.requests) for host in hosts] == [3, 3, 0]


async def test_load_of_others_counts(fleet, client):
    """A host that other clients fill is left alone."""
    busy, free = await fleet.add("a"), await fleet.add("b")
    busy.status.running = 20
    await asyncio.gather(*(ask(client) for _ in range(10)))
    assert (len(busy.requests), len(free.requests)) == (0, 10)


async def test_an_episode_stays_at_its_host(fleet, client):
    """Each at its own, until that is far busier than another."""
    hosts = {host.name: host for host in [await fleet.add(name) for name in "abcd"]}
    homes = {}
    for episode in range(8):
        for _ in range(4):
            before = {name: len(host.requests) for name, host in hosts.items()}
            await ask(client, affinity=episode)
            [name] = [name for name, host in hosts.items() if len(host.requests) > before[name]]
            assert homes.setdefault(episode, name) == name
    assert len(set(homes.values())) > 1
    home = hosts[homes[0]]
    home.status.running = 50
    await asyncio.sleep(0.4)
    had = len(home.requests)
    await ask(client, affinity=0)
    assert len(home.requests) == had


async def test_an_unavailable_host_is_left_for_another(fleet, client):
    bad, good = await fleet.add("a"), await fleet.add("b")
    good.status.running = 3

    async def unavailable(message: Generate) -> Message:
        return EngineUnavailable("starting")

    bad.answer = unavailable
    for _ in range(3):
        await ask(client)
    assert (len(bad.requests), len(good.requests)) == (1, 3)


async def test_a_request_is_held_by_a_host_that_may_serve_only_while_no_other_does(fleet, client):
    """It waits at a host that starts; when another serves, it goes there."""
    starting = await fleet.add("a")
    starting.status.state, starting.answer = "starting", never
    task = asyncio.create_task(ask(client))
    await until(lambda: starting.messages)
    other = await fleet.add("b")
    await asyncio.wait_for(task, 5)
    assert len(other.requests) == 1
    await until(lambda: starting.cancelled)


@pytest.mark.parametrize("state", ["draining", "dead"])
async def test_hosts_that_leave_get_nothing(fleet, client, state):
    leaving = await fleet.add("a")
    leaving.status.state = state
    with pytest.raises(EngineUnreachable, match="no engine"):
        await ask(client, timeout_s=0.5)
    assert not leaving.requests


async def test_routes_are_asked_for_once_in_a_while(fleet, client):
    """However many requests wait, the coordinator hears one question a second, by the worker's name."""
    await fleet.add("a")
    await asyncio.gather(*(ask(client) for _ in range(50)))
    assert fleet.asked == [ListEngines("w")]


async def test_a_host_that_is_given_to_others_finishes_what_it_has(fleet, client):
    """The coordinator lists it no more for this worker, but it answers."""
    host = await fleet.add("a")

    async def slow(message: Generate) -> Message:
        await asyncio.sleep(1.0)
        return generated([5, STOP])

    host.answer = slow
    task = asyncio.create_task(ask(client))
    await until(lambda: host.requests)
    fleet.hosts.clear()
    assert ids(await task) == [5, STOP]
    await host.server.close()


# Waiting, and what is lost --------------------------------------------------------------------------------------------


async def test_no_host_until_the_deadline(fleet, client):
    """Without a host that serves the call ends at its deadline, never later, and the host is told."""
    began = time.monotonic()
    with pytest.raises(EngineUnreachable, match="no engine"):
        await ask(client, timeout_s=0.5)
    silent = await fleet.add("a")
    silent.answer = never
    await asyncio.sleep(0.5)
    with pytest.raises(EngineUnreachable):
        await ask(client, timeout_s=0.5)
    assert time.monotonic() - began < 3
    await until(lambda: silent.cancelled == [silent.requests[0].request])


async def test_a_long_reply_is_asked_for_without_its_prompt(fleet, client):
    """The prompt travels once; the whole reply replaces what was told before, whose versions were a lower bound."""
    host = await fleet.add("a")

    async def slow(message: Generate) -> Message:
        for i in range(4):
            await asyncio.sleep(0.15)
            host.sampled.append(10 + i)
        await asyncio.sleep(0.2)
        return generated([10, 11, 12, 13, STOP], version=3, waited_s=0.25)

    host.answer = slow
    reply = await ask(client)
    assert ids(reply) == [10, 11, 12, 13, STOP]
    assert set(unpack(reply.versions, INT32)) == {3}
    assert 0.25 <= reply.waited_s < 0.5
    assert [type(message) for message in host.messages[:2]] == [Generate, PollGeneration]
    haves = [message.have for message in host.messages if isinstance(message, PollGeneration)]
    assert haves == sorted(haves) and haves[-1] == 4


async def test_a_cut_connection_loses_nothing(fleet, client):
    """Answers are asked for again, of the same generation, as soon as the host can be reached."""
    host = await fleet.add("a")

    async def slow(message: Generate) -> Message:
        host.sampled = [5]
        await asyncio.sleep(1.0)
        return generated([5, 6, STOP])

    host.answer = slow
    task = asyncio.create_task(ask(client))
    await until(lambda: len(host.messages) > 2)
    await host.server.close()
    await asyncio.sleep(0.3)
    await host.start()
    assert ids(await task) == [5, 6, STOP]
    assert len(host.requests) == 1


async def test_a_lost_answer_is_asked_for_again(fleet, client):
    """Also that of the first message, whose repeat attaches to what it began."""
    host = await fleet.add("a")
    tell, lost = host._tell, []

    async def losing(request: str, have: int, wait_s: float) -> Message:
        if len(lost) < 1:
            lost.append(request)
            await asyncio.sleep(60)
        return await tell(request, have, wait_s)

    host._tell = losing
    assert ids(await ask(client)) == [STOP]
    assert (len(host.messages), len(host.requests)) == (2, 1)


async def test_sampled_tokens_outlive_their_host(fleet, client):
    """A host that went silent is left, with what it had told; another one continues, and only its own tokens are new."""
    first, second = await fleet.add("a"), await fleet.add("b")
    second.status.running = 3
    first.sampled, first.answer, first.waited_s = [10, 11], never, 0.5

    async def go_on(message: Generate) -> Message:
        return generated([12, STOP], version=4, waited_s=0.25)

    second.answer = go_on
    task = asyncio.create_task(ask(client, timeout_s=30.0))
    await until(lambda: len(first.messages) > 2)
    lost_at = time.monotonic()
    await first.server.close()
    first.status.state = "dead"
    reply = await task
    lost_s = time.monotonic() - lost_at
    assert ids(reply) == [10, 11, 12, STOP]
    assert unpack(reply.versions, INT32).tolist() == [1, 1, 4, 4]
    assert unpack(second.requests[0].prefix_ids, INT32).tolist() == [10, 11]
    assert second.requests[0].max_new_tokens == 9
    assert 0.75 + lost_s - 0.5 < reply.waited_s < 0.75 + lost_s + 0.5
    await first.start()


async def test_what_an_interrupted_host_had_is_continued(fleet, client):
    """Its SGLang died: its last answer has the tokens that were not told before."""
    first, second = await fleet.add("a"), await fleet.add("b")
    second.status.running = 3
    first.sampled = [10]

    async def interrupted(message: Generate) -> Message:
        await asyncio.sleep(0.15)
        return EngineUnavailable("its SGLang died", *tokens([11, 12], version=2), waited_s=0.5)

    async def go_on(message: Generate) -> Message:
        return generated([STOP], version=3, waited_s=0.25)

    first.answer, second.answer = interrupted, go_on
    reply = await ask(client)
    assert ids(reply) == [10, 11, 12, STOP]
    assert unpack(reply.versions, INT32).tolist() == [1, 2, 2, 3]
    assert 0.75 <= reply.waited_s < 1.25
    assert not first.cancelled


async def test_the_same_host_goes_on_if_there_is_no_other(fleet, client):
    host = await fleet.add("a")

    async def once_interrupted(message: Generate) -> Message:
        if len(host.requests) == 1:
            return EngineUnavailable("its SGLang died", *tokens([10, 11]))
        return generated([STOP])

    host.answer = once_interrupted
    assert ids(await ask(client)) == [10, 11, STOP]
    assert unpack(host.requests[1].prefix_ids, INT32).tolist() == [10, 11]


@pytest.mark.parametrize(("sampled", "why"), [([10, STOP], "stop"), ([10] * 9, "length")])
async def test_a_reply_that_is_whole_is_not_continued(fleet, client, sampled, why):
    """Its host was lost between the last token and saying so."""
    host = await fleet.add("a")

    async def interrupted(message: Generate) -> Message:
        return EngineUnavailable("its SGLang died", *tokens(sampled))

    host.answer = interrupted
    reply = await ask(client)
    assert (ids(reply), reply.finish_reason, len(host.requests)) == (sampled, why, 1)


async def test_a_replaced_host_has_lost_the_request(fleet, client):
    """Its successor knows of nothing: what was told is continued."""
    host = await fleet.add("a")
    host.sampled = [10]

    async def first_hangs(message: Generate) -> Message:
        return await never(message) if len(host.requests) == 1 else generated([STOP])

    host.answer = first_hangs
    task = asyncio.create_task(ask(client, timeout_s=30.0))
    await until(lambda: len(host.messages) > 2)
    host.forget()
    assert ids(await asyncio.wait_for(task, 5)) == [10, STOP]


async def test_a_cancelled_call_is_aborted_at_its_host(fleet, client):
    host = await fleet.add("a")
    host.answer = never
    task = asyncio.create_task(ask(client))
    await until(lambda: host.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: host.cancelled == [host.requests[0].request])


async def test_a_request_that_is_wrong_fails_at_once(fleet, client):
    """No other host would take it either."""
    host = await fleet.add("a")

    async def fail(message: Generate) -> Message:
        raise ValueError("the prompt is too long")

    host.answer = fail
    began = time.monotonic()
    with pytest.raises(EngineUnreachable, match="too long"):
        await ask(client)
    assert time.monotonic() - began < 2
