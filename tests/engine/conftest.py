"""One real SGLang behind one real engine host, a coordinator that only lists it, and a publisher, for all e2e tests."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config import RunConfig
from megatron_webrl.engine import EngineHost, GenerationClient
from megatron_webrl.processes import marked
from megatron_webrl.wire import BlockingClient, Client, Server
from megatron_webrl.wire.messages import Done, Engines, EngineStatus, ListEngines, Message


def run_config(model: Path, **engine: Any) -> RunConfig:
    """The smallest configuration of a CPU engine in float32."""
    return RunConfig.model_validate(
        {
            "device": "cpu",
            "model": {"path": str(model)},
            "tasks": {"names": ["click-test"]},
            "trainer": {"dtype": "float32"},
            "sampling": {"max_new_tokens": 24},
            "engine": {
                "max_total_tokens": 8192,
                "max_running_requests": 16,
                "threads": 1,
                "start_timeout_s": 600,
                **engine,
            },
        }
    )


class Rig:
    """Runs a coordinator and engine hosts in a thread with their own event loop; tests block on it."""

    def __init__(self, run_id: str, directory: Path) -> None:
        self.run_id, self.directory = run_id, directory
        self.statuses: dict[str, EngineStatus] = {}
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._hosts: list[asyncio.Task[None]] = []
        self.address = f"ipc://{directory}/coordinator"
        self._server = Server(self.address, run_id, {ListEngines: self._list, EngineStatus: self._status})
        self.wait(self._server.start())

    async def _list(self, sender: str, message: Message) -> Engines:
        return Engines(list(self.statuses.values()))

    async def _status(self, sender: str, message: EngineStatus) -> Done:
        self.statuses[message.name] = message
        return Done()

    def wait(self, work: Coroutine[Any, Any, Any], timeout: float = 300.0) -> Any:
        """Run it in the rig's loop and block until it ends."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def submit(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the rig's loop; returns a future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def add_host(self, config: RunConfig, name: str) -> EngineHost:
        """Start an engine host."""
        host = EngineHost(
            config,
            run_id=self.run_id,
            name=name,
            index=len(self._hosts),
            address=f"ipc://{self.directory}/{name}",
            coordinator_address=self.address,
            log_dir=self.directory,
        )

        async def start() -> None:
            self._hosts.append(asyncio.create_task(host.run()))

        self.wait(start())
        return host

    def until(self, condition: Callable[[], Any], timeout: float, what: str) -> None:
        """Poll until it holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            failed = [t for t in self._hosts if t.done()]
            assert not failed, failed
            assert time.monotonic() < deadline, f"{what}: not within {timeout} s; {self.statuses}"
            time.sleep(0.05)

    def close(self) -> None:
        """End the hosts, then the coordinator."""

        async def stop() -> None:
            for task in self._hosts:
                task.cancel()
            await asyncio.gather(*self._hosts, return_exceptions=True)
            await self._server.close()

        self.wait(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


class Engine(Rig):
    """A rig with one host, a client on it and what publishing takes."""

    def __init__(self, model: Path, run_id: str, directory: Path) -> None:
        super().__init__(run_id, directory)
        self.config = run_config(model)
        self.began = time.monotonic()
        self.host = self.add_host(self.config, "engine-0")
        self.coordinator = BlockingClient(self.address, run_id, "trainer")
        self.client: GenerationClient

    @property
    def status(self) -> EngineStatus:
        """What the coordinator knows of the host."""
        return self.statuses["engine-0"]

    def until_state(self, state: str, timeout: float = 600.0) -> None:
        """Until the coordinator has heard that the host is in `state`."""
        self.until(lambda: "engine-0" in self.statuses and self.status.state == state, timeout, state)


@pytest.fixture(scope="session")
def engine(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The one SGLang of the session; afterwards nothing of it is left."""
    from megatron_webrl.processor import Processor

    run_id = f"test-engine-{os.getpid()}"
    rig = Engine(tiny_model_dir, run_id, tmp_path_factory.mktemp("engine"))
    processor = Processor.load(tiny_model_dir)

    async def clients() -> tuple[Client, GenerationClient]:
        banned, stop = processor.banned_ids(), processor.stop_ids()
        coordinator = Client(rig.address, run_id, "test")
        return coordinator, GenerationClient(coordinator, rig.config.sampling, banned, stop, 600.0)

    async def close() -> None:
        await rig.client.close()
        coordinator.close()

    coordinator, rig.client = rig.wait(clients())
    yield rig
    rig.wait(close())
    rig.coordinator.close()
    rig.close()
    assert not marked(run_id)
