"""What environments of web pages share: an episode begins at an address and ends when the environment says so.

An environment of your own derives from `WebEnvironment` (docs/tasks.md has one in 40 lines).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.browser import AllowList, BrowserFault, Page, PagePool, SiteBlocked, perform
from megatron_webrl.config import RunConfig
from megatron_webrl.tasks.environment import Acted, Judge, Observation, PageState
from megatron_webrl.trajectory import Task

BLOCKED_STATUS = frozenset((401, 403, 407, 429, 451))
"""HTTP's ways to say that the agent is not wanted."""
TEXT_CHARACTERS = 100_000
"""Of a page's text that a judge gets."""
# Visible text; and for each selector the text, or the value of a field, of its first match.
CONCLUDE = """([selectors, most]) => {
  const found = {};
  for (const selector of selectors) {
    let element = null;
    try { element = document.querySelector(selector); } catch {}
    found[selector] = element && String(element.value ?? element.innerText ?? element.textContent).slice(0, most);
  }
  return [String(document.body?.innerText ?? '').slice(0, most), found];
}"""


class WebEnvironment:
    """Base of environments whose tasks begin at an address.  Override what differs."""

    folders: tuple[Path, ...] = ()
    """Of pages that are files; what they may load as well."""
    judge: Judge | None = None

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.pool = PagePool(config.browser, AllowList.of_web(config.browser, self.folders))

    def start_url(self, task: Task) -> str:
        """Where the task begins."""
        raise NotImplementedError

    def utterance(self, task: Task) -> str:
        """The task in words."""
        raise NotImplementedError

    def selectors(self, task: Task) -> Sequence[str]:
        """CSS selectors whose text the judge will want to see."""
        return ()

    async def reward(self, task: Task, page: Page) -> float | None:
        """Asked once a page has settled after an action: the reward with which it ends the episode, or None to go on."""
        return None

    def episode(self, task: Task) -> WebEpisode:
        """An episode that begins with its `reset`."""
        return WebEpisode(self, task)

    async def close(self) -> None:
        """End the browser."""
        await self.pool.close()


class WebEpisode:
    """One episode in a fresh context (see `Episode`)."""

    def __init__(self, environment: WebEnvironment, task: Task) -> None:
        self.task = task
        self._environment = environment
        self._page: Page | None = None
        self._title = ""
        self._scroll = (0.0, 0.0)

    @property
    def page(self) -> Page:
        if self._page is None:
            raise BrowserFault("the episode has no page")
        return self._page

    async def reset(self) -> Observation:
        """Raises SiteBlocked if the site does not let the agent in."""
        self._page = await self._environment.pool.acquire()
        status = await self.page.begin(self._environment.start_url(self.task))
        if status in BLOCKED_STATUS:
            raise SiteBlocked(f"{self.page.url[:200]} answers with HTTP status {status}")
        self._title, self._scroll = await self.page.settle()
        self.page.take_notes()
        return await self.observe()

    async def act(self, action: dict[str, Any]) -> Acted:
        error = await perform(self.page, action)
        self._title, self._scroll = await self.page.settle()
        reward = await self._environment.reward(self.task, self.page)
        return Acted(error, reward is not None, reward or 0.0, tuple(self.page.take_notes()))

    async def observe(self) -> Observation:
        screenshot = await self.page.screenshot(self._scroll)
        return Observation(self._environment.utterance(self.task), screenshot, self.page.url, self._title)

    async def conclude(self) -> PageState:
        wanted = list(self._environment.selectors(self.task))
        text, found = await self.page.evaluate(CONCLUDE, [wanted, TEXT_CHARACTERS])
        return PageState(self.page.url, self._title, text, found)

    async def close(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            await self._environment.pool.release(page)
