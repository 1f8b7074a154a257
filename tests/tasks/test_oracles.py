"""An independent check of the actions: MiniWoB++ tasks solved through the agent's own path, reward from the page.

`python tests/tasks/test_oracles.py` prints the table: task, actions, reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from miniwob_scripts import MOST_STEPS, SCRIPTS, next_action

from megatron_webrl.agent import ScriptedPolicy, format_call, run_episode
from megatron_webrl.browser import ACTIONS
from megatron_webrl.config import RunConfig, validate
from megatron_webrl.processor import Processor
from megatron_webrl.tasks import MiniWob, MiniWobEpisode, Observation, WebEnvironment, task_names
from megatron_webrl.trajectory import Assignment, Lane, Outcome, Task, Trajectory, decode_steps
from megatron_webrl.wire.messages import Generated

pytestmark = pytest.mark.asyncio(loop_scope="module")
ELSEWHERE = {"navigate", "go_back", "answer"}
"""Actions that no task of MiniWoB++ needs: tried on pages of ours."""


def run_config(model: Path) -> RunConfig:
    return validate(
        {
            "model": {"path": model},
            "tasks": {"names": list(SCRIPTS)},
            "browser": {"slots": 2, "viewport": [500, 320], "screenshot": [160, 210], "settle_quiet_s": 0.05},
            "agent": {"prompt": "short"},
        },
        "test",
    )


@pytest.fixture(scope="module")
def config(tiny_model_dir: Path) -> RunConfig:
    return run_config(tiny_model_dir)


@pytest.fixture(scope="module")
def processor(tiny_model_dir: Path) -> Processor:
    return Processor.load(tiny_model_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def miniwob(config: RunConfig) -> AsyncIterator[MiniWob]:
    environment = MiniWob(config)
    yield environment
    await environment.close()


class Scripted:
    """Episode and policy in one: each reply is the script's action for the page as it is, written as a model writes it."""

    def __init__(self, episode: MiniWobEpisode, processor: Processor) -> None:
        self._episode, self._processor, self._n = episode, processor, 0
        self.act, self.observe, self.close = episode.act, episode.observe, episode.close
        self.conclude = episode.conclude

    async def reset(self) -> Observation:
        return await self._episode.reset()

    async def generate(self, prompt_ids: Sequence[int], images: dict[str, bytes], **options: Any) -> Generated:
        action = await next_action(self._episode.page, self._episode.task.name, self._n)
        self._n += 1
        return await ScriptedPolicy(self._processor, [format_call(action)])(prompt_ids, images, **options)


async def solve(miniwob: MiniWob, processor: Processor, config: RunConfig, name: str, seed: int) -> Trajectory:
    task = Task(f"miniwob/{name}/{seed}", "miniwob", name, seed, MOST_STEPS)
    scripted = Scripted(miniwob.episode(task), processor)
    assignment = Assignment(task, 0, 0, 0, Lane.EVAL, 0, 1.0, 120.0)
    return (await run_episode(assignment, scripted, scripted.generate, processor, config)).trajectory


def actions_of(trajectory: Trajectory) -> list[str]:
    return [step.action["action"] if step.action else "malformed" for step in decode_steps(trajectory.payload)]


used: set[str] = set()
"""By the tasks that were solved."""


@pytest.mark.e2e
@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_task_is_solved_through_the_agents_own_actions(
    miniwob: MiniWob, processor: Processor, config: RunConfig, name: str
) -> None:
    """Reward 1 from the page, on a page of training and on one that is held out."""
    for seed in (1, 500_001):
        trajectory = await solve(miniwob, processor, config, name, seed)
        steps = [(step.action, step.error) for step in decode_steps(trajectory.payload)]
        assert (trajectory.outcome, trajectory.reward) == (Outcome.SUCCESS, 1.0), (trajectory.reason, steps)
        used.update(actions_of(trajectory))


@pytest.mark.e2e
async def test_every_action_was_needed_by_a_task() -> None:
    """After those above."""
    assert len(SCRIPTS) >= 25
    assert used == set(ACTIONS) - ELSEWHERE


class Pages(WebEnvironment):
    """Two pages; the second has the word."""

    utterance_text = "What is the word?"

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folders = (folder,)
        (folder / "one.html").write_text("<title>one</title>")
        (folder / "two.html").write_text("<title>two</title><b id=word>blue</b>")
        super().__init__(config)

    def start_url(self, task: Task) -> str:
        return (self.folders[0] / "one.html").as_uri()

    def utterance(self, task: Task) -> str:
        return self.utterance_text


async def test_navigate_go_back_and_answer(processor: Processor, config: RunConfig, tmp_path: Path) -> None:
    """On pages of ours: there, back, there again, and the answer ends the episode."""
    environment = Pages(config, tmp_path)
    there = {"action": "navigate", "url": (tmp_path / "two.html").as_uri()}
    actions = [there, {"action": "go_back"}, there, {"action": "answer", "text": "blue"}]
    policy = ScriptedPolicy(processor, [format_call(action) for action in actions])
    task = Task("pages/1", "pages", "pages", 0, 9)
    assignment = Assignment(task, 0, 0, 0, Lane.EVAL, 0, 1.0, 60.0)
    try:
        result = await run_episode(assignment, environment.episode(task), policy, processor, config)
    finally:
        await environment.close()
    assert result.trajectory.reason == "answered"
    assert [step.title for step in decode_steps(result.trajectory.payload)] == ["one", "two", "one", "two"]


@pytest.mark.e2e
@pytest.mark.timeout(600)
async def test_all_tasks_begin(config: RunConfig) -> None:
    """All of MiniWoB++: words and a screenshot, the same again for the same seed's page."""
    environment = MiniWob(config)
    try:
        for name in task_names():
            episode = environment.episode(Task(f"miniwob/{name}/7", "miniwob", name, 7, 5))
            seen = await episode.reset()
            await episode.close()
            assert len(seen.utterance) > 5, name
            assert len(seen.screenshot) > 200, name
    finally:
        await environment.close()
    assert len(task_names()) == 130


async def _table(model: Path) -> None:
    config, processor = run_config(model), Processor.load(model)
    environment = MiniWob(config)
    solved = 0
    print("| task | actions | reward |\n|---|---|---|")
    for name in SCRIPTS:
        trajectory = await solve(environment, processor, config, name, 1)
        solved += trajectory.reward > 0
        print(f"| {name} | {', '.join(dict.fromkeys(actions_of(trajectory)))} | {trajectory.reward:g} |", flush=True)
    print(f"\n{solved} of {len(SCRIPTS)} scripts solve their task; MiniWoB++ has {len(task_names())}")
    await environment.close()


if __name__ == "__main__":
    import sys

    asyncio.run(_table(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo/model")))
