"""An episode that ends with an answer gives its page back, then it is judged: no slot waits for a judge."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from judged_environment import Judged

from megatron_webrl.agent import EpisodeResult, ScriptedPolicy, format_call, run_episode
from megatron_webrl.config import RunConfig, validate
from megatron_webrl.processor import Processor
from megatron_webrl.trajectory import Assignment, JudgeCost, Lane, Outcome, Task, decode_steps

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def judged_config(tiny_model_dir: Path) -> RunConfig:
    return validate(
        {
            "model": {"path": tiny_model_dir},
            "tasks": {"environment": "judged_environment:Judged", "names": ["word"], "horizons": {1: 3}},
            "agent": {"prompt": "short"},
            "browser": {"slots": 1, "viewport": [160, 210], "settle_quiet_s": 0},
        },
        "test",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judged(judged_config: RunConfig) -> AsyncIterator[Judged]:
    environment = Judged(judged_config)
    yield environment
    await environment.close()


async def run(judged: Judged, config: RunConfig, *actions: dict[str, object]) -> tuple[EpisodeResult, list[str]]:
    """Result, and what happened in which order."""
    processor = Processor.load(config.model.path)
    order: list[str] = []
    task = Task("judged/word/0", "judged", "word", 0, 3)
    episode = judged.episode(task)
    close = episode.close

    async def closing() -> None:
        order.append("page given back")
        await close()

    episode.close = closing  # type: ignore[method-assign]
    judge = judged.judge
    assert judge is not None

    async def judging(evidence):  # type: ignore[no-untyped-def]
        order.append("judged")
        return await judge(evidence)

    result = await run_episode(
        Assignment(task, 0, 0, 0, Lane.TRAIN, 0, 1.0, 60.0), episode,
        ScriptedPolicy(processor, [format_call(action) for action in actions]), processor, config,
        judge=judging, released=lambda: order.append("slot free"),
    )  # fmt: skip
    return result, order


@pytest.mark.parametrize(
    ("answer", "outcome", "reason", "reward", "verdict"),
    [
        ("success", Outcome.SUCCESS, "solved", 1.0, "because"),
        ("failure", Outcome.FAILURE, "wrong", 0.0, "because"),
        ("blocked", Outcome.ENVIRONMENT, "blocked", 0.0, "because"),
        ("fault", Outcome.FAULT, "judge_fault", 0.0, "because"),
        ("error", Outcome.FAULT, "judge_fault", 0.0, ""),
    ],
)
async def test_a_verdict_becomes_an_outcome(
    judged: Judged, judged_config: RunConfig, answer: str, outcome: Outcome, reason: str, reward: float, verdict: str
) -> None:
    """What trains keeps its steps; a block, a fault and a judge with a defect are no failure of the policy."""
    click = {"action": "left_click", "coordinate": [500, 500]}
    (trajectory, images), order = await run(judged, judged_config, click, {"action": "answer", "text": answer})
    assert (trajectory.outcome, trajectory.reason, trajectory.reward) == (outcome, reason, reward)
    assert (trajectory.verdict, trajectory.num_steps) == (verdict, 2)
    assert trajectory.judge_cost == (JudgeCost(1, 2, 3, 0.5, 0.1) if verdict else None)
    trains = outcome in (Outcome.SUCCESS, Outcome.FAILURE)
    assert (len(decode_steps(trajectory.payload)), bool(images)) == (2 * trains, trains)
    assert order == ["page given back", "slot free", "judged"]


async def test_the_judge_sees_what_the_episode_left(judged: Judged, judged_config: RunConfig) -> None:
    """Answer, actions, a screenshot a step, and of the page what the task asks for; selectors that are none are not found."""
    click = {"action": "left_click", "coordinate": [500, 900]}
    await run(judged, judged_config, click, {"action": "answer", "text": "success"})
    evidence = Judged.seen[-1]
    assert (evidence.utterance, evidence.answer) == ("What is the word?", "success")
    assert [action["action"] for action in evidence.actions] == ["left_click", "answer"]
    assert len(evidence.screenshots) == 2
    assert (evidence.page.title, evidence.page.url[-10:]) == ("page", "/page.html")
    assert evidence.page.found == {"#word": "blue", "#none": None, "][": None, "input": "typed"}
    assert "blue text" in evidence.page.text


async def test_an_episode_without_an_answer_is_not_judged(judged: Judged, judged_config: RunConfig) -> None:
    click = {"action": "left_click", "coordinate": [500, 500]}
    result, order = await run(judged, judged_config, click, click, click)
    assert result.trajectory.reason == "horizon"
    assert order == ["page given back"]
