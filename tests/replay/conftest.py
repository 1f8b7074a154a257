from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from replay_system import Start, System, configure


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts systems, each in place of the one before."""
    running: list[System] = []
    (tmp_path / "run").mkdir()

    def begin(start: dict[str, Any] | None = None, **sections: Any) -> System:
        assert not running or running[-1].role.done()
        running.append(System(configure(tmp_path, **sections), tmp_path, **(start or {})))
        return running[-1]

    yield begin
    for system in running:
        await system.close()
