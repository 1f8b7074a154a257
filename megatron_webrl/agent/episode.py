"""One episode: observe, ask the policy, act, until the page, the horizon or a fault ends it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from megatron_webrl.agent.generate import Generate
from megatron_webrl.agent.prompt import PastStep, Told, fit_prompt, keeps
from megatron_webrl.agent.reply import MalformedReply, Reply, parse_reply
from megatron_webrl.browser import BrowserFault, PageError, PageTimeout, SiteBlocked
from megatron_webrl.config import RunConfig
from megatron_webrl.engine import EngineUnreachable
from megatron_webrl.processor import Processor
from megatron_webrl.screenshots import image_size
from megatron_webrl.tasks import Episode, Evidence, Judge, Observation, PageState, Ruling
from megatron_webrl.trajectory import (
    INT32,
    Assignment,
    ImageRef,
    JudgeCost,
    Outcome,
    Step,
    Trajectory,
    encode_steps,
    image_digest,
    pack,
    unpack,
)
from megatron_webrl.wire.messages import Generated

log = logging.getLogger(__name__)

VERDICT_CHARACTERS = 4_000
"""Of a judge's reasons that a trajectory keeps, at most."""
SEED_STRIDE = 1_000_003
"""Between the sampler seeds of an episode's steps."""


class Trace(Protocol):
    """`observe.Tracer` is one."""

    def span(self, name: str, lane: str, **args: Any) -> AbstractContextManager[Any]: ...


class EpisodeResult(NamedTuple):
    """What ended, and the screenshots that it refers to, by digest."""

    trajectory: Trajectory
    images: dict[str, bytes]


class _Ended(NamedTuple):
    outcome: Outcome
    reason: str
    reward: float = 0.0
    verdict: str = ""
    cost: JudgeCost | None = None


RULINGS = {
    Ruling.SUCCESS: (Outcome.SUCCESS, "solved", 1.0),
    Ruling.FAILURE: (Outcome.FAILURE, "wrong", 0.0),
    Ruling.BLOCKED: (Outcome.ENVIRONMENT, "blocked", 0.0),
    Ruling.FAULT: (Outcome.FAULT, "judge_fault", 0.0),
}
"""What an attempt becomes by its judge's ruling: outcome, reason, reward."""


async def run_episode(
    assignment: Assignment,
    episode: Episode,
    generate: Generate,
    processor: Processor,
    config: RunConfig,
    *,
    judge: Judge | None = None,
    released: Callable[[], None] = lambda: None,
    worker: str = "",
    trace: Trace | None = None,
    lane: str = "",
) -> EpisodeResult:
    """Run one attempt to its end; raises only CancelledError.

    judge: is asked if the episode ends with an answer.  released: called when the page was given back and the judge is about
    to be asked.  The trajectory of a fault or of the environment's failure carries no steps and no screenshots, only their
    count.  Reasons: solved; wrong, answered, horizon, malformed, deadline, context_overflow (the policy's own doing);
    browser_crash, engine_unreachable, judge_fault, agent_error (faults); blocked, page_timeout, page_error (the
    environment's).
    """
    run = _Run(assignment, episode, generate, processor, config, trace, lane)
    started_at = time.time()
    with trace.span("episode", lane, task=assignment.task.task_id) if trace else nullcontext():
        try:
            ended = await run.steps_to_end(judged=judge is not None)
        except EngineUnreachable as error:
            ended = _fault(Outcome.FAULT, "engine_unreachable", error)
        except BrowserFault as error:
            ended = _fault(Outcome.FAULT, "browser_crash", error)
        except PageTimeout as error:
            ended = _fault(Outcome.ENVIRONMENT, "page_timeout", error)
        except SiteBlocked as error:
            ended = _fault(Outcome.ENVIRONMENT, "blocked", error)
        except PageError as error:
            ended = _fault(Outcome.ENVIRONMENT, "page_error", error)
        except Exception:  # a mistake of ours must not train as the policy's failure
            log.exception("%s: the agent failed", assignment.task.task_id)
            ended = _Ended(Outcome.FAULT, "agent_error")
        finally:
            await episode.close()
    if judge is not None and run.evidence is not None and ended.reason == "answered":
        released()
        ended = await _judged(judge, run.evidence, trace, lane)
    trains = ended.outcome in (Outcome.SUCCESS, Outcome.FAILURE)
    versions = [v for step in run.steps for v in unpack(step.versions, INT32).tolist()]
    trajectory = Trajectory(
        assignment=assignment,
        outcome=ended.outcome,
        reason=ended.reason,
        reward=ended.reward,
        num_steps=len(run.steps),
        response_tokens=len(versions),
        tokens=sum(_step_tokens(step, processor) for step in run.steps),
        min_version=min(versions, default=-1),
        max_version=max(versions, default=-1),
        digests=list(run.images) if trains else [],
        worker=worker,
        started_at=started_at,
        finished_at=time.time(),
        payload=encode_steps(run.steps if trains else []),
        verdict=ended.verdict,
        judge_cost=ended.cost,
    )
    return EpisodeResult(trajectory, run.images if trains else {})


async def _judged(judge: Judge, evidence: Evidence, trace: Trace | None, lane: str) -> _Ended:
    with trace.span("judge", f"{lane} judge") if trace else nullcontext():
        try:
            verdict = await judge(evidence)
        except Exception:
            log.exception("%s: the judge failed", evidence.task.task_id)
            return _Ended(Outcome.FAULT, "judge_fault")
    return _Ended(*RULINGS[verdict.ruling], verdict.reasons[:VERDICT_CHARACTERS], verdict.cost)


def _expanded(prompt_tokens: int, images: Sequence[ImageRef], processor: Processor) -> int:
    """Tokens of a prompt of `prompt_tokens` once each image_pad is as many as its image has."""
    return prompt_tokens + sum(processor.image_tokens(image.grid) - 1 for image in images)


def _step_tokens(step: Step, processor: Processor) -> int:
    """Tokens of its row: expanded prompt and response; 0 without a response, for it makes no row."""
    response = len(unpack(step.response_ids, INT32))
    if not response:
        return 0
    return _expanded(len(unpack(step.prompt_ids, INT32)), step.images, processor) + response


def _fault(outcome: Outcome, reason: str, error: Exception) -> _Ended:
    log.warning("%s: %s", reason, error)
    return _Ended(outcome, reason)


class _Run:
    """State of an episode that runs."""

    def __init__(
        self,
        assignment: Assignment,
        episode: Episode,
        generate: Generate,
        processor: Processor,
        config: RunConfig,
        trace: Trace | None,
        lane: str,
    ) -> None:
        self.steps: list[Step] = []
        self.images: dict[str, bytes] = {}
        """Screenshots that the steps refer to."""
        self.evidence: Evidence | None = None
        """For the judge, once the episode ended with an answer."""
        self._assignment = assignment
        self._episode = episode
        self._generate = generate
        self._processor = processor
        self._config = config
        self._trace = trace
        self._lane = lane
        self._window: list[ImageRef] = []
        self._past: list[PastStep] = []
        self._memory: dict[str, Any] | None = None
        self._progress: dict[str, Any] | None = None
        self._malformed = 0
        """Replies in a row."""
        self._spent_s = 0.0
        """Of the episode's own time, what its steps took: waiting for an engine is not counted, nor is the reset, which may
        wait for a browser and has deadlines of its own."""

    async def steps_to_end(self, *, judged: bool) -> _Ended:
        began = time.monotonic()
        observation = await self._episode.reset()
        observe_s = time.monotonic() - began
        while True:
            image = self._see(observation.screenshot)
            told = Told(observation.utterance, self._past, self._memory, self._progress)
            fitting = fit_prompt(self._config.agent, told, len(self._window), self._size, self._processor.encode)
            if fitting is None:
                return _Ended(Outcome.FAILURE, "context_overflow")
            prompt_ids, shown = fitting
            step = await self._ask(prompt_ids, self._window[-shown:], observation)
            self.images[image.digest] = observation.screenshot
            self.steps.append(step)
            step.act_s = observe_s
            try:
                step.action = self._remember(self._parse(step))
                self._malformed = 0
            except MalformedReply as error:
                step.error = str(error)
                self._malformed += 1
            if self._late():
                return _Ended(Outcome.FAILURE, "deadline")
            if step.action is not None:
                began = time.monotonic()
                acted = await self._episode.act(step.action)
                step.error, step.notes, act_s = acted.error, list(acted.notes), time.monotonic() - began
                step.act_s += act_s
                self._spent_s += act_s
                if acted.done or step.action["action"] == "answer":
                    step.changed = acted.done
                    if judged and not acted.done:
                        self._conclude(observation.utterance, await self._episode.conclude())
                    solved = acted.done and acted.reward > 0
                    reason = "solved" if solved else "wrong" if acted.done else "answered"
                    return _Ended(Outcome.SUCCESS if solved else Outcome.FAILURE, reason, acted.reward)
            if len(self.steps) >= self._assignment.task.horizon:
                malformed = all(s.action is None for s in self.steps)
                return _Ended(Outcome.FAILURE, "malformed" if malformed else "horizon")
            if self._malformed >= self._config.agent.max_malformed:
                return _Ended(Outcome.FAILURE, "malformed")
            if self._late():
                return _Ended(Outcome.FAILURE, "deadline")
            began = time.monotonic()
            if step.action is not None:
                observation = await self._episode.observe()
                step.changed = image_digest(observation.screenshot) != image.digest
            observe_s = time.monotonic() - began
            self._spent_s += observe_s
            self._past.append(PastStep(step.title, step.action, step.changed, step.error, step.notes))

    def _conclude(self, utterance: str, page: PageState) -> None:
        actions = [step.action for step in self.steps if step.action is not None]
        seen = [self.images[step.images[-1].digest] for step in self.steps]
        self.evidence = Evidence(self._assignment.task, utterance, actions[-1]["text"], page, actions, seen)

    def _see(self, screenshot: bytes) -> ImageRef:
        """Move the window of screenshots on."""
        width, height = image_size(screenshot)
        image = ImageRef(image_digest(screenshot), width, height, self._processor.grid(width, height))
        self._window = [*self._window, image][-self._config.agent.history_window :]
        return image

    def _size(self, prompt_ids: list[int], shown: int) -> int:
        return _expanded(len(prompt_ids), self._window[-shown:], self._processor)

    async def _ask(self, prompt_ids: list[int], window: list[ImageRef], observation: Observation) -> Step:
        """Sample one reply to a prompt that shows `window`; its step, not parsed yet.  Raises EngineUnreachable."""
        images = {i.digest: self.images.get(i.digest, observation.screenshot) for i in window}
        seed = (self._assignment.seed + SEED_STRIDE * len(self.steps)) & 0x7FFFFFFF
        began = time.monotonic()
        with self._trace.span("generate", self._lane) if self._trace else nullcontext():
            reply: Generated = await self._generate(
                prompt_ids,
                images,
                seed=seed,
                temperature=self._assignment.temperature,
                top_p=self._assignment.top_p,
                top_k=self._assignment.top_k,
                timeout_s=self._config.engine.request_timeout_s,
                digests=[i.digest for i in window],
                affinity=self._assignment.key,
            )
        generate_s = time.monotonic() - began
        self._spent_s += max(0.0, generate_s - reply.waited_s)
        return Step(
            prompt_ids=pack(prompt_ids, INT32),
            images=window,
            response_ids=reply.response_ids,
            logprobs=reply.logprobs,
            versions=reply.versions,
            finish_reason=reply.finish_reason,
            text=self._processor.decode(unpack(reply.response_ids, INT32)),
            action=None,
            url=observation.url,
            title=observation.title,
            generate_s=generate_s,
        )

    def _parse(self, step: Step) -> Reply:
        if step.finish_reason == "length":
            raise MalformedReply("the reply was too long and was cut")
        return parse_reply(step.text, thinking=self._config.agent.thinking)

    def _remember(self, reply: Reply) -> dict[str, Any]:
        """Keep what the reply remembers; what it leaves out stays as it was.  Returns its action."""
        memory, progress = keeps(self._config.agent)
        if memory and reply.memory is not None:
            self._memory = reply.memory
        if progress and reply.progress is not None:
            self._progress = reply.progress
        return reply.action

    def _late(self) -> bool:
        return self._spent_s > self._assignment.deadline_s
