import asyncio
import io
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import pytest
from below import processes_below
from PIL import Image

from megatron_webrl.agent import EpisodeResult, Generate, ScriptedPolicy, format_call, run_episode
from megatron_webrl.config import RunConfig
from megatron_webrl.engine import EngineUnreachable
from megatron_webrl.processor import Processor
from megatron_webrl.tasks import Acted, MiniWob, Observation
from megatron_webrl.trajectory import INT32, Assignment, Lane, Outcome, Task, decode_steps, image_digest, unpack
from megatron_webrl.wire.messages import Generated

pytestmark = pytest.mark.asyncio(loop_scope="module")

MISS = format_call({"action": "left_click", "coordinate": [1, 999]})


def assignment(name: str, *, seed: int = 0, horizon: int = 3, deadline_s: float = 60) -> Assignment:
    task = Task(f"miniwob/{name}/{seed}", "miniwob", name, seed, horizon)
    return Assignment(task, 7, 2, 0, Lane.TRAIN, 11, 1.0, deadline_s)


async def oracle(miniwob: MiniWob, name: str) -> list[str]:
    """The replies that solve seed 0."""
    episode = miniwob.episode(assignment(name).task)
    await episode.reset()
    replies = [format_call(action) for action in await episode.oracle()]
    await episode.close()
    return replies


async def run(
    miniwob: MiniWob, processor: Processor, config: RunConfig, generate: Generate, name: str, **how: Any
) -> EpisodeResult:
    one = assignment(name, **how)
    return await run_episode(one, miniwob.episode(one.task), generate, processor, config, worker="w")


async def test_a_multi_step_episode_types_and_submits(
    miniwob: MiniWob, processor: Processor, config: RunConfig
) -> None:
    """Two steps, reward from the page; every step is a row of its own with what was sampled and seen."""
    policy = ScriptedPolicy(processor, await oracle(miniwob, "enter-text"))
    trajectory, images = await run(miniwob, processor, config, policy, "enter-text")
    assert (trajectory.outcome, trajectory.reason, trajectory.reward) == (Outcome.SUCCESS, "solved", 1.0)
    steps = decode_steps(trajectory.payload)
    assert [s.action["action"] for s in steps if s.action] == ["type", "left_click"]
    assert trajectory.num_steps == 2
    assert trajectory.digests == list(images) == [s.images[0].digest for s in steps]
    assert all(image_digest(data) == digest for digest, data in images.items())
    assert trajectory.response_tokens == sum(len(unpack(s.response_ids, INT32)) for s in steps)
    prompts = [processor.expand(unpack(s.prompt_ids, INT32), [i.grid for i in s.images]) for s in steps]
    assert trajectory.tokens == trajectory.response_tokens + sum(map(len, prompts))
    for step in steps:
        ids = unpack(step.prompt_ids, INT32)
        assert (ids == processor.image_token_id).sum() == 1
        assert step.images[0].grid == processor.grid(160, 210)
        assert unpack(step.response_ids, INT32)[-1] == processor.end_token_id
        assert step.text == format_call(step.action or {})
        assert step.title == "Enter Text Task"
        assert step.url.endswith("enter-text.html")
        assert step.changed
        assert step.error == ""
    assert "Earlier steps" not in policy.prompts[0]
    assert "Step 1: on 'Enter Text Task', type" in policy.prompts[1]


@pytest.mark.parametrize(
    ("replies", "reason", "steps"),
    [
        ([MISS, MISS, MISS], "horizon", 3),
        (["nonsense", MISS, "nonsense"], "horizon", 3),
        (["nonsense", "", "again"], "malformed", 3),
        ([format_call({"action": "answer", "text": "done"})], "answered", 1),
    ],
)
async def test_what_the_policy_brings_about_is_failure_and_trains(
    miniwob: MiniWob, processor: Processor, config: RunConfig, replies: list[str], reason: str, steps: int
) -> None:
    """A malformed reply is a step, the agent is told, and the episode goes on to the horizon."""
    policy = ScriptedPolicy(processor, replies)
    trajectory, images = await run(miniwob, processor, config, policy, "click-test")
    assert (trajectory.outcome, trajectory.reason, trajectory.reward) == (Outcome.FAILURE, reason, 0.0)
    rows = decode_steps(trajectory.payload)
    assert trajectory.num_steps == len(rows) == steps
    assert images
    assert [bool(row.error) for row in rows] == [row.action is None for row in rows]
    if replies[0] == "nonsense":
        assert "Step 1: malformed reply: write exactly one" in policy.prompts[1]


async def test_malformed_replies_in_a_row_end_the_episode(
    miniwob: MiniWob, processor: Processor, config: RunConfig
) -> None:
    """agent.max_malformed of them; a good one begins the count anew."""
    agent = config.agent.model_copy(update={"max_malformed": 2})
    policy = ScriptedPolicy(processor, ["a", MISS, "b", "c", MISS])
    trajectory, _ = await run(
        miniwob, processor, config.model_copy(update={"agent": agent}), policy, "click-test", horizon=9
    )
    assert (trajectory.outcome, trajectory.reason, trajectory.num_steps) == (Outcome.FAILURE, "malformed", 4)


async def test_what_a_reply_remembers_is_in_the_next_prompt(
    miniwob: MiniWob, processor: Processor, config: RunConfig
) -> None:
    """The newest Memory and Progress that were JSON; a thought is nowhere."""
    agent = config.agent.model_copy(update={"prompt": "additive_memory", "max_prompt_tokens": 10_000, "thinking": True})
    replies = [
        f'secret thought</think>Memory: {{"a": 1}}\nProgress: {{"b": 2}}\n{MISS}',
        f"x</think>Memory: broken\n{MISS}",
        f'x</think>Memory: {{"c": 3}}\n{MISS}',
        MISS,
    ]
    policy = ScriptedPolicy(processor, replies)
    await run(miniwob, processor, config.model_copy(update={"agent": agent}), policy, "click-test", horizon=4)
    told = [prompt.split("<|im_start|>user")[1] for prompt in policy.prompts]
    assert "Memory" not in told[0]
    assert all('Memory: {"a": 1}\nProgress: {"b": 2}\n' in prompt for prompt in told[1:3])
    assert 'Memory: {"c": 3}\nProgress: {"b": 2}\n' in told[3]
    assert not any("thought" in prompt for prompt in told)


async def test_a_reply_that_was_cut_is_malformed(miniwob: MiniWob, processor: Processor, config: RunConfig) -> None:
    """Even if what is there reads well: the policy did not end it."""
    scripted = ScriptedPolicy(processor, await oracle(miniwob, "click-test"))

    async def cut(prompt_ids: Sequence[int], images: dict[str, bytes], **options: Any) -> Generated:
        reply = await scripted(prompt_ids, images, **options)
        reply.finish_reason = "length"
        return reply

    trajectory, _ = await run(miniwob, processor, config, cut, "click-test", horizon=1)
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILURE, "malformed")


async def test_two_screenshots_in_the_window(miniwob: MiniWob, processor: Processor, config: RunConfig) -> None:
    """One image_pad an image, also when the page did not change and both are the same."""
    seen = []

    class Watching(ScriptedPolicy):
        async def __call__(self, prompt_ids: Sequence[int], images: dict[str, bytes], **options: Any) -> Generated:
            seen.append((list(prompt_ids).count(processor.image_token_id), options["digests"], set(images)))
            return await super().__call__(prompt_ids, images, **options)

    two = config.model_copy(update={"agent": config.agent.model_copy(update={"history_window": 2})})
    await run(miniwob, processor, two, Watching(processor, [MISS, "nonsense", MISS]), "click-test")
    assert [pads for pads, *_ in seen] == [1, 2, 2]
    assert all(len(digests) == pads and set(digests) == images for pads, digests, images in seen)


async def test_the_assignment_says_how_replies_are_sampled(processor: Processor, config: RunConfig) -> None:
    """Temperature, top_p and top_k: those of its lane; its requests are named by its key, so that one engine serves them."""
    asked: list[dict[str, Any]] = []

    class Watching(ScriptedPolicy):
        async def __call__(self, prompt_ids: Sequence[int], images: dict[str, bytes], **options: Any) -> Generated:
            asked.append(options)
            return await super().__call__(prompt_ids, images, **options)

    train = assignment("click-test")
    evaluation = msgspec.structs.replace(train, lane=Lane.EVAL, temperature=0.6, top_p=0.9, top_k=20)
    for one in (train, evaluation):
        await run_episode(one, FakeEpisode(blank()), Watching(processor, [MISS]), processor, config)
    assert [(o["temperature"], o["top_p"], o["top_k"]) for o in asked] == [(1.0, 1.0, 0), (0.6, 0.9, 20)]
    assert {o["affinity"] for o in asked} == {train.key}


async def test_a_prompt_too_long_ends_before_the_call(
    miniwob: MiniWob, processor: Processor, config: RunConfig
) -> None:
    """Images expanded; the policy is not asked."""
    tight = config.model_copy(update={"agent": config.agent.model_copy(update={"max_prompt_tokens": 40})})
    policy = ScriptedPolicy(processor, [])
    trajectory, _ = await run(miniwob, processor, tight, policy, "click-test")
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILURE, "context_overflow")
    assert (trajectory.num_steps, trajectory.min_version, policy.prompts) == (0, -1, [])


def blank() -> bytes:
    """A screenshot of nothing."""
    png = io.BytesIO()
    Image.new("RGB", (160, 210)).save(png, "PNG")
    return png.getvalue()


class FakeEpisode:
    """A page that costs no time and is solved by any action."""

    def __init__(self, screenshot: bytes) -> None:
        self._observation = Observation("Do it.", screenshot, "fake:", "Fake")

    async def reset(self) -> Observation:
        return self._observation

    async def observe(self) -> Observation:
        return self._observation

    async def act(self, action: dict[str, Any]) -> Acted:
        return Acted("", True, 1.0)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("waited", "reason"), [(False, "deadline"), (True, "solved")])
async def test_only_the_episode_s_own_time_counts(
    processor: Processor, config: RunConfig, waited: bool, reason: str
) -> None:
    """Seconds that a request waited for an engine are not counted against the deadline; sampling is."""
    scripted = ScriptedPolicy(processor, [MISS])

    async def slow(prompt_ids: Sequence[int], images: dict[str, bytes], **options: Any) -> Generated:
        reply = await scripted(prompt_ids, images, **options)
        await asyncio.sleep(0.6)
        reply.waited_s = 0.6 if waited else 0.0
        return reply

    one = assignment("click-test", deadline_s=0.5)
    trajectory, _ = await run_episode(one, FakeEpisode(blank()), slow, processor, config)
    assert trajectory.reason == reason
    assert decode_steps(trajectory.payload)[0].generate_s >= 0.6


async def test_an_unreachable_engine_is_a_fault(miniwob: MiniWob, processor: Processor, config: RunConfig) -> None:
    """It carries no steps and no screenshots: the attempt is issued again."""

    async def nobody(*_: Any, **__: Any) -> Generated:
        raise EngineUnreachable("nobody there")

    trajectory, images = await run(miniwob, processor, config, nobody, "click-test")
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAULT, "engine_unreachable")
    assert decode_steps(trajectory.payload) == []
    assert (trajectory.digests, images) == ([], {})


async def test_a_killed_browser_is_a_fault_and_the_next_episode_works(
    miniwob: MiniWob, processor: Processor, config: RunConfig
) -> None:
    """Killed while the policy thinks."""
    replies = await oracle(miniwob, "click-test")
    scripted = ScriptedPolicy(processor, replies)

    async def killer(prompt_ids: Sequence[int], images: dict[str, bytes], **options: Any) -> Generated:
        for process in processes_below():
            with suppress(psutil.ZombieProcess):  # one that its parent has ended meanwhile
                if "--headless" in process.cmdline():
                    os.kill(process.pid, signal.SIGKILL)
        return await scripted(prompt_ids, images, **options)

    trajectory, _ = await run(miniwob, processor, config, killer, "click-test")
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAULT, "browser_crash")
    trajectory, _ = await run(miniwob, processor, config, ScriptedPolicy(processor, replies), "click-test")
    assert trajectory.outcome is Outcome.SUCCESS


async def test_a_hung_page_is_the_environment_s_doing(
    miniwob: MiniWob, processor: Processor, config: RunConfig
) -> None:
    """It drops the group and is never issued again as a fault."""
    one = assignment("click-test")
    episode = miniwob.episode(one.task)
    scripted = ScriptedPolicy(processor, [MISS])

    async def hang(prompt_ids: Sequence[int], images: dict[str, bytes], **options: Any) -> Generated:
        episode.page.timeout_s = 1.0
        await episode.page.evaluate("() => { setTimeout(() => { for (;;) {} }, 0); }")
        return await scripted(prompt_ids, images, **options)

    trajectory, _ = await run_episode(one, episode, hang, processor, config)
    assert (trajectory.outcome, trajectory.reason) == (Outcome.ENVIRONMENT, "page_timeout")
