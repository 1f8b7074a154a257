"""A coordinator and its store in this process, and what workers and a trainer ask them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.replay import (
    Coordinator,
)
from megatron_webrl.screenshots import serve_store, upload
from megatron_webrl.trajectory import (
    Assignment,
    Group,
    Outcome,
    Trajectory,
    encode_steps,
    image_digest,
)
from megatron_webrl.wire import Client, RequestTimeout
from megatron_webrl.wire.messages import (
    Assignments,
    GetAssignments,
    Submitted,
    SubmitTrajectory,
)

SIZE, GROUPS = 2, 2


class System:
    """A coordinator and its store, and what workers and a trainer ask them."""

    def __init__(self, config: RunConfig, directory: Path, run_id: str = "run", store_bytes: int = 1 << 20) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.issued: list[Assignment] = []
        self.config = config
        at = {name: f"ipc://{directory}/{name}" for name in ("coordinator", "store")}
        self.coordinator, self.store = (Client(at[name], run_id, "test") for name in ("coordinator", "store"))
        role = Coordinator(
            config,
            run_id=run_id,
            address=at["coordinator"],
            store_address=at["store"],
            log_metrics=lambda step, values: self.rows.append((step, values)),
        )
        self.role = asyncio.create_task(role.run())
        store = serve_store(at["store"], run_id, directory / "run" / "screenshots", store_bytes)
        self.roles = [self.role, asyncio.create_task(store)]

    async def ask(self, message: Any, expect: Any) -> Any:
        try:
            return await self.coordinator.request(message, timeout=10, expect=expect)
        except RequestTimeout:
            if self.role.done():
                self.role.result()
            raise

    async def assign(self, slots: int) -> list[Assignment]:
        found = await self.ask(GetAssignments("w", "s", slots, [a.key for a in self.issued], 0.0), Assignments)
        self.issued += found.assignments
        return found.assignments

    async def finish(
        self, assignment: Assignment, reward: float, version: int = 0, *, more: bool = False
    ) -> Trajectory:
        """One episode with a screenshot of its own.  What the reply brings is in `following`."""
        self.issued.remove(assignment)
        data = repr(assignment.key).encode()
        digest = image_digest(data)
        trajectory = Trajectory(
            assignment, Outcome.SUCCESS if reward else Outcome.FAILURE, "x", reward, 1 + assignment.sample_index, 3,
            100 + 10 * assignment.group_id + assignment.sample_index, version, version, [digest], "w", 0.0, 1.0,
            encode_steps([]),
        )  # fmt: skip
        await upload(self.store, assignment.key, {digest: data})
        reply = await self.ask(SubmitTrajectory(trajectory, "w", "s", more), Submitted)
        assert reply.accepted
        self.following: list[Assignment] = reply.assignments
        return trajectory

    async def finish_groups(self, count: int, version: int = 0) -> list[Group]:
        """Whole groups of one success and one failure."""
        groups = []
        for _ in range(count):
            members = await self.assign(SIZE)
            assert len({a.group_id for a in members}) == 1
            done = [await self.finish(a, float(a.sample_index), version) for a in members]
            groups.append(Group(members[0].group_id, members[0].task, done))
        return groups

    async def close(self) -> None:
        for role in self.roles:
            role.cancel()
        await asyncio.gather(*self.roles, return_exceptions=True)
        self.coordinator.close()
        self.store.close()


Start = Callable[..., System]


def configure(directory: Path, **sections: Any) -> RunConfig:
    return validate(
        {
            "run_dir": str(directory / "run"),
            "model": {"path": "m"},
            "tasks": {"names": ["click-test", "focus-text", "enter-text"]},
            "replay": {"group_size": SIZE, "groups_per_step": GROUPS, "eta": 2, **sections.pop("replay", {})},
            **sections,
        },
        "test",
    )
