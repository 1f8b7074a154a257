from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.processor import Processor
from megatron_webrl.tasks import MiniWob


@pytest.fixture(scope="session")
def config(tiny_model_dir: Path) -> RunConfig:
    """The demo's browser and agent, with the tests' tiny model."""
    return validate(
        {
            "model": {"path": tiny_model_dir},
            "tasks": {"names": ["click-test", "enter-text"], "demonstration_seeds": [0, 2], "horizons": {1: 3}},
            "agent": {"prompt": "short", "coordinate_step": 20},
            "browser": {"slots": 2, "viewport": [500, 320], "screenshot": [160, 210]},
            "evaluation": {"episodes": 10},
            "replay": {"lease_s": 3},
        },
        "test",
    )


@pytest.fixture(scope="session")
def processor(tiny_model_dir: Path) -> Processor:
    return Processor.load(tiny_model_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def miniwob(config: RunConfig) -> AsyncIterator[MiniWob]:
    """One browser for all tests of a module that runs in one event loop."""
    environment = MiniWob(config)
    yield environment
    await environment.close()
