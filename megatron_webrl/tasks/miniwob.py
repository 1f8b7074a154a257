"""MiniWoB++ (pip package `miniwob`, MIT): its pages in our Chromium, reset by seed, with the page's own reward.

The package is located, not imported: its Python needs gymnasium, its pages need nothing.
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_webrl.browser import AllowList, Page, PagePool, from_pixels, perform
from megatron_webrl.browser.faults import BrowserFault, PageError
from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.tasks.environment import Acted, Observation, PageState
from megatron_webrl.trajectory import Task

# Waits until the images of the page as it is styled now are there: a screenshot would miss those that still load.
IMAGES = """
const imagesReady = () => {
  const urls = [...document.images].map(image => image.src);
  for (const element of document.querySelectorAll('body *'))
    for (const [, url] of getComputedStyle(element).backgroundImage.matchAll(/url\\("([^"]*)"\\)/g)) urls.push(url);
  const ready = [...new Set(urls)].map(url => {
    const image = new Image();
    image.src = url;
    return image.decode().catch(() => {});
  });
  return Promise.race([Promise.all(ready), new Promise(done => setTimeout(done, 5000))]);
};
"""
# Begins an episode on a loaded page.  The display of reward and time is hidden and stopped, the clock is set to a day, a
# blinking caret is made invisible; the token tells this episode's document from any other that the agent may navigate to.
RESET = (
    "async ([seed, token]) => {"
    + IMAGES
    + """
  if (document.activeElement) document.activeElement.blur();
  if (!document.getElementById('webrl')) {
    const style = document.createElement('style');
    style.id = 'webrl';
    style.textContent = '#reward-display {display: none !important} * {caret-color: transparent !important}';
    document.head.append(style);
  }
  core.EPISODE_MAX_TIME = 86400e3;
  Math.seedrandom(seed);
  core.startEpisodeReal();
  core.clearTimer();
  // The page's end shows a cover whose click begins another episode: the second half of a double click must not.
  if (core.cover_div) core.cover_div.onclick = null;
  window.webrlToken = token;
  await imagesReady();
  const said = core.getUtterance();  // some tasks give fields beside the text
  return [typeof said === 'string' ? said : said.utterance, document.title];
}"""
)
STATUS = (
    "async (token) => {"
    + IMAGES
    + """
  const ours = window.webrlToken === token;
  if (!ours || !WOB_DONE_GLOBAL) await imagesReady();
  return [ours, ours && WOB_DONE_GLOBAL, ours ? WOB_RAW_REWARD_GLOBAL : 0];
}"""
)

# Pixel of an element's visible part that is nearest the part's centroid, or null.
POINT = """
const find = selector => document.querySelector(selector);
const all = selector => [...document.querySelectorAll(selector)];
const quoted = () => [...core.getUtterance().matchAll(/"([^"]*)"/g)].map(match => match[1]);
const point = element => {
  const box = element.getBoundingClientRect(), seen = [];
  for (let y = Math.max(0, Math.ceil(box.top)); y < Math.min(height, box.bottom); y++)
    for (let x = Math.max(0, Math.ceil(box.left)); x < Math.min(width, box.right); x++) {
      const top = document.elementFromPoint(x, y);
      if (top && (top === element || element.contains(top))) seen.push([x, y]);
    }
  if (!seen.length) return null;
  const mean = axis => seen.reduce((sum, p) => sum + p[axis], 0) / seen.length;
  const [cx, cy] = [mean(0), mean(1)];
  const away = p => (p[0] - cx) ** 2 + (p[1] - cy) ** 2;
  return seen.reduce((best, p) => away(p) < away(best) ? p : best);
};
"""
DIALOG_CLOSE = "find('.ui-dialog-titlebar button.ui-button')"
ORACLES = {
    "click-test": "[[find('#subbtn')]]",
    "click-test-2": "[[find('#subbtn')]]",
    "click-button": "[[all('#area button').find(b => b.textContent === quoted()[0])]]",
    "click-dialog": f"[[{DIALOG_CLOSE}]]",
    "click-dialog-2": f"[[quoted()[0] === 'x' ? {DIALOG_CLOSE}"
    " : all('.ui-dialog-buttonset button').find(b => b.textContent.trim() === quoted()[0])]]",
    "focus-text": "[[find('#tt')]]",
    "focus-text-2": "[[find('#tt' + /the (\\d)/.exec(core.getUtterance())[1])]]",
    "enter-text": "[[find('#tt'), quoted()[0]], [find('#subbtn')]]",
    "login-user": "[[find('#username'), quoted()[0]], [find('#password'), quoted()[1]], [find('#subbtn')]]",
}
"""Task -> JavaScript expression of what solves it: [element] is clicked, [element, text] gets the text typed."""

RESETTABLE = frozenset(ORACLES)
"""Tasks whose reset in a used page was found to be, to the byte, what a fresh page shows (tests hold it)."""
TRACELESS = frozenset(("left_click", "mouse_move", "wait", "answer"))
"""Actions after which such a reset is trusted.  (The keyboard, for one, changes how focus is drawn.)"""


@cache
def html_folder() -> Path:
    """Folder of the pages and their scripts.  Raises UserError if the package is missing."""
    spec = importlib.util.find_spec("miniwob")
    folders = spec.submodule_search_locations if spec else None
    if not folders or not (Path(folders[0]) / "html" / "miniwob").is_dir():
        raise UserError("tasks.names need the package miniwob, which is missing: pip install --no-deps miniwob==1.1.0")
    return (Path(folders[0]) / "html").resolve()


def task_names() -> list[str]:
    """All MiniWoB++ tasks, sorted."""
    return sorted(file.stem for file in (html_folder() / "miniwob").glob("*.html"))


def check_task_names(names: Sequence[str]) -> None:
    """Raises UserError naming the first unknown task and the nearest known one."""
    known = task_names()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known[:5])}, … ({len(known)} tasks)"
            raise UserError(f"tasks.names has {name!r}, which is not a MiniWoB++ task: {hint}")


def has_oracle(name: str) -> bool:
    """Whether a script solves the task."""
    return name in ORACLES


class MiniWob:
    """The environment: a pool of pages and the episodes in them.  The page itself gives the reward."""

    judge = None

    @staticmethod
    def check(config: RunConfig) -> None:
        """Raises UserError for a name that is no task."""
        check_task_names(config.tasks.names)

    def __init__(self, config: RunConfig) -> None:
        self._pool = PagePool(config.browser, AllowList(folders=(html_folder(),)))

    def episode(self, task: Task) -> MiniWobEpisode:
        """An episode that begins with its `reset`."""
        return MiniWobEpisode(self._pool, task)

    async def close(self) -> None:
        """End the browser."""
        await self._pool.close()


_tokens = itertools.count(1)


class MiniWobEpisode:
    """One episode of one task in one page (see `Episode`)."""

    def __init__(self, pool: PagePool, task: Task) -> None:
        self.task = task
        self._pool = pool
        self._page: Page | None = None
        self._token = next(_tokens)
        self._utterance = self._title = ""
        self._scroll = (0.0, 0.0)
        self._clean = False
        """Whether a reset makes the page as good as a fresh one."""

    @property
    def page(self) -> Page:
        if self._page is None:
            raise BrowserFault("the episode has no page")
        return self._page

    async def reset(self) -> Observation:
        await self.prepare()
        return await self.observe()

    async def prepare(self) -> str:
        """`reset` without a screenshot: the utterance."""
        page = self._page = await self._pool.acquire(self.task.name)
        if page.used_for == self.task.name:
            # The pointer must not hover over the new page; the corner of the viewport is what a fresh page looks like.
            size = page.raw.viewport_size
            await page.call(page.raw.mouse.move(size["width"] - 1, size["height"] - 1))
        else:
            page.used_for = ""
            await page.begin((html_folder() / "miniwob" / f"{self.task.name}.html").as_uri(), until="load")
            page.used_for = self.task.name
        self._utterance, self._title = await page.evaluate(RESET, [self.task.seed, self._token])
        self._clean = self.task.name in RESETTABLE
        return self._utterance

    async def observe(self) -> Observation:
        return Observation(self._utterance, await self.page.screenshot(self._scroll), self.page.url, self._title)

    async def act(self, action: dict[str, Any]) -> Acted:
        page = self.page
        clean, self._clean = self._clean and action["action"] in TRACELESS, False
        error = await perform(page, action)
        ours, done, reward = await page.evaluate(STATUS, self._token)
        if not done:
            self._title, self._scroll = await page.settle()
            ours, done, reward = await page.evaluate(STATUS, self._token)
        self._clean = clean and ours
        return Acted(error, done, float(done and reward > 0), tuple(page.take_notes()))

    async def oracle(self) -> list[dict[str, Any]]:
        """Actions that solve the page as it was reset.  Raises PageError if a target cannot be seen."""
        width, height = self.page.view
        targets = await self.page.evaluate(
            f"([width, height]) => {{ {POINT} return ({ORACLES[self.task.name]})"
            ".map(([element, text]) => [element && point(element), text ?? null]); }",
            [width, height],
        )
        actions = []
        for spot, text in targets:
            if spot is None:
                raise PageError(f"{self.task.task_id}: a target is out of sight")
            where = {"coordinate": from_pixels(spot, self.page.view)}
            click = {"action": "left_click", **where}
            actions.append(click if text is None else {"action": "type", **where, "text": text})
        return actions

    async def conclude(self) -> PageState:
        return PageState(self.page.url, self._title)

    async def close(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            await self._pool.release(page, reusable=self._clean)
