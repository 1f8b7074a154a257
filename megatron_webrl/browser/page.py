"""A page whose every call has a deadline and whose errors are told apart."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_webrl.browser.faults import BrowserFault, PageError, PageTimeout
from megatron_webrl.browser.sandbox import AllowList
from megatron_webrl.config import BrowserConfig

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, CDPSession

    from megatron_webrl.browser.chromium import Chromium

T = TypeVar("T")

GONE = ("target page, context or browser has been closed", "target closed", "target crashed", "page crashed",
        "browser has been closed", "connection closed", "browser closed")  # fmt: skip
"""How Playwright's errors say that the target is no more; single words could stand in an address as well."""
INTERRUPTED = ("interrupted by another navigation", "context was destroyed", "Cannot find context")
"""Errors of a call that a navigation overtook: the call may be made again."""


class Page:
    """One tab in a context of its own; made by `Page.open`.

    `used_for` is the caller's note of what it holds; `raw` is Playwright's page: reach it through `call` only.
    """

    def __init__(self, chromium: Chromium, context: BrowserContext, config: BrowserConfig, allow: AllowList) -> None:
        self.chromium = chromium
        self.allow = allow
        self.view = config.view
        self.used_for = ""
        self.raw: Any = None
        self._context = context
        self._cdp: CDPSession | None = None
        self.timeout_s = config.action_timeout_s
        clip = {"x": 0, "y": 0, "width": config.view[0], "height": config.view[1], "scale": 1}
        self._clip = None if config.view == config.viewport else clip
        self._encoding: dict[str, Any] = {"format": config.screenshot_format}
        if config.screenshot_format == "jpeg":
            self._encoding["quality"] = config.jpeg_quality
        self._crashed = False

    @classmethod
    async def open(cls, chromium: Chromium, config: BrowserConfig, allow: AllowList) -> Page:
        """A fresh context with one blank page.  Raises what Playwright raises, TimeoutError, or as `call`."""
        async with asyncio.timeout(config.action_timeout_s):
            context = await chromium.new_context(
                viewport={"width": config.viewport[0], "height": config.viewport[1]},
                accept_downloads=False,
                service_workers="block",
            )
        page = cls(chromium, context, config, allow)
        try:
            await page.call(allow.install(context))
            page.raw = await page.call(context.new_page())
            page.raw.on("crash", page._on_crash)
            context.on("page", page._on_popup)
            page._cdp = await page.call(context.new_cdp_session(page.raw))
        except BaseException:
            await page.close()
            raise
        return page

    def _on_crash(self, _: Any) -> None:
        self._crashed = True

    def _on_popup(self, popup: Any) -> None:
        """Pop-ups are refused."""

        async def refuse() -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self.timeout_s):
                    await popup.close()

        self._popups = asyncio.ensure_future(refuse())

    @property
    def alive(self) -> bool:
        return not self._crashed and self.chromium.connected and not self.raw.is_closed()

    @property
    def url(self) -> str:
        return str(self.raw.url)

    async def call(self, awaitable: Awaitable[T]) -> T:
        """Await one Playwright call.  Raises PageTimeout after browser.action_timeout_s, BrowserFault if the browser is
        gone, PageError otherwise."""
        from playwright.async_api import Error
        from playwright.async_api import TimeoutError as PlaywrightTimeout

        try:
            async with asyncio.timeout(self.timeout_s):
                return await awaitable
        except (TimeoutError, PlaywrightTimeout) as error:
            if self._crashed or not self.chromium.connected:
                raise BrowserFault("the browser died") from error
            raise PageTimeout(f"no answer within {self.timeout_s:g} s") from error
        except Error as error:
            reason = error.message.partition("\n")[0]
            if self._crashed or not self.chromium.connected or any(words in reason.lower() for words in GONE):
                raise BrowserFault(reason) from error
            raise PageError(reason) from error
        except Exception as error:  # the driver's pipe broke: plain exceptions of several kinds
            raise BrowserFault(f"{type(error).__name__}: {error}") from error

    async def goto(self, url: str) -> None:
        """Navigate and wait for the load event.  Raises PageError for an address that is not allowed."""
        if not self.allow.permits(url):
            raise PageError(f"navigation to {url[:200]!r} is not allowed")
        for patience in (0.0, 0.1, 0.5):  # an error page on its way can interrupt a navigation that comes after it
            await asyncio.sleep(patience)
            try:
                await self.call(self.raw.goto(url))
                return
            except PageError as error:
                if patience == 0.5 or not any(words in str(error) for words in INTERRUPTED):
                    raise

    async def evaluate(self, script: str, argument: Any = None) -> Any:
        """Result of a JavaScript function, JSON.  Asked again once if a navigation overtook it."""
        try:
            return await self.call(self.raw.evaluate(script, argument))
        except PageError as error:
            if not any(words in str(error) for words in INTERRUPTED):
                raise
            return await self.call(self.raw.evaluate(script, argument))

    async def screenshot(self, scroll: tuple[float, float] = (0, 0)) -> bytes:
        """What the agent sees, encoded as `browser.screenshot_format` says.  scroll: offset of the document, CSS pixels, as the
        page tells it."""
        if self._cdp is None:
            raise BrowserFault("the page is closed")
        options = dict(self._encoding)
        if self._clip:
            options["clip"] = {**self._clip, "x": scroll[0], "y": scroll[1]}
        answer = await self.call(self._cdp.send("Page.captureScreenshot", options))
        return base64.b64decode(answer["data"])

    async def close(self) -> bool:
        """Close the context; False if it did not answer in time."""
        try:
            async with asyncio.timeout(min(5.0, self.timeout_s)):
                await self._context.close()
        except TimeoutError:
            return False
        except Exception:  # it is gone already
            return True
        return True
