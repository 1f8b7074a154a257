"""What an environment gives the agent: episodes that are reset, observed and acted on, and a judge of what they left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from megatron_webrl.trajectory import JudgeCost, Task


class Observation(NamedTuple):
    """What the agent sees before a step."""

    utterance: str
    """The task in words."""
    screenshot: bytes
    """Encoded image."""
    url: str
    title: str


class Acted(NamedTuple):
    """What an action brought about."""

    error: str
    """What the agent is told went wrong; empty if nothing."""
    done: bool
    """The environment ended the episode."""
    reward: float
    """0 or 1; counts when done."""
    notes: Sequence[str] = ()
    """What else the agent is told: a dialog, a new tab, a refused download or request."""


class PageState(NamedTuple):
    """The page that an episode ended on."""

    url: str = ""
    title: str = ""
    text: str = ""
    """Visible text, its beginning if it is long."""
    found: dict[str, str | None] = {}
    """CSS selector that the task's judge asks for -> text (of a field: its value) of the first match; None without one."""


class Evidence(NamedTuple):
    """What an episode that ended with an answer leaves for its judge; the page itself was given back."""

    task: Task
    utterance: str
    answer: str
    page: PageState
    actions: list[dict[str, Any]]
    """Those that were done, oldest first, the answer last."""
    screenshots: list[bytes]
    """Encoded, one a step, oldest first."""


class Ruling(StrEnum):
    """What a judge can say."""

    SUCCESS = "success"
    FAILURE = "failure"
    BLOCKED = "blocked"
    """The site kept the agent out (captcha, access denied): the group is dropped, it is not the policy's failure."""
    FAULT = "fault"
    """No verdict was to be had: the attempt is issued again."""


class Verdict(NamedTuple):
    """Of a judge on one episode."""

    ruling: Ruling
    reasons: str = ""
    """For people: why."""
    cost: JudgeCost | None = None


Judge = Callable[[Evidence], Awaitable[Verdict]]
"""Raises nothing: what fails is a `Ruling.FAULT`.  Has a deadline of its own."""


class Episode(Protocol):
    """One episode.  Every method raises BrowserFault (independent of the policy), PageTimeout or PageError (the
    environment's doing)."""

    async def reset(self) -> Observation:
        """Begin; called once."""

    async def act(self, action: dict[str, Any]) -> Acted:
        """Do one action that `browser.check_action` accepts."""

    async def observe(self) -> Observation:
        """The page after an action."""

    async def conclude(self) -> PageState:
        """What the judge will see of the page; called once, after an answer."""

    async def close(self) -> None:
        """Give everything back; raises nothing."""


class Environment(Protocol):
    """Runs the tasks of one kind; made once a worker, with the run's configuration as its only argument."""

    judge: Judge | None
    """Of episodes that end with an answer; None: an answer is no success, only the episode's own reward is."""

    def episode(self, task: Task) -> Episode:
        """An episode that begins with its `reset`."""

    async def close(self) -> None:
        """End everything."""
