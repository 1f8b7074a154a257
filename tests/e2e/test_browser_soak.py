"""Thousands of short episodes on four slots while browsers, renderers and drivers are killed at random."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import statistics
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from below import processes_below

from megatron_webrl.agent import ScriptedPolicy, format_call, run_episode
from megatron_webrl.config import validate
from megatron_webrl.processor import Processor
from megatron_webrl.tasks import MiniWob
from megatron_webrl.trajectory import Assignment, Lane, Outcome, Task

SLOTS = 4
NAMES = ("click-checkboxes", "click-link", "enter-password", "click-test")
KILL_S = (0.5, 4.0)
"""Between two kills."""


def held(processes: list[psutil.Process]) -> int:
    """PSS, bytes."""
    total = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


def victims() -> dict[str, list[psutil.Process]]:
    """What can be killed now, by kind."""
    kinds: dict[str, list[psutil.Process]] = {"browser": [], "renderer": [], "driver": []}
    for process in processes_below():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if "--type=renderer" in line:
            kinds["renderer"].append(process)
        elif "--headless" in line and not any(word.startswith("--type=") for word in line):
            kinds["browser"].append(process)
        elif any("playwright" in word and "driver" in word for word in line):
            kinds["driver"].append(process)
    return kinds


async def soak(model: Path, episodes: int, seed: int) -> None:
    config = validate(
        {
            "model": {"path": model},
            "tasks": {"names": list(NAMES)},
            "agent": {"prompt": "short"},
            "browser": {
                "slots": SLOTS, "viewport": [500, 320], "screenshot": [160, 210], "settle_quiet_s": 0, "recycle_episodes": 150,
                "action_timeout_s": 10,
            },
        },
        "soak",
    )  # fmt: skip
    processor = Processor.load(model)
    environment = MiniWob(config)
    hand = random.Random(seed)
    left = iter(range(episodes))
    outcomes: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    memory: list[tuple[int, int, int]] = []
    """(episodes ended, PSS of this process and all below it, its file descriptors)."""
    replies = [format_call({"action": "left_click", "coordinate": [n * 90 % 1000, n * 210 % 1000]}) for n in range(3)]

    async def slot() -> None:
        for number in left:
            name = NAMES[number % len(NAMES)]
            task = Task(f"miniwob/{name}/{number}", "miniwob", name, number, 3)
            assignment = Assignment(task, number, 0, 0, Lane.TRAIN, number, 1.0, 60.0)
            policy = ScriptedPolicy(processor, replies)
            result = await run_episode(assignment, environment.episode(task), policy, processor, config)
            outcomes[result.trajectory.outcome] += 1
            ended = outcomes.total()
            if ended % max(1, episodes // 40) == 0:
                me = psutil.Process()
                memory.append((ended, held([me, *processes_below()]), me.num_fds()))

    async def killer() -> None:
        while True:
            await asyncio.sleep(hand.uniform(*KILL_S))
            kind = hand.choice(("browser", "renderer", "renderer", "driver"))
            if found := (await asyncio.to_thread(victims))[kind]:
                try:
                    os.kill(hand.choice(found).pid, signal.SIGKILL)
                    kills[kind] += 1
                except ProcessLookupError:
                    pass

    killing = asyncio.create_task(killer())
    began = time.monotonic()
    try:
        async with asyncio.timeout(episodes * 3):
            await asyncio.gather(*(slot() for _ in range(SLOTS)))
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        await environment.close()
    gc.collect()
    seconds = time.monotonic() - began
    print(f"seed {seed}: {episodes} episodes in {seconds:.0f} s; {dict(outcomes)}; kills {dict(kills)}")
    quarter = len(memory) // 4
    pss = [statistics.median(m[1] for m in memory[i * quarter : (i + 1) * quarter]) / 2**20 for i in range(4)]
    fds = [statistics.median(m[2] for m in memory[i * quarter : (i + 1) * quarter]) for i in range(4)]
    print(f"PSS of all, MB, by quarter: {[round(v) for v in pss]}; file descriptors: {fds}")
    assert outcomes.total() == episodes, "every episode has an outcome"
    assert outcomes[Outcome.SUCCESS] + outcomes[Outcome.FAILURE] > episodes * 0.6
    assert outcomes[Outcome.FAULT] <= SLOTS * 2 * kills.total(), "what was not hit went on"
    assert kills.total() > 0
    assert processes_below() == [], "somebody was left behind"
    if episodes >= 1000:
        assert pss[3] <= 1.15 * pss[1], "memory grows"
        assert fds[3] <= fds[1] + 20, "descriptors leak"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_thousand_episodes_under_kills(tiny_model_dir: Path) -> None:
    """MWEBRL_SOAK_SEED sets the dice."""
    asyncio.run(soak(tiny_model_dir, 2000, int(os.environ.get("MWEBRL_SOAK_SEED", "0"))))


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_slice_of_it(tiny_model_dir: Path) -> None:
    asyncio.run(soak(tiny_model_dir, 120, 1))
