"""The pages of a worker: one Chromium, a bounded number of pages, replaced when it dies or has served long enough.

A page that was given back as reusable is handed out again, preferably for what it was used for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from megatron_webrl.browser.chromium import Chromium
from megatron_webrl.browser.faults import BrowserFault
from megatron_webrl.browser.page import Page
from megatron_webrl.browser.sandbox import AllowList
from megatron_webrl.config import BrowserConfig

log = logging.getLogger(__name__)


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
        """Least recently used first; all of the present Chromium."""

    async def acquire(self, purpose: str) -> Page:
        """A page, at best one whose `used_for` is `purpose` already; waits while `config.slots` are in use.
        Raises BrowserFault."""
        await self._room.acquire()
        try:
            chromium = await self._ready()
            page = next((p for p in reversed(self._free) if p.used_for == purpose), None)
            if page is None and self._free and chromium.pages >= self._limit:
                kinds = Counter(p.used_for for p in self._free)
                page = max(self._free, key=lambda p: kinds[p.used_for])  # not the oldest: tasks come in turn
            if page is not None:
                self._free.remove(page)
            else:
                chromium.pages += 1
                try:
                    page = await Page.open(chromium, self._config, self._allow)
                except Exception as error:
                    chromium.retired = True
                    await self._one_page_less(chromium)
                    raise BrowserFault(f"the browser opens no page: {str(error).partition(chr(10))[0]}") from error
                except BaseException:
                    await self._one_page_less(chromium)
                    raise
            chromium.uses += 1
            return page
        except BaseException:
            self._room.release()
            raise

    async def release(self, page: Page, *, reusable: bool) -> None:
        """Give a page back.  reusable: another episode may have it as it is."""
        chromium = page.chromium
        try:
            if reusable and page.alive and chromium is self._chromium and not chromium.retired:
                self._free.append(page)
                return
            try:
                if not await page.close():
                    log.warning("a page did not close: its browser is replaced")
                    chromium.retired = True
            finally:
                await self._one_page_less(chromium)
        finally:
            self._room.release()

    async def _one_page_less(self, chromium: Chromium) -> None:
        """The last page of an earlier browser takes it along."""
        chromium.pages -= 1
        if chromium in self._retired and chromium.pages <= 0:
            self._retired.discard(chromium)
            await asyncio.shield(chromium.close())

    async def close(self) -> None:
        """End the browser and everything in it."""
        self._free.clear()
        ours = [*self._retired, *([self._chromium] if self._chromium else [])]
        self._chromium = None
        self._retired.clear()
        for chromium in ours:
            await chromium.close()

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
            return self._chromium

    async def _retire(self, old: Chromium) -> None:
        """Close it now if it is dead or idle; else its last page's release does."""
        if not old.connected:
            log.warning("the browser died: a new one is launched")
        free, self._free = self._free, []
        old.pages -= len(free)
        if not old.connected or old.pages == 0:
            await old.close()
        else:
            self._retired.add(old)
