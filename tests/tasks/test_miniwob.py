import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image

from megatron_webrl.browser import PageError, from_pixels
from megatron_webrl.config import validate
from megatron_webrl.tasks import Acted, MiniWob, MiniWobEpisode
from megatron_webrl.tasks.miniwob import ORACLES
from megatron_webrl.trajectory import Task

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEMO_TASKS = ("click-test", "click-dialog", "focus-text", "focus-text-2", "click-dialog-2")
RUN = validate(
    {
        "model": {"path": "unused"},
        "tasks": {"names": ["click-test"]},
        "browser": {"slots": 2, "viewport": [500, 320], "screenshot": [160, 210]},
    },
    "test",
)
CONFIG = RUN.browser


def miniwob_task(name: str, seed: int) -> Task:
    return Task(f"miniwob/{name}/{seed}", "miniwob", name, seed, 5)


def click(x: int, y: int) -> dict[str, Any]:
    return {"action": "left_click", "coordinate": from_pixels((x, y), CONFIG.view)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def miniwob() -> AsyncIterator[MiniWob]:
    environment = MiniWob(RUN)
    yield environment
    await environment.close()


@pytest.mark.parametrize("name", sorted(ORACLES))
async def test_a_reset_in_a_used_page_shows_what_a_fresh_page_shows(miniwob: MiniWob, name: str) -> None:
    """To the byte, for every task whose pages are reused, after clicks anywhere: hits, misses and wrong buttons."""
    used = {}
    page = None
    for seed in range(6):
        episode = miniwob.episode(miniwob_task(name, seed))
        used[seed] = await episode.reset()
        assert page is None or episode.page is page, "the page was not reused"
        page = episode.page
        done = False
        for spot in ((30 + seed * 37 % 120, 60 + seed * 53 % 140), (80, 100), (155, 205)):
            if not done:
                done = (await episode.act(click(*spot))).done
        await episode.close()
    for seed, observation in used.items():
        episode = miniwob.episode(miniwob_task(name, seed))
        await miniwob.episode(miniwob_task(name, 0)).close()
        fresh = await _in_fresh_page(miniwob, episode)
        assert fresh == observation, f"seed {seed}"


async def _in_fresh_page(miniwob: MiniWob, episode: MiniWobEpisode) -> Any:
    miniwob._pool._free, kept = [], miniwob._pool._free
    observation = await episode.reset()
    await episode.act({"action": "key", "keys": ["a"]})  # so that its page is closed, not kept
    await episode.close()
    miniwob._pool._free = kept
    return observation


async def test_reward_and_time_are_hidden_from_the_agent(miniwob: MiniWob) -> None:
    """Before and after an episode ended, also in a viewport that would show them."""
    episode = miniwob.episode(miniwob_task("click-test", 1))
    await episode.reset()
    visible = "() => getComputedStyle(document.querySelector('#reward-display')).display"
    assert await episode.page.evaluate(visible) == "none"
    for action in await episode.oracle():
        assert (await episode.act(action)).reward == 1
    assert await episode.page.evaluate(visible) == "none"
    assert await episode.page.evaluate("() => core.EPISODE_MAX_TIME") >= 3600e3
    await episode.close()


@pytest.mark.parametrize("name", sorted(ORACLES))
async def test_every_script_solves_its_task(miniwob: MiniWob, name: str) -> None:
    """Reward 1 from the page, done with the last action and not before; the view is 160×210."""
    for seed in (0, 1, 2, 3, 500_000):
        episode = miniwob.episode(miniwob_task(name, seed))
        observation = await episode.reset()
        assert Image.open(io.BytesIO(observation.screenshot)).size == (160, 210)
        assert observation.utterance
        assert observation.url.endswith(f"/{name}.html")
        results = [await episode.act(action) for action in await episode.oracle()]
        await episode.close()
        assert [r.done for r in results] == [False] * (len(results) - 1) + [True]
        assert results[-1].reward == 1


async def test_the_page_is_the_seed_s(miniwob: MiniWob) -> None:
    """Same seed, same page; another seed, another page."""
    seen = []
    for seed in (5, 5, 6):
        episode = miniwob.episode(miniwob_task("click-test", seed))
        seen.append((await episode.reset()).screenshot)
        await episode.close()
    assert seen[0] == seen[1] != seen[2]


async def test_a_wrong_click_ends_without_reward_and_a_miss_does_not_end(miniwob: MiniWob) -> None:
    episode = miniwob.episode(miniwob_task("click-test-2", 0))
    await episode.reset()
    assert await episode.act(click(1, 209)) == Acted("", False, 0)
    x, y = await episode.page.evaluate(
        "() => { const b = document.querySelector('#subbtn2').getBoundingClientRect(); return [b.x + 5, b.y + 5]; }"
    )
    assert await episode.act(click(x, y)) == Acted("", True, 0)
    await episode.close()


@pytest.mark.parametrize(("button", "reward"), [("#subbtn", 1), ("#subbtn2", 0)])
async def test_a_double_click_ends_the_episode_once(miniwob: MiniWob, button: str, reward: int) -> None:
    """Its second half must not begin another episode on the page's cover: what was won stays won, what was lost lost."""
    episode = miniwob.episode(miniwob_task("click-test-2", 0))
    await episode.reset()
    where = "(b) => { const r = document.querySelector(b).getBoundingClientRect(); return [r.x + 5, r.y + 5]; }"
    x, y = await episode.page.evaluate(where, button)
    acted = await episode.act({**click(x, y), "action": "double_click"})
    assert (acted.error, acted.done, acted.reward > 0) == ("", True, reward > 0)
    assert (await episode.act(click(80, 100))).done
    await episode.close()


@pytest.mark.parametrize("name", ["email-inbox-nl-turk", "email-inbox-forward-nl", "click-option"])
async def test_tasks_whose_text_comes_with_fields_are_told_as_text(miniwob: MiniWob, name: str) -> None:
    episode = miniwob.episode(miniwob_task(name, 1))
    assert len((await episode.reset()).utterance) > 10
    await episode.close()


async def test_leaving_the_page_earns_nothing(miniwob: MiniWob) -> None:
    """Only the document of this reset counts: not a reloaded page, not another task's; and files stay unread."""
    episode = miniwob.episode(miniwob_task("click-test", 0))
    url = (await episode.reset()).url
    refused = await episode.act({"action": "navigate", "url": "file:///etc/passwd"})
    assert "not allowed" in refused.error
    assert await episode.act({"action": "navigate", "url": url}) == Acted("", False, 0)
    await episode.page.evaluate("() => { core.startEpisodeReal(); core.endEpisode(1, false); }")
    assert await episode.act({"action": "wait", "time": 0}) == Acted("", False, 0)
    await episode.close()


async def test_a_script_error_of_the_page_is_its_own_kind(miniwob: MiniWob) -> None:
    episode = miniwob.episode(miniwob_task("click-test", 0))
    await episode.reset()
    with pytest.raises(PageError, match="boom"):
        await episode.page.evaluate("() => { throw new Error('boom'); }")
    await episode.close()
