"""Real engine hosts in a thread, and a coordinator that only lists them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from megatron_webrl.config import RunConfig
from megatron_webrl.engine import EngineHost
from megatron_webrl.wire import Server
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
        self._hosts: dict[str, asyncio.Task[None]] = {}
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
            self._hosts[name] = asyncio.create_task(host.run())

        self.wait(start())
        return host

    def remove(self, name: str) -> None:
        """End a host; the coordinator forgets it."""

        async def stop() -> None:
            task = self._hosts.pop(name)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.statuses.pop(name, None)

        self.wait(stop())

    def until(self, condition: Callable[[], Any], timeout: float, what: str) -> None:
        """Poll until it holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            failed = [t for t in self._hosts.values() if t.done()]
            assert not failed, failed
            assert time.monotonic() < deadline, f"{what}: not within {timeout} s; {self.statuses}"
            time.sleep(0.05)

    def close(self) -> None:
        """End the hosts, then the coordinator."""

        async def stop() -> None:
            for task in self._hosts.values():
                task.cancel()
            await asyncio.gather(*self._hosts.values(), return_exceptions=True)
            await self._server.close()

        self.wait(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
