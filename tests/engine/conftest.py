"""One real SGLang behind one real engine host, for all e2e tests that need no other."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import Rig, run_config

from megatron_webrl.engine import GenerationClient
from megatron_webrl.processes import marked
from megatron_webrl.wire import BlockingClient, Client
from megatron_webrl.wire.messages import EngineStatus


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
