"""The generations of an engine host, with a fake SGLang."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_sglang import FakeSglang

from megatron_webrl.config import EngineConfig
from megatron_webrl.engine import requests
from megatron_webrl.engine.generation import ServingGate
from megatron_webrl.engine.requests import GenerationTable
from megatron_webrl.engine.sglang_server import SglangError
from megatron_webrl.trajectory import FLOAT32, INT32, pack, unpack
from megatron_webrl.wire.messages import (
    CancelGeneration,
    Done,
    EngineUnavailable,
    Generate,
    Generated,
    Generating,
    Message,
    NeedImages,
    PollGeneration,
)

IDS = itertools.count()


class FakeServingHost:
    """What the table needs of its host, around a fake SGLang."""

    def __init__(self, engine: EngineConfig) -> None:
        self.state, self.version = "serving", 7
        self.gate = ServingGate()
        self.gate.open()
        self.sglang: Any = FakeSglang()
        self.signs = 0
        self.table = GenerationTable(self, engine)

    def heard(self) -> None:
        self.signs += 1

    async def ask(self, message: Message) -> Any:
        return await self.table.handlers()[type(message)]("test", message)

    async def poll(self, request: str, have: int = 0, wait_s: float = 1.0) -> Any:
        return await self.ask(PollGeneration(request, have, wait_s))

    async def begin(self, message: Generate | None = None) -> str:
        """Begin one and wait until SGLang has it."""
        message = message or generate()
        assert isinstance(await self.ask(message), Generating)
        async with asyncio.timeout(5):
            while not any(True for _ in self.sglang._streams):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return message.request

    def aborted(self) -> list[str]:
        return [body["rid"] for path, body in self.sglang.controls if path == "/abort_request"]


def generate(**fields: Any) -> Generate:
    defaults = {
        "request": f"request {next(IDS)}",
        "prompt_ids": pack([1, 2], INT32),
        "digests": [],
        "images": {},
        "max_new_tokens": 100,
        "temperature": 1.0,
        "seed": 1,
        "banned_ids": b"",
        "stop_ids": b"",
        "deadline_s": 30.0,
        "wait_s": 0.05,
    }
    return Generate(**{**defaults, **fields})


@pytest.fixture
async def host() -> AsyncIterator[FakeServingHost]:
    host = FakeServingHost(EngineConfig(max_running_requests=2, image_cache_bytes=100))
    yield host
    await host.table.close()


def ids(answer: Generated | Generating | EngineUnavailable) -> list[int]:
    found = unpack(answer.response_ids, INT32).tolist()
    assert unpack(answer.logprobs, FLOAT32).tolist() == [-float(i) for i in found]
    assert len(unpack(answer.versions, INT32)) == len(found)
    return found


async def test_tokens_are_told_as_they_come(host):
    """What is new after what the client has; the whole at the end."""
    request = await host.begin()
    host.sglang.feed(2)
    first = await host.poll(request, 0, 0.05)
    host.sglang.feed(3)
    second = await host.poll(request, 2, 0.05)
    assert (ids(first), ids(second), second.running) == ([10, 11], [12, 13, 14], 1)
    host.sglang.feed(1, finish="stop")
    last = await host.poll(request, 5)
    assert isinstance(last, Generated)
    assert (ids(last), last.finish_reason, last.running) == ([10, 11, 12, 13, 14, 15], "stop", 0)
    assert host.signs == 3, "every chunk is a sign of life"


async def test_messages_may_be_repeated(host):
    """A second Generate attaches to the first, a poll after the end is answered again: SGLang samples once."""
    message = generate()
    request = await host.begin(message)
    host.sglang.feed(2)
    await asyncio.sleep(0.05)
    assert ids(await host.ask(message)) == [10, 11]
    host.sglang.feed(1, finish="length")
    for _ in range(2):
        assert ids(await host.poll(request, 2)) == [10, 11, 12]
    assert ids(await host.ask(message)) == [10, 11, 12]
    assert len(host.sglang.bodies) == 1


async def test_an_answer_comes_when_there_is_one(host):
    """Not when the wait is over."""
    request = await host.begin()
    task = asyncio.create_task(host.poll(request, 0, 20.0))
    await asyncio.sleep(0.05)
    host.sglang.feed(1, finish="stop")
    assert isinstance(await asyncio.wait_for(task, 2), Generated)


async def test_an_unknown_generation_is_unavailable(host):
    assert isinstance(await host.poll("nobody's"), EngineUnavailable)


async def test_images_are_kept_and_asked_for(host):
    """As far as there is room for them."""
    digests = ["a", "b"]
    first = await host.ask(generate(digests=digests, images={"b": b"B"}))
    assert first == NeedImages(["a"])
    await host.begin(generate(digests=digests, images={"a": b"A"}))
    assert len(host.sglang.bodies[0]["image_data"]) == 2
    await host.ask(generate(digests=["c"], images={"c": bytes(100)}))
    assert await host.ask(generate(digests=digests, images={})) == NeedImages(digests)


async def test_it_is_held_until_the_engine_serves(host):
    """That time is waited; the version is that of when it was sent."""
    host.gate.shut()
    message = generate()
    held = await host.ask(message)
    assert (ids(held), host.sglang.bodies) == ([], [])
    await asyncio.sleep(0.2)
    host.version = 8
    host.gate.open()
    await host.begin(message)
    assert host.sglang.bodies[0]["extra_key"] == "8"
    host.sglang.feed(1)
    await asyncio.sleep(0.1)
    told = await host.poll(message.request, 0, 0.0)
    assert unpack(told.versions, INT32).tolist() == [8]
    assert 0.24 < told.waited_s < 0.4


async def test_a_refresh_in_mid_generation_is_waited(host):
    request = await host.begin()
    host.gate.shut()
    await asyncio.sleep(0.2)
    host.gate.open()
    await asyncio.sleep(0.2)
    assert 0.19 < (await host.poll(request, 0, 0.0)).waited_s < 0.3


async def test_only_so_many_run_at_once(host):
    """The third waits here, where its waiting is seen and counted."""
    messages = [generate() for _ in range(3)]
    for message in messages:
        await host.ask(message)
    assert (len(host.sglang.bodies), host.table.running) == (2, 3)
    host.sglang.feed(1, finish="stop")
    await host.poll(messages[0].request)
    await asyncio.sleep(0.05)
    assert (len(host.sglang.bodies), host.table.running) == (3, 1)
    assert (await host.poll(messages[2].request, 0, 0.0)).waited_s > 0.04


async def test_what_was_sampled_outlives_sglang(host):
    """It ends as unavailable, with the tokens that the client lacks; the time since the newest of them was in vain."""
    request = await host.begin()
    host.sglang.feed(3)
    await asyncio.sleep(0.05)
    assert (await host.poll(request, 0, 0.0)).waited_s < 0.05
    await asyncio.sleep(0.2)
    host.sglang.die()
    answer = await host.poll(request, 1)
    assert isinstance(answer, EngineUnavailable)
    assert (ids(answer), unpack(answer.versions, INT32).tolist(), answer.reason) == ([11, 12], [7, 7], "it died")
    assert 0.2 < answer.waited_s < 0.4
    assert answer == await host.poll(request, 1), "nothing changes after the end"


async def test_an_abort_by_sglang_is_no_end_of_the_reply(host):
    request = await host.begin()
    host.sglang.feed(2)
    host.sglang.feed(1, finish="abort", message="by somebody")
    answer = await host.poll(request)
    assert isinstance(answer, EngineUnavailable) and ids(answer) == [10, 11]


async def test_a_request_that_sglang_refuses_is_an_error(host):
    request = await host.begin()
    host.sglang.feed(1, finish="abort", message="too long", status_code=400)
    with pytest.raises(SglangError, match="too long"):
        await host.poll(request)


async def test_a_whole_prefix_is_an_error(host):
    with pytest.raises(ValueError, match="nothing to continue"):
        await host.ask(generate(prefix_ids=pack([3, 4], INT32), max_new_tokens=2, wait_s=1.0))


async def test_its_deadline_ends_it(host):
    """At the host too: SGLang is told, and what was sampled is not lost."""
    message = generate(deadline_s=0.3, wait_s=0.0)
    await host.begin(message)
    host.sglang.feed(2)
    answer = await host.poll(message.request, 0, 5.0)
    assert isinstance(answer, EngineUnavailable) and ids(answer) == [10, 11]
    assert host.aborted() == [host.sglang.bodies[0]["rid"]]


async def test_a_cancelled_one_is_aborted_and_forgotten(host):
    request = await host.begin()
    assert isinstance(await host.ask(CancelGeneration(request)), Done)
    assert isinstance(await host.ask(CancelGeneration(request)), Done)
    await asyncio.sleep(0.05)
    assert (host.aborted(), host.table.running) == ([host.sglang.bodies[0]["rid"]], 0)
    assert isinstance(await host.poll(request), EngineUnavailable)


async def test_what_nobody_asks_for_is_aborted(host, monkeypatch):
    """One that is asked for stays, however long an answer takes."""
    monkeypatch.setattr(requests, "ABANDONED_S", 0.2)
    kept, abandoned = await host.begin(), await host.begin()
    asking = asyncio.create_task(host.poll(kept, 0, 5.0))
    await asyncio.sleep(0.4)
    host.table.sweep()
    await asyncio.sleep(0.05)
    assert host.aborted() == [host.sglang.bodies[1]["rid"]]
    assert isinstance(await host.poll(abandoned), EngineUnavailable)
    host.sglang.feed(1, finish="stop")
    assert isinstance(await asking, Generated)
    await asyncio.sleep(0.3)
    host.table.sweep()
    assert isinstance(await host.poll(kept), EngineUnavailable), "nothing is kept for ever"


async def test_the_table_is_bounded(host, monkeypatch):
    """Those whose end was told make room; others do not."""
    monkeypatch.setattr(requests, "MOST_GENERATIONS", 2)
    first, second = await host.begin(), await host.begin()
    assert isinstance(await host.ask(generate()), EngineUnavailable)
    host.sglang.feed(1, finish="stop")
    await host.poll(first)
    assert isinstance(await host.ask(generate()), Generating)
    assert isinstance(await host.poll(first), EngineUnavailable)
    assert isinstance(await host.poll(second), Generated)


async def test_draining_lets_what_runs_finish(host):
    """Nothing new begins; it is over when the last client knows its reply."""
    request = await host.begin()
    draining = asyncio.create_task(host.table.drain(time.monotonic() + 20.0, "draining"))
    await asyncio.sleep(0.05)
    refused = await host.ask(generate())
    assert isinstance(refused, EngineUnavailable) and refused.reason == "draining"
    host.sglang.feed(2, finish="stop")
    await asyncio.sleep(0.2)
    assert not draining.done()
    assert isinstance(await host.poll(request), Generated)
    await asyncio.wait_for(draining, 1)


async def test_draining_has_a_deadline(host):
    """The rest is interrupted with what it has."""
    request = await host.begin()
    host.sglang.feed(2)
    asking = asyncio.create_task(host.poll(request, 1, 5.0))
    await asyncio.wait_for(host.table.drain(time.monotonic() + 0.2, "draining"), 2)
    answer = await asking
    assert isinstance(answer, EngineUnavailable) and ids(answer) == [11]


async def test_draining_without_an_engine_holds_nobody(host):
    host.gate.shut()
    message = generate()
    await host.ask(message)
    asking = asyncio.create_task(host.poll(message.request, 0, 5.0))
    await asyncio.wait_for(host.table.drain(time.monotonic() + 20.0, "draining"), 2)
    assert isinstance(await asking, EngineUnavailable)
