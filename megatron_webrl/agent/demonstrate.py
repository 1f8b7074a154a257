"""Demonstrations: scripts that solve tasks, recorded through the path that the policy's own episodes take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_webrl.agent.episode import run_episode
from megatron_webrl.agent.prompt import PastStep, Told, build_prompt
from megatron_webrl.agent.reply import format_call
from megatron_webrl.agent.scripted import ScriptedPolicy
from megatron_webrl.browser import SCALE, BrowserFault, PageError, PageTimeout
from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.processor import Processor
from megatron_webrl.screenshots import image_file, write_image
from megatron_webrl.tasks import MiniWob, MiniWobEpisode, Observation, has_oracle
from megatron_webrl.trajectory import Assignment, Lane, Outcome, Task, Trajectory
from megatron_webrl.wire.messages import Generated

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""At one task, when faults strike."""
TRAJECTORIES_FILE = "demonstrations.msgpack"
IMAGES_FOLDER = "images"

Progress = Callable[[int, int], None]
"""Called with (tasks finished, tasks in all)."""


class Sample(NamedTuple):
    """A solved page in plain text."""

    utterance: str
    actions: list[dict[str, Any]]


async def collect_samples(
    config: RunConfig, tasks: Sequence[Task], on_progress: Progress | None = None
) -> list[Sample]:
    """What the scripts would do for each task, without acting: needs a browser, but no model and no tokenizer.
    Raises UserError for a task that has no script."""
    check_scripts(tasks)
    environment = MiniWob(config)

    async def sample(task: Task) -> Sample | None:
        for _ in range(ATTEMPTS):
            episode = environment.episode(task)
            try:
                utterance = await episode.prepare()
                return Sample(utterance, _coarse(await episode.oracle(), config.agent.coordinate_step))
            except PageError:
                return None
            except (BrowserFault, PageTimeout) as error:
                log.warning("%s: %s", task.task_id, error)
            finally:
                await episode.close()
        return None

    try:
        async with aclosing(_each(sample, tasks, config.browser.slots, on_progress)) as results:
            return [result async for result in results if result is not None]
    finally:
        await environment.close()


def tokenizer_texts(config: RunConfig, samples: Iterable[Sample]) -> list[str]:
    """Texts to train a small tokenizer on: the prompt and the reply of every step of `samples`."""
    texts = []
    for sample in samples:
        past: list[PastStep] = []
        for action in sample.actions:
            texts += [build_prompt(config.agent, Told(sample.utterance, past), 1), format_call(action)]
            past.append(PastStep("", action, True, ""))
    return texts


async def demonstrate(
    config: RunConfig, processor: Processor, tasks: Sequence[Task], on_progress: Progress | None = None
) -> tuple[list[Trajectory], dict[str, bytes]]:
    """Run the script of each task; trajectories of those that succeed, in the order of `tasks`, and their screenshots
    by digest.  Raises UserError for a task that has no script."""
    check_scripts(tasks)
    environment = MiniWob(config)

    async def run(numbered: tuple[int, Task]) -> tuple[Trajectory, dict[str, bytes]] | None:
        number, task = numbered
        for attempt in range(ATTEMPTS):
            assignment = Assignment(task, number, 0, attempt, Lane.TRAIN, 0, 1.0, config.agent.episode_deadline_s)
            episode = _Demonstration(environment.episode(task), processor, config.agent.coordinate_step)
            result = await run_episode(assignment, episode, episode.generate, processor, config, worker="oracle")
            if result.trajectory.outcome is Outcome.SUCCESS:
                return result
            if result.trajectory.outcome is Outcome.FAILURE:
                return None
        return None

    try:
        async with aclosing(_each(run, list(enumerate(tasks)), config.browser.slots, on_progress)) as results:
            solved = [result async for result in results if result is not None]
    finally:
        await environment.close()
    solved.sort(key=lambda result: result[0].assignment.group_id)
    return [t for t, _ in solved], {digest: data for _, images in solved for digest, data in images.items()}


def save_demonstrations(directory: Path, trajectories: Sequence[Trajectory], images: dict[str, bytes]) -> None:
    """Write demonstrations.msgpack and images/DIGEST.png (or .jpg)."""
    folder = directory / IMAGES_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for digest, data in images.items():
        write_image(folder, digest, data)
    (directory / TRAJECTORIES_FILE).write_bytes(msgspec.msgpack.encode(list(trajectories)))


def load_demonstrations(directory: Path) -> tuple[list[Trajectory], dict[str, bytes]]:
    """Read what `save_demonstrations` wrote.  Raises UserError if it is missing, malformed or incomplete."""
    try:
        trajectories = msgspec.msgpack.decode((directory / TRAJECTORIES_FILE).read_bytes(), type=list[Trajectory])
        digests = {d for t in trajectories for d in t.digests}
        return trajectories, {d: image_file(directory / IMAGES_FOLDER, d).read_bytes() for d in sorted(digests)}
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"demonstrations={directory}: {error}: record them again") from None


class _Demonstration:
    """An episode and the policy that knows its script: the script is read once the page is there."""

    def __init__(self, episode: MiniWobEpisode, processor: Processor, step: int) -> None:
        self._episode = episode
        self._processor = processor
        self._step = step
        self._policy: ScriptedPolicy | None = None
        self.act, self.observe, self.close = episode.act, episode.observe, episode.close
        self.conclude = episode.conclude

    async def reset(self) -> Observation:
        observation = await self._episode.reset()
        actions = _coarse(await self._episode.oracle(), self._step)
        self._policy = ScriptedPolicy(self._processor, [format_call(action) for action in actions])
        return observation

    async def generate(self, prompt_ids: Sequence[int], images: dict[str, bytes], **options: Any) -> Generated:
        if self._policy is None:
            raise BrowserFault("the episode was not reset")
        return await self._policy(prompt_ids, images, **options)


def _coarse(actions: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Coordinates rounded to multiples of `step` below 1000."""

    def coarse(coordinate: list[int]) -> list[int]:
        return [min(round(c / step) * step, (SCALE - 1) // step * step) for c in coordinate]

    return [{k: coarse(v) if k == "coordinate" else v for k, v in action.items()} for action in actions]


def check_scripts(tasks: Sequence[Task]) -> None:
    """Raises UserError for a task that has no script."""
    for task in tasks:
        if not has_oracle(task.name):
            raise UserError(
                f"tasks.names has {task.name!r}, which has no script to demonstrate it: leave it out, or bring a warm model"
            )


async def _each[T, R](
    work: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T], at_once: int, on_progress: Progress | None
) -> AsyncGenerator[R]:
    """Results of `work` on every item, `at_once` at a time, as they come."""
    left = iter(items)
    running: set[asyncio.Task[R]] = set()
    finished = 0
    try:
        while True:
            while len(running) < at_once and (item := next(left, None)) is not None:
                running.add(asyncio.create_task(work(item)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                finished += 1
                if on_progress:
                    on_progress(finished, len(items))
                yield future.result()
    finally:
        for future in running:
            future.cancel()
        await asyncio.gather(*running, return_exceptions=True)
