"""The pages of a worker: one Chromium, a bounded number of pages, replaced when it dies, has served long enough or holds
too much memory.

Each episode gets a page in a context of its own, made ready while others run.  A page that was given back as reusable is
handed out again for what it was used for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Any

from megatron_webrl.browser.chromium import Chromium
from megatron_webrl.browser.faults import BrowserFault
from megatron_webrl.browser.page import Page
from megatron_webrl.browser.sandbox import AllowList
from megatron_webrl.config import BrowserConfig

log = logging.getLogger(__name__)

SPARE_PAUSE_S = 0.25
"""After a page was handed out: its episode's first screenshot comes before the next spare."""
ROOM_TIMEOUT_S = 120.0
"""Longest wait for one of `config.slots`: whoever has so many episodes at once waits for none."""
WATCH_S = 5.0
"""Between two looks at the memory of the browser."""


class PagePool:
    """Pages for `config.slots` episodes at once."""

    def __init__(self, config: BrowserConfig, allow: AllowList) -> None:
        self._config = config
        self._allow = allow
        self._limit = config.page_limit
        self._room = asyncio.Semaphore(config.slots)
        self._launching = asyncio.Lock()
        self._chromium: Chromium | None = None
        self._retired: set[Chromium] = set()
        """Earlier ones that still carry pages."""
        self._free: list[Page] = []
        """Used ones, least recently first; all of the present Chromium, as are the spares."""
        self._spares: list[Page] = []
        """Fresh ones."""
        self._closing: set[asyncio.Future[Any]] = set()
        """Idle pages of earlier browsers, on their way out."""
        self._filling: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def acquire(self, purpose: str = "") -> Page:
        """A page: one whose `used_for` is `purpose` already, or a fresh one; waits while `config.slots` are in use.
        Raises BrowserFault."""
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                await self._room.acquire()
        except TimeoutError:
            raise BrowserFault(f"no page was given back within {ROOM_TIMEOUT_S:.0f} s") from None
        try:
            chromium = await self._ready()
            page = next((p for p in reversed(self._free) if purpose and p.used_for == purpose), None)
            if page is not None:
                self._free.remove(page)
            else:
                page = await self._fresh(chromium)
                self._fill()
            chromium.uses += 1
            return page
        except BaseException:
            self._room.release()
            raise

    async def release(self, page: Page, *, reusable: bool = False) -> None:
        """Give a page back.  reusable: another episode may have it as it is."""
        chromium = page.chromium
        try:
            if reusable and page.alive and chromium is self._chromium and not chromium.retired:
                self._free.append(page)
            else:
                await self._close_page(page)
        finally:
            self._room.release()

    async def close(self) -> None:
        """End the browser and everything in it."""
        for task in (self._filling, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._free.clear()
        self._spares.clear()
        ours = [*self._retired, *([self._chromium] if self._chromium else [])]
        self._chromium = None
        self._retired.clear()
        for chromium in ours:
            await chromium.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    # Pages ----------------------------------------------------------------------------------------------------------

    async def _fresh(self, chromium: Chromium) -> Page:
        """A spare, or a new page; then room is made for it."""
        while self._spares:
            page = self._spares.pop()
            if page.alive:
                return page
            await self._close_page(page)
        while self._free and chromium.pages >= self._limit + self._config.spare_contexts:
            kinds = Counter(p.used_for for p in self._free)
            page = max(self._free, key=lambda p: kinds[p.used_for])  # not the oldest: tasks come in turn
            self._free.remove(page)
            await self._close_page(page)
        return await self._open(chromium)

    async def _open(self, chromium: Chromium) -> Page:
        """Raises BrowserFault."""
        chromium.pages += 1
        try:
            return await Page.open(chromium, self._config, self._allow)
        except Exception as error:
            chromium.retired = True
            await self._one_page_less(chromium)
            raise BrowserFault(f"the browser opens no page: {str(error).partition(chr(10))[0]}") from error
        except BaseException:
            await self._one_page_less(chromium)
            raise

    async def _close_page(self, page: Page) -> None:
        try:
            if not await page.close():
                log.warning("a page did not close: its browser is replaced")
                page.chromium.retired = True
        finally:
            await self._one_page_less(page.chromium)

    async def _one_page_less(self, chromium: Chromium) -> None:
        """The last page of an earlier browser takes it along."""
        chromium.pages -= 1
        if chromium in self._retired and chromium.pages <= 0:
            self._retired.discard(chromium)
            await asyncio.shield(chromium.close())

    def _fill(self) -> None:
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._make_spares())

    async def _make_spares(self) -> None:
        await asyncio.sleep(SPARE_PAUSE_S)
        while (chromium := self._chromium) is not None and not chromium.retired and chromium.connected:
            if len(self._spares) >= self._config.spare_contexts:
                return
            try:
                page = await self._open(chromium)
            except BrowserFault as error:
                log.warning("no spare context: %s", error)
                return
            if chromium is self._chromium and not chromium.retired:
                self._spares.append(page)
            else:
                await self._close_page(page)

    # Browsers -------------------------------------------------------------------------------------------------------

    async def _ready(self) -> Chromium:
        """The present Chromium, launched if there is none, it died, or it has served long enough."""
        async with self._launching:
            old = self._chromium
            if old is not None and old.connected and not old.retired and old.uses < self._config.recycle_episodes:
                return old
            self._chromium = None
            if old is not None:
                await self._retire(old)
            self._chromium = await Chromium.launch(self._config, self._allow)
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch())
            return self._chromium

    async def _retire(self, old: Chromium) -> None:
        """Close it now if it is dead or idle; else its last page's release does."""
        if not old.connected:
            log.warning("the browser died: a new one is launched")
        idle = [*self._free, *self._spares]
        self._free, self._spares = [], []
        old.pages -= len(idle)
        self._retired.add(old)
        closing = asyncio.ensure_future(asyncio.gather(*(page.close() for page in idle), return_exceptions=True))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        if not old.connected or old.pages <= 0:
            self._retired.discard(old)
            await asyncio.shield(old.close())

    async def _watch(self) -> None:
        """Retire a browser that holds too much memory; kill one that holds twice as much."""
        most = self._config.slot_bytes * self._config.slots
        while True:
            await asyncio.sleep(WATCH_S)
            for chromium in [*self._retired, *([self._chromium] if self._chromium else [])]:
                with contextlib.suppress(Exception):
                    held = await asyncio.to_thread(chromium.held_bytes)
                    if held > most and not chromium.retired:
                        log.warning("the browser holds %d MB: it is replaced", held >> 20)
                        chromium.retired = True
                    if held > 2 * most:
                        log.warning("the browser holds %d MB: it is killed", held >> 20)
                        chromium.kill()
