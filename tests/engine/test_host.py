"""The life of an engine host, over real sockets, with a fake SGLang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSglang
from rig import run_config

from megatron_webrl.engine import EngineHost, SglangError
from megatron_webrl.engine import host as host_module
from megatron_webrl.trajectory import INT32, pack, unpack
from megatron_webrl.wire import Client, Server
from megatron_webrl.wire.messages import (
    BeginRefresh,
    Done,
    Drain,
    EndRefresh,
    EngineStatus,
    EngineUnavailable,
    Generate,
    Generated,
    Generating,
    LoadFromDisk,
    Message,
    PollGeneration,
)


class FakeRun:
    """A host around a fake SGLang, what it said to the coordinator, and a client of it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[EngineStatus] = []
        self.config = run_config(directory, health_timeout_s=1.0, max_restarts=2)
        self.sglang = FakeSglang()
        monkeypatch.setattr(host_module, "SglangServer", lambda *_, **__: self.sglang)
        monkeypatch.setattr(host_module, "FIRST_BACKOFF_S", 0.05)
        monkeypatch.setattr(host_module, "WATCH_EVERY_S", 0.02)
        self.address = f"ipc://{directory}/host"
        self._server = Server(f"ipc://{directory}/coordinator", "run", {EngineStatus: self._hear})
        self.host = EngineHost(
            self.config,
            run_id="run",
            name="engine-0",
            index=0,
            address=self.address,
            coordinator_address=self._server.address,
            log_dir=directory,
        )

    async def _hear(self, _: str, status: EngineStatus) -> Done:
        self.said.append(status)
        return Done()

    async def start(self) -> None:
        await self._server.start()
        self.running = asyncio.create_task(self.host.run())
        self.client = Client(self.address, "run", "test")
        await self.until(lambda: self.states()[-1:] == ["waiting_weights"])

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.client.close()
        await self._server.close()

    async def ask(self, message: Message) -> Any:
        kinds = (Done, Generated, Generating, EngineUnavailable)
        return await self.client.request(message, timeout=10.0, expect=kinds)

    async def serve(self) -> None:
        await self.ask(LoadFromDisk("export", 7, 10.0))

    async def begin(self, request: str) -> Any:
        return await self.ask(Generate(request, pack([1], INT32), [], {}, 100, 1.0, 1, b"", b"", 30.0, 0.1))

    def states(self) -> list[str]:
        """That the coordinator heard, without repeats."""
        heard = [status.state for status in self.said]
        return [state for at, state in enumerate(heard) if at == 0 or heard[at - 1] != state]

    async def until(self, condition: Callable[[], object], timeout: float = 10.0) -> None:
        async with asyncio.timeout(timeout):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeRun]:
    run = FakeRun(tmp_path, monkeypatch)
    await run.start()
    yield run
    await run.close()


async def test_serves_from_the_first_weights_on(run):
    await run.serve()
    await run.until(lambda: run.said[-1].state == "serving")
    assert run.said[-1].version == 7
    assert isinstance(await run.begin("r"), Generating)
    await run.until(lambda: run.said[-1].running == 1)
    run.sglang.feed(3, finish="stop")
    reply = await run.ask(PollGeneration("r", 0, 5.0))
    assert isinstance(reply, Generated) and unpack(reply.versions, INT32).tolist() == [7, 7, 7]


async def test_a_death_keeps_tokens_and_is_a_new_incarnation(run):
    await run.serve()
    await run.begin("r")
    incarnation = run.host.incarnation
    run.sglang.feed(3)
    await asyncio.sleep(0.05)
    run.sglang.die()
    reply = await run.ask(PollGeneration("r", 1, 5.0))
    assert isinstance(reply, EngineUnavailable) and unpack(reply.response_ids, INT32).tolist() == [11, 12]
    await run.until(lambda: run.sglang.starts == 2 and run.said[-1].state == "waiting_weights")
    assert (run.host.incarnation, run.said[-1].version) == (incarnation + 1, -1)


async def test_restarts_are_limited_and_back_off(run, monkeypatch):
    """Longer before each that never got ready; then the host ends with SGLang's own words."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float) -> None:
        if seconds >= host_module.FIRST_BACKOFF_S:
            waits.append(seconds)
        await sleep(seconds if seconds < 1 else seconds / 10)

    async def never_ready(timeout_s: float) -> None:
        raise SglangError("no memory")

    monkeypatch.setattr(run.sglang, "wait_ready", never_ready)
    monkeypatch.setattr(host_module.asyncio, "sleep", recorded)
    run.sglang.die()
    with pytest.raises(SglangError, match=r"engine\.max_restarts.*no memory"):
        await asyncio.wait_for(run.running, 10)
    backoffs = [wait for wait in waits if wait in (0.05, 0.1, 0.2)]
    assert backoffs == [0.05, 0.1]


async def test_one_that_gives_no_sign_of_life_is_restarted(run):
    """It is alive and does not answer (engine.health_timeout_s); as long as it answers nothing happens."""
    await run.serve()
    await asyncio.sleep(1.5)
    assert (run.sglang.starts, run.sglang.probes > 2) == (1, True)
    run.sglang.healthy_now = False
    began = time.monotonic()
    await run.until(lambda: run.sglang.starts == 2, 5.0)
    assert 0.5 < time.monotonic() - began < 2.0


async def test_silence_counts_from_when_it_serves(tmp_path, monkeypatch):
    """Also if it serves before the watch first looked."""
    run = FakeRun(tmp_path, monkeypatch)
    monkeypatch.setattr(host_module, "WATCH_EVERY_S", 0.5)
    try:
        await run.start()
        await run.serve()
        await asyncio.sleep(0.8)
        assert run.sglang.starts == 1
    finally:
        await run.close()


async def test_tokens_are_signs_of_life(run):
    await run.serve()
    await run.begin("r")
    run.sglang.healthy_now = False
    for _ in range(8):
        await asyncio.sleep(0.2)
        run.sglang.feed(1)
    assert run.sglang.starts == 1


async def test_silence_is_right_while_nothing_is_served(run):
    """Before the first weights, and in a refresh, however long it takes."""
    run.sglang.healthy_now = False
    await asyncio.sleep(1.5)
    await run.serve()
    await run.ask(BeginRefresh(8, 30.0))
    await asyncio.sleep(1.5)
    assert run.sglang.starts == 1


async def test_a_drained_host_finishes_and_leaves(run):
    await run.serve()
    await run.begin("r")
    await run.ask(Drain(30.0))
    await run.until(lambda: run.said[-1].state == "draining")
    assert isinstance(await run.begin("another"), EngineUnavailable)
    assert run.said[-1].version == 7
    run.sglang.feed(3, finish="stop")
    assert isinstance(await run.ask(PollGeneration("r", 0, 5.0)), Generated)
    await asyncio.wait_for(run.running, 5)
    assert run.states()[-2:] == ["draining", "dead"]
    assert not run.sglang.up


async def test_draining_ends_at_its_time(run):
    await run.serve()
    await run.begin("r")
    run.sglang.feed(3)
    await run.ask(Drain(0.3))
    reply = await run.ask(PollGeneration("r", 0, 5.0))
    while isinstance(reply, Generating):
        reply = await run.ask(PollGeneration("r", 0, 5.0))
    assert isinstance(reply, EngineUnavailable) and unpack(reply.response_ids, INT32).tolist() == [10, 11, 12]
    await asyncio.wait_for(run.running, 5)


async def test_draining_waits_for_the_end_of_a_refresh(run):
    """Or what is in flight could never finish."""
    await run.serve()
    await run.begin("r")
    await run.ask(BeginRefresh(8, 30.0))
    await run.ask(Drain(30.0))
    await asyncio.sleep(0.1)
    assert run.host.state == "serving"
    await run.ask(EndRefresh(8, 10.0))
    await run.until(lambda: run.host.state == "draining")
    run.sglang.feed(3, finish="stop")
    assert isinstance(await run.ask(PollGeneration("r", 0, 5.0)), Generated)
    await asyncio.wait_for(run.running, 5)


async def test_a_draining_host_is_not_started_again(run):
    """Its SGLang died: the tokens are kept, and that was it."""
    await run.serve()
    await run.begin("r")
    run.sglang.feed(2)
    await run.ask(Drain(30.0))
    await run.until(lambda: run.host.state == "draining")
    run.sglang.die()
    reply = await run.ask(PollGeneration("r", 0, 5.0))
    assert isinstance(reply, EngineUnavailable) and len(unpack(reply.response_ids, INT32)) == 2
    await asyncio.wait_for(run.running, 5)
    assert run.sglang.starts == 1


async def test_one_that_waits_for_weights_leaves_at_once(run):
    """With those that wait with it."""
    await run.begin("r")
    await run.ask(Drain(30.0))
    reply = await run.ask(PollGeneration("r", 0, 5.0))
    assert isinstance(reply, EngineUnavailable)
    await asyncio.wait_for(run.running, 5)
