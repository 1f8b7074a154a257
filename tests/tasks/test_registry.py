import sys
from pathlib import Path

import pytest

from megatron_webrl.config import validate
from megatron_webrl.errors import UserError
from megatron_webrl.tasks import check_environment, held_out_tasks, make_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "environment"


def config(environment: str, **tasks: object):
    sections = {
        "model": {"path": "unused"},
        "browser": {"slots": 1, "viewport": [160, 210], "settle_quiet_s": 0},
        "evaluation": {"episodes": 6},
    }
    return validate({**sections, "tasks": {"environment": environment, "names": ["up", "down"], **tasks}}, "test")


@pytest.mark.parametrize("name", ["minibob", "no.such:Class", "json:Nothing", "json", ":", "..:x"])
def test_an_unknown_environment_is_named_with_the_remedy(name: str) -> None:
    with pytest.raises(UserError, match=r"tasks\.environment=.*module:Class"):
        check_environment(config(name))


async def test_the_example_of_an_environment_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In under 50 lines: both tasks are solved by clicking, and lost by clicking on and on."""
    assert len((EXAMPLE / "counter.py").read_text().splitlines()) < 50
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    settings = config("counter:Counter")
    check_environment(settings)
    environment = make_environment(settings)
    plus, minus = ({"action": "left_click", "coordinate": [x, 400]} for x in (250, 690))
    try:
        for task in held_out_tasks(settings.tasks, 6):
            for button, reward in ((plus, task.name == "up"), (minus, task.name == "down")):
                episode = environment.episode(task)
                seen = await episode.reset()
                assert seen.utterance.startswith(f"Count {task.name}")
                for _ in range(14):
                    acted = await episode.act(button)
                    if acted.done:
                        break
                await episode.close()
                assert (acted.done, acted.reward) == (True, float(reward))
    finally:
        await environment.close()
