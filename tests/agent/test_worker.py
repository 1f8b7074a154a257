import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from below import processes_below
from fake_generations import FakeGenerations
from judged_environment import Judged

from megatron_webrl.agent import BrowserWorker, format_call
from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.processor import Processor
from megatron_webrl.tasks import MiniWob
from megatron_webrl.trajectory import FLOAT32, INT32, Assignment, Lane, Outcome, Task, decode_steps, image_digest, pack
from megatron_webrl.wire import Message, Server
from megatron_webrl.wire.messages import (
    Assignments,
    ClaimImages,
    Done,
    Engines,
    EngineStatus,
    Generate,
    Generated,
    GetAssignments,
    Lacking,
    ListEngines,
    PutImages,
    Submitted,
    SubmitTrajectory,
)

Key = tuple[int, int, int]


class FakeRun:
    """A coordinator, a store and an engine host, in memory: hands out `assignments`, answers with the reply that
    `replies` has for the task's utterance."""

    def __init__(self, folder: Path, processor: Processor, assignments: list[Assignment]) -> None:
        self.folder = folder
        self.todo = assignments
        self.replies: dict[str, str] = {}
        self.results: dict[Key, list[SubmitTrajectory]] = {}
        self.images: dict[str, bytes] = {}
        self.polls: list[tuple[float, GetAssignments]] = []
        self.revoke: set[Key] = set()
        self.following: list[Assignment] = []
        """Come with acknowledgements."""
        self.silent_submits = 0
        """So many submissions are taken, but their acknowledgement fails."""
        self.lose_images = 0
        """So many uploads fail."""
        self.claimed: dict[Key, set[str]] = {}
        self.generate_s = 0.0
        self.generating = 0
        self._processor = processor
        kinds: dict[str, dict[type[Message], Callable[[str, Any], Any]]] = {
            "coordinator": {
                GetAssignments: self._assign,
                SubmitTrajectory: self._submit,
                ListEngines: self._engines,
            },
            "store": {ClaimImages: self._claim, PutImages: self._put},
            "engine": FakeGenerations(self._generate).handlers(),
        }
        self._servers = {name: Server(f"ipc://{folder}/{name}", "run", handlers) for name, handlers in kinds.items()}

    async def _assign(self, _: str, m: GetAssignments) -> Message:
        self.polls.append((asyncio.get_running_loop().time(), m))
        if m.slots and not self.todo and not self.revoke:
            await asyncio.sleep(min(m.wait_s, 0.1))
        out, self.todo = self.todo[: m.slots], self.todo[m.slots :]
        return Assignments(out, [key for key in m.running if key in self.revoke])

    async def _submit(self, _: str, m: SubmitTrajectory) -> Message:
        key = m.trajectory.assignment.key
        assert set(m.trajectory.digests) <= set(self.images) & self.claimed.get(key, set()), (
            "delivered before its images"
        )
        self.results.setdefault(key, []).append(m)
        if self.silent_submits:
            self.silent_submits -= 1
            raise RuntimeError("the acknowledgement is lost")
        following = [self.following.pop(0)] if m.more and self.following else []
        return Submitted(
            len(self.results[key]) == 1, "accepted" if len(self.results[key]) == 1 else "repeat", following
        )

    async def _engines(self, _: str, m: ListEngines) -> Message:
        return Engines([EngineStatus("engine-0", f"ipc://{self.folder}/engine", "serving", 5, 0, 1, 0)])

    async def _claim(self, _: str, m: ClaimImages) -> Message:
        self.claimed.setdefault(m.owner, set()).update(m.digests)
        return Lacking([d for d in m.digests if d not in self.images])

    async def _put(self, _: str, m: PutImages) -> Message:
        if self.lose_images:
            self.lose_images -= 1
            raise RuntimeError("no room")
        assert set(m.images) <= self.claimed[m.owner]
        assert all(image_digest(data) == digest for digest, data in m.images.items())
        self.images |= m.images
        return Done()

    async def _generate(self, m: Generate) -> Message:
        self.generating += 1
        await asyncio.sleep(self.generate_s)
        self.generating -= 1
        prompt = self._processor.decode(memoryview(m.prompt_ids).cast("i").tolist())
        reply = next((reply for key, reply in self.replies.items() if key in prompt), "")
        ids = [*self._processor.encode(reply), self._processor.end_token_id]
        return Generated(
            pack(ids, INT32), pack([-0.5] * len(ids), FLOAT32), pack([5] * len(ids), INT32), "stop", 0.0, 1
        )

    @asynccontextmanager
    async def worker(self, config: RunConfig) -> AsyncIterator[BrowserWorker]:
        """A worker at work; afterwards nothing of it is left."""
        for server in self._servers.values():
            await server.start()
        worker = BrowserWorker(
            config,
            run_id="run",
            name="worker-0",
            coordinator_address=f"ipc://{self.folder}/coordinator",
            store_address=f"ipc://{self.folder}/store",
        )
        running = asyncio.create_task(worker.run())
        try:
            yield worker
            worker.stop()
            await asyncio.wait_for(running, 20)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for server in self._servers.values():
                await server.close()
        assert processes_below() == []

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


def assignments(n: int, *, lane: Lane = Lane.TRAIN, name: str = "click-test") -> list[Assignment]:
    task = Task(f"miniwob/{name}/1", "miniwob", name, 1, 2)
    return [Assignment(task, i // 4, i % 4, 0, lane, i, 1.0, 60.0) for i in range(n)]


async def solution(config: RunConfig) -> str:
    environment = MiniWob(config)
    episode = environment.episode(assignments(1)[0].task)
    await episode.prepare()
    [action] = await episode.oracle()
    await episode.close()
    await environment.close()
    return format_call(action)


@pytest.fixture
def fake(tmp_path: Path, processor: Processor) -> FakeRun:
    return FakeRun(tmp_path, processor, [])


async def test_every_assignment_is_run_and_submitted_once(fake: FakeRun, config: RunConfig) -> None:
    """A lost acknowledgement is repeated, an upload that failed is tried again, slots are never exceeded."""
    fake.replies = {"Click the button": await solution(config)}
    fake.todo = assignments(12)
    fake.silent_submits = 1
    fake.lose_images = 1
    async with fake.worker(config):
        await fake.until(lambda: len(fake.results) == 12 and not fake.polls[-1][1].running)
    counts = Counter(len(messages) for messages in fake.results.values())
    assert counts == {1: 11, 2: 1}
    assert max(len(m.running) + m.slots for _, m in fake.polls) <= config.browser.slots
    for [message, *_] in fake.results.values():
        trajectory = message.trajectory
        assert (trajectory.outcome, trajectory.worker) == (Outcome.SUCCESS, "worker-0")
        assert (trajectory.min_version, trajectory.max_version) == (5, 5)
        assert set(trajectory.digests) <= set(fake.images)
    assert len(fake.images) == 1, "the same page is the same picture"


async def test_what_comes_with_an_acknowledgement_is_run_in_the_same_slot(fake: FakeRun, config: RunConfig) -> None:
    fake.replies = {"Click the button": await solution(config)}
    fake.todo, fake.following = assignments(8)[:2], assignments(8)[2:]
    async with fake.worker(config):
        await fake.until(lambda: len(fake.results) == 8 and not fake.polls[-1][1].running)
    assert max(len(m.running) + m.slots for _, m in fake.polls) <= config.browser.slots
    [session] = {m.session for messages in fake.results.values() for m in messages}
    assert {(m.worker, m.session) for _, m in fake.polls} == {("worker-0", session)}


async def test_judging_holds_no_slot_and_has_a_bound(
    fake: FakeRun, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot goes on while its last episode is judged; as many are judged at once as there are slots, then it waits; the
    leases of all are renewed."""
    monkeypatch.setattr(Judged, "seconds", 1.5)
    monkeypatch.setattr(Judged, "most", 0)
    tasks = config.tasks.model_copy(update={"environment": "judged_environment:Judged"})
    one = config.browser.model_copy(update={"slots": 1})
    fake.replies = {"What is the word?": format_call({"action": "answer", "text": "success"})}
    fake.todo = assignments(4)
    async with fake.worker(config.model_copy(update={"tasks": tasks, "browser": one})):
        await fake.until(lambda: len(fake.results) == 4)
    assert max(len(m.running) for _, m in fake.polls) == 2, "one in its slot, one judged"
    assert max(len(m.running) + m.slots for _, m in fake.polls) == 2
    assert Judged.most == 2, "the one in the slot answered before the other was judged"
    assert all(m[0].trajectory.verdict == "because" for m in fake.results.values())


async def test_evaluation_travels_without_payload(fake: FakeRun, config: RunConfig) -> None:
    fake.replies = {"Click the button": await solution(config)}
    fake.todo = assignments(2, lane=Lane.EVAL)
    async with fake.worker(config):
        await fake.until(lambda: len(fake.results) == 2)
    for [message] in fake.results.values():
        assert message.trajectory.reward == 1
        assert (message.trajectory.digests, decode_steps(message.trajectory.payload)) == ([], [])
    assert not fake.images


async def test_leases_are_renewed_while_all_slots_are_busy(fake: FakeRun, config: RunConfig) -> None:
    """At least every third of the lease; a revoked attempt is abandoned and its slot used again."""
    fake.todo = assignments(2)
    fake.generate_s = 4.0
    async with fake.worker(config):
        await fake.until(lambda: sum(len(m.running) == 2 for _, m in fake.polls) >= 3)
        busy = [when for when, m in fake.polls if len(m.running) == 2]
        assert max(b - a for a, b in pairwise(busy)) < config.replay.lease_s / 3 + 0.5
        fake.revoke = {(0, 0, 0)}
        await fake.until(lambda: fake.polls[-1][1].running == [(0, 1, 0)])
        await fake.until(lambda: (0, 1, 0) in fake.results)
        assert (0, 0, 0) not in fake.results


async def test_a_killed_browser_costs_its_episodes_and_not_the_worker(fake: FakeRun, config: RunConfig) -> None:
    """They are reported as faults; the next ones run in a new browser."""
    fake.replies = {"Click the button": await solution(config)}
    fake.todo = assignments(2)
    fake.generate_s = 2.0
    async with fake.worker(config):
        await fake.until(lambda: fake.generating == 2)
        for process in _browsers():
            os.kill(process.pid, signal.SIGKILL)
        await fake.until(lambda: len(fake.results) == 2)
        assert {m.trajectory.outcome for [m] in fake.results.values()} == {Outcome.FAULT}
        fake.results.clear()
        fake.generate_s = 0.0
        fake.todo = assignments(2)
        await fake.until(lambda: len(fake.results) == 2)
    assert {m.trajectory.outcome for [m] in fake.results.values()} == {Outcome.SUCCESS}


def _browsers() -> list[psutil.Process]:
    return [p for p in processes_below() if "--headless" in p.cmdline()]


async def test_without_a_coordinator_the_worker_waits_and_can_be_cancelled(tmp_path: Path, config: RunConfig) -> None:
    worker = BrowserWorker(
        config,
        run_id="run",
        name="w",
        coordinator_address=f"ipc://{tmp_path}/nobody",
        store_address=f"ipc://{tmp_path}/nobody",
    )
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(1.0)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 10)


async def test_no_chromium_is_said_at_once(tmp_path: Path, config: RunConfig) -> None:
    lost = config.model_copy(update={"browser": config.browser.model_copy(update={"executable": tmp_path / "none"})})
    worker = BrowserWorker(lost, run_id="run", name="w", coordinator_address="ipc:///x", store_address="ipc:///x")
    with pytest.raises(UserError, match=r"browser\.executable"):
        await worker.run()
