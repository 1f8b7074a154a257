from pathlib import Path

import pytest
from below import processes_below

from megatron_webrl.agent import (
    collect_samples,
    demonstrate,
    load_demonstrations,
    save_demonstrations,
    tokenizer_texts,
)
from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.processor import Processor
from megatron_webrl.tasks import demonstration_tasks
from megatron_webrl.trajectory import Outcome, Task, decode_steps


@pytest.mark.parametrize(("encoding", "suffix"), [("png", "png"), ("jpeg", "jpg")])
async def test_demonstrations_are_recorded_saved_and_read_back(
    config: RunConfig, processor: Processor, tmp_path: Path, encoding: str, suffix: str
) -> None:
    """Scripts go through the agent's own path; only what the page rewarded is kept; coordinates are coarse."""
    browser = config.browser.model_copy(update={"screenshot_format": encoding})
    config = config.model_copy(update={"browser": browser})
    progress: list[tuple[int, int]] = []
    tasks = demonstration_tasks(config.tasks)
    trajectories, images = await demonstrate(config, processor, tasks, lambda *done: progress.append(done))
    assert progress == [(i, 4) for i in range(1, 5)]
    assert {t.outcome for t in trajectories} == {Outcome.SUCCESS}
    assert [t.assignment.task for t in trajectories] == [
        t for t in tasks if t in {x.assignment.task for x in trajectories}
    ]
    assert len(trajectories) >= 3
    for trajectory in trajectories:
        for step in decode_steps(trajectory.payload):
            assert step.action
            assert all(c % 20 == 0 and c < 1000 for c in step.action["coordinate"])
    save_demonstrations(tmp_path, trajectories, images)
    assert load_demonstrations(tmp_path) == (trajectories, images)
    next((tmp_path / "images").glob(f"*.{suffix}")).unlink()
    with pytest.raises(UserError, match="record them again"):
        load_demonstrations(tmp_path)
    assert processes_below() == []


async def test_tokenizer_texts_need_no_model(config: RunConfig) -> None:
    """Prompts and replies of every step, utterances included, before any tokenizer exists."""
    samples = await collect_samples(config, demonstration_tasks(config.tasks))
    texts = tokenizer_texts(config, samples)
    assert len(samples) == 4
    assert len(texts) == 2 * (2 * 1 + 2 * 2)
    assert any("Click the button." in text for text in texts)
    assert any('"action": "type"' in text and text.startswith("<tool_call>") for text in texts)
    assert any("Step 1: on" in text for text in texts)


async def test_a_task_without_a_script_is_refused(config: RunConfig, processor: Processor) -> None:
    with pytest.raises(UserError, match="tic-tac-toe"):
        await demonstrate(config, processor, [Task("x", "miniwob", "tic-tac-toe", 0, 3)])
