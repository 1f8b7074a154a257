"""Scripted episodes inside the real browser worker: no browser, no engine, some milliseconds each."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from megatron_webrl.agent import worker
from megatron_webrl.agent.episode import EpisodeResult
from megatron_webrl.config import RunConfig
from megatron_webrl.trajectory import (
    FLOAT32,
    INT32,
    Assignment,
    ImageRef,
    Outcome,
    Step,
    Trajectory,
    encode_steps,
    image_digest,
    pack,
)
from megatron_webrl.wire import WireError
from megatron_webrl.wire.messages import Engines, ListEngines


class _NoProcessor:
    """Stands in for the processor, which scripted episodes do not need."""

    def banned_ids(self) -> list[int]:
        return []

    stop_ids = banned_ids


class _NoEnvironment:
    """Stands in for the browser."""

    judge = None

    def __init__(self, *_: Any) -> None:
        pass

    def episode(self, task: Any) -> None:
        return None

    async def close(self) -> None:
        pass


def scripted_worker(config: RunConfig, *, seed: int, **arguments: Any) -> worker.BrowserWorker:
    """A real worker whose episodes are scripted.  seed: of their lengths, outcomes and screenshots."""
    hand = random.Random(f"{seed}/{time.time_ns()}")
    worker.find_chromium = lambda executable: None  # type: ignore[assignment]
    worker.make_environment = _NoEnvironment  # type: ignore[assignment]
    worker.Processor.load = staticmethod(lambda *_: _NoProcessor())  # type: ignore[method-assign,assignment]
    role = worker.BrowserWorker(config, **arguments)

    async def episode(assignment: Assignment, *_: Any, **__: Any) -> EpisodeResult:
        return await _episode(role, hand, assignment)

    worker.run_episode = episode  # type: ignore[assignment]
    return role


async def _version(role: worker.BrowserWorker) -> int:
    """Of the weights that would sample the next step."""
    while True:
        try:
            hosts = (await role._coordinator.request(ListEngines(), timeout=2.0, expect=Engines)).hosts
        except WireError:
            await asyncio.sleep(0.1)
            continue
        if hosts and hosts[0].version >= 0:
            return hosts[0].version
        await asyncio.sleep(0.05)


async def _episode(role: worker.BrowserWorker, hand: random.Random, assignment: Assignment) -> EpisodeResult:
    began, steps, images, versions = time.time(), [], {}, []
    for _ in range(hand.randint(1, 6)):
        version = await _version(role)
        versions.append(version)
        data = b"page %d" % hand.randint(0, 200) + bytes(2000)
        images[image_digest(data)] = data
        tokens = hand.randint(1, 300)
        steps.append(
            Step(
                prompt_ids=pack([1, 2], INT32),
                images=[ImageRef(image_digest(data), 1, 1, (1, 2, 2))],
                response_ids=pack(range(tokens), INT32),
                logprobs=pack([-1.0] * tokens, FLOAT32),
                versions=pack([version] * tokens, INT32),
                finish_reason="stop",
                text="",
                action=None,
            )
        )
        await asyncio.sleep(hand.expovariate(20))
    outcome = Outcome.FAULT if hand.random() < 0.02 else Outcome.SUCCESS if hand.random() < 0.5 else Outcome.FAILURE
    trajectory = Trajectory(
        assignment, outcome, "scripted", float(outcome is Outcome.SUCCESS), len(steps), 1, 1, min(versions), max(versions),
        list(images), role.name, began, time.time(), encode_steps(steps),
    )  # fmt: skip
    return EpisodeResult(trajectory, images)
