"""The tabs of one episode: every call has a deadline, errors are told apart, and what happens unasked is noted."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from megatron_webrl.browser.faults import BrowserFault, PageError, PageTimeout, TabClosed
from megatron_webrl.browser.gateway import Gateway
from megatron_webrl.browser.sandbox import HARMLESS, AllowList, listed, site_of
from megatron_webrl.config import BrowserConfig

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, CDPSession

    from megatron_webrl.browser.chromium import Chromium

T = TypeVar("T")

GONE = ("target page, context or browser has been closed", "target closed", "target crashed", "page crashed",
        "browser has been closed", "connection closed", "browser closed")  # fmt: skip
"""How Playwright's errors say that the target is no more; single words could stand in an address as well."""
INTERRUPTED = ("interrupted by another navigation", "context was destroyed", "Cannot find context",
               "Not attached to an active page", "Unable to capture screenshot")  # fmt: skip
"""Errors of a call that a navigation overtook: the call may be made again."""
INTERRUPTIONS = 10
INTERRUPTION_PAUSE_S = 0.05
NEWS_S = 0.1
"""After an error: the news that the browser died may come after what that broke."""
TAB_S = 2.0
"""A tab that was announced opens within that, or counts as none."""
MAX_TABS = 8
MAX_NOTES = 10
NOTE_CHARACTERS = 200
TITLE_CHARACTERS = 300

# A print dialog would wait for somebody.
INIT = "window.print = () => {};"
# Until the page has loaded and, for `quiet` ms, nothing changed in it; images in sight are there, animations that end have
# ended.  At least two frames, at most `limit` ms.
SETTLE = """async ([quiet, limit]) => {
  const began = performance.now();
  let last = began, frames = 0;
  const observer = new MutationObserver(() => { last = performance.now(); });
  observer.observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
  const frame = () => new Promise(done => { requestAnimationFrame(done); setTimeout(done, 100); });
  const inSight = image => {
    const box = image.getBoundingClientRect();
    return box.bottom > 0 && box.right > 0 && box.top < innerHeight && box.left < innerWidth;
  };
  const ends = animation => animation.playState === 'running' && animation.effect
    && Number.isFinite(animation.effect.getComputedTiming().endTime);
  for (;;) {
    await frame();
    const now = performance.now();
    if (now - began >= limit) break;
    if (++frames < 2 || now - last < quiet || document.readyState !== 'complete') continue;
    if ([...document.images].some(image => !image.complete && inSight(image))) continue;
    if (!document.getAnimations().some(ends)) break;
  }
  observer.disconnect();
  return [String(document.title), scrollX, scrollY];
}"""
# What has the keyboard: [whether a frame has it, whether it is a password field].
FOCUS = """() => {
  let element = document.activeElement;
  while (element?.shadowRoot?.activeElement) element = element.shadowRoot.activeElement;
  return [element instanceof HTMLIFrameElement, element?.type === 'password'];
}"""


class Facts(NamedTuple):
    """Of a page that has settled."""

    title: str
    scroll: tuple[float, float]
    """Offset of the document, CSS pixels."""


class Page:
    """The tabs of one episode, in a context of its own; made by `Page.open`.

    The agent sees and acts on the newest tab: `raw` is Playwright's page of it, to be reached through `call` only.
    `used_for` is the caller's note of what it holds.
    """

    def __init__(self, chromium: Chromium, config: BrowserConfig, allow: AllowList) -> None:
        self.chromium = chromium
        self.allow = allow
        self.view = config.view
        self.used_for = ""
        self.timeout_s = config.action_timeout_s
        self._config = config
        self._context: BrowserContext | None = None
        self._gateway = Gateway(allow, self.note) if allow.hosts else None
        self._tabs: list[Any] = []
        """Open ones, oldest first."""
        self._sessions: dict[Any, CDPSession] = {}
        self._announced: float | None = None
        """When a tab was, that is not open yet."""
        self._notes: list[str] = []
        self._answers: set[asyncio.Task[None]] = set()
        clip = {"x": 0, "y": 0, "width": config.view[0], "height": config.view[1], "scale": 1}
        self._clip = None if config.view == config.viewport else clip
        self._encoding: dict[str, Any] = {"format": config.screenshot_format}
        if config.screenshot_format == "jpeg":
            self._encoding["quality"] = config.jpeg_quality
        self._crashed = False

    @classmethod
    async def open(cls, chromium: Chromium, config: BrowserConfig, allow: AllowList) -> Page:
        """A fresh context with one blank page.  Raises what Playwright raises, TimeoutError, or as `call`."""
        page = cls(chromium, config, allow)
        try:
            async with asyncio.timeout(config.action_timeout_s):
                page._context = context = await chromium.new_context(
                    viewport={"width": config.viewport[0], "height": config.viewport[1]},
                    accept_downloads=False,
                    service_workers="block",
                    proxy={"server": await page._gateway.start()} if page._gateway else None,
                )
            await page.call(allow.install(context))
            await page.call(context.grant_permissions([]))  # all others are denied: no prompt
            await page.call(context.add_init_script(INIT))
            context.on("page", page._on_tab)
            context.on("dialog", page._on_dialog)
            await page.call(context.new_page())
            await page._session()
        except BaseException:
            await page.close()
            raise
        return page

    # What happens unasked -------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Remember what the agent is to be told with its next observation."""
        text = " ".join(text.split())[:NOTE_CHARACTERS]
        if len(self._notes) < MAX_NOTES and text not in self._notes:
            self._notes.append(text)

    def take_notes(self) -> list[str]:
        """The notes since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _on_window_open(self, _: Any) -> None:
        """The tab itself comes when its process is there: on a busy machine later than a page takes to settle."""
        self._announced = time.monotonic()

    def _on_tab(self, tab: Any) -> None:
        self._announced = None
        if len(self._tabs) >= MAX_TABS:
            self.note(f"a new tab was closed: {MAX_TABS} are open")
            self._answer(tab.close())
            return
        if self._tabs:
            self.note("a new tab opened, and you are in it; go_back at its first page closes it")
        self._tabs.append(tab)
        tab.on("crash", self._on_crash)
        tab.on("close", self._on_close)
        tab.on("download", self._on_download)

    def _on_crash(self, _: Any) -> None:
        self._crashed = True

    def _on_close(self, tab: Any) -> None:
        if tab in self._tabs:
            self._tabs.remove(tab)
            self._sessions.pop(tab, None)
            if self._tabs:
                self.note("the tab was closed: you are back in the one before")

    def _on_dialog(self, dialog: Any) -> None:
        """Nobody can see or answer them: what asks for text gets none, what asks yes or no gets yes."""
        refuse = dialog.type == "prompt"
        if dialog.type != "beforeunload":
            self.note(f"{dialog.type} dialog {dialog.message!r}: {'dismissed' if refuse else 'accepted'}")
        self._answer(dialog.dismiss() if refuse else dialog.accept())

    def _on_download(self, download: Any) -> None:
        self.note(f"the download of {download.suggested_filename!r} was refused")

    def _answer(self, call: Awaitable[None]) -> None:
        """Do it in the background; whether it worked shows in what the page does next."""

        async def answer() -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self.timeout_s):
                    await call

        task = asyncio.ensure_future(answer())
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    # What the agent does --------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return not self._crashed and self.chromium.connected and bool(self._tabs)

    @property
    def raw(self) -> Any:
        if not self._tabs:
            raise BrowserFault("the page is gone")
        return self._tabs[-1]

    @property
    def url(self) -> str:
        return str(self.raw.url)

    @property
    def gateway(self) -> Gateway | None:
        """Its way to the network; None where it has none."""
        return self._gateway

    async def call(self, awaitable: Awaitable[T]) -> T:
        """Await one Playwright call.  Raises PageTimeout after browser.action_timeout_s, BrowserFault if the browser is
        gone, PageError otherwise."""
        from playwright.async_api import Error
        from playwright.async_api import TimeoutError as PlaywrightTimeout

        tabs = len(self._tabs)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await awaitable
        except (TimeoutError, PlaywrightTimeout) as error:
            if self._crashed or not self.chromium.connected:
                raise BrowserFault("the browser died") from error
            raise PageTimeout(f"no answer within {self.timeout_s:g} s") from error
        except Error as error:
            reason = error.message.partition("\n")[0]
            if not any(words in reason for words in INTERRUPTED):
                await asyncio.sleep(NEWS_S)
            gone = any(words in reason.lower() for words in GONE)
            if gone and not self._crashed and self.chromium.connected and 0 < len(self._tabs) < tabs:
                raise TabClosed(reason) from error
            if gone or self._crashed or not self.chromium.connected:
                raise BrowserFault(reason) from error
            raise PageError(reason) from error
        except Exception as error:  # the driver's pipe broke: plain exceptions of several kinds
            raise BrowserFault(f"{type(error).__name__}: {error}") from error

    async def goto(self, url: str, *, until: str = "commit") -> int | None:
        """Navigate; returns the HTTP status, None where there is none.  until: `commit`: its answer is there, `settle` waits
        for the rest; `load`: everything is there, which some pages never are.  Raises PageError for an address that is not
        allowed."""
        if not self.allow.permits(url):
            raise PageError(f"navigation to {url[:200]!r} is not allowed")
        if self._holds_secret(url, [url]):
            raise PageError("navigation refused: the address holds a secret of another host")
        for patience in (0.0, 0.1, 0.5):  # an error page on its way can interrupt a navigation that comes after it
            await asyncio.sleep(patience)
            try:
                response = await self.call(self.raw.goto(url, wait_until=until))
                return None if response is None else int(response.status)
            except PageError as error:
                if patience == 0.5 or not any(words in str(error) for words in INTERRUPTED):
                    raise
        raise AssertionError("not reached")

    async def begin(self, url: str, *, until: str = "commit") -> int | None:
        """`goto` the page of an episode before which there is none, not even the blank one."""
        status = await self.goto(url, until=until)
        await self._command("Page.resetNavigationHistory")
        return status

    async def go_back(self) -> None:
        """To the page before; a tab at its first page is closed instead, if it is not the only one.  Raises PageError if
        there is nowhere to go."""
        history = await self._command("Page.getNavigationHistory")
        if history["currentIndex"] > 0:
            await self.call(self.raw.go_back(wait_until="commit"))
        elif len(self._tabs) > 1:
            await self.call(self.raw.close())
        else:
            raise PageError("there is no page before this one")

    async def evaluate(self, script: str, argument: Any = None) -> Any:
        """Result of a JavaScript function, JSON."""
        return await self._uninterrupted(lambda: self.raw.evaluate(script, argument))

    async def _uninterrupted(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The call's result, asked again if a navigation, or a tab that closed, overtook it."""
        for tries in itertools.count(1):
            try:
                return await self.call(ask())
            except PageError as error:
                overtaken = isinstance(error, TabClosed) or any(words in str(error) for words in INTERRUPTED)
                if not overtaken or tries == INTERRUPTIONS:
                    raise
            await asyncio.sleep(INTERRUPTION_PAUSE_S)
        raise AssertionError("not reached")

    async def settle(self) -> Facts:
        """Wait until the page is quiet, at most browser.settle_limit_s; a page that may not be here is left."""
        quiet_s = self._config.settle_quiet_s
        end = time.monotonic() + self._config.settle_limit_s
        while True:
            left, raw, moving = max(0.0, end - time.monotonic()), self.raw, False
            try:
                title, *scroll = await self.evaluate(SETTLE, [quiet_s * 1000, left * 1000])
                busy_s = max(0.02, quiet_s) - self._gateway.quiet_s if self._gateway else 0.0
            except PageError as error:  # it goes from page to page, or has broken what the script needs
                title, scroll, busy_s = "", [0.0, 0.0], 0.1
                moving = any(words in str(error) for words in INTERRUPTED)
            if self._announced is not None and time.monotonic() - self._announced < TAB_S:
                busy_s = max(busy_s, 0.02)
            left = end - time.monotonic()
            if left <= 0 or (busy_s <= 0 and raw is self.raw):
                break
            await asyncio.sleep(min(max(0.0, busy_s), left))
        if moving:
            return await self._leave("the page went on to others without end")
        if not self.url.startswith(HARMLESS) and not self.allow.permits(self.url.removeprefix("blob:")):
            return await self._leave(f"the page went to {self.url[:100]!r}, which is not allowed")
        return Facts(title[:TITLE_CHARACTERS], (scroll[0], scroll[1]))

    async def _leave(self, why: str) -> Facts:
        self.note(f"{why}: you are on a blank page")
        await self._uninterrupted(lambda: self.raw.goto("about:blank"))
        return Facts("", (0.0, 0.0))

    async def screenshot(self, scroll: tuple[float, float] = (0, 0)) -> bytes:
        """What the agent sees, encoded as `browser.screenshot_format` says.  scroll: offset of the document, CSS pixels, as the
        page tells it."""
        options = dict(self._encoding)
        if self._clip:
            options["clip"] = {**self._clip, "x": scroll[0], "y": scroll[1]}
        answer = await self._command("Page.captureScreenshot", options)
        return base64.b64decode(answer["data"])

    async def check_typing(self, text: str) -> None:
        """Raises PageError if `text` is not to be typed where the keyboard's focus is (see browser.credentials)."""
        frame = self.raw.main_frame
        around = [frame.url]
        inside, secret_field = await self.call(frame.evaluate(FOCUS))
        while inside:
            element = (await self.call(frame.evaluate_handle("document.activeElement"))).as_element()
            frame = await self.call(element.content_frame()) if element else None
            if frame is None:
                break
            around.append(frame.url)
            inside, secret_field = await self.call(frame.evaluate(FOCUS))
        if secret_field and not all(url.startswith("file:") or self._has_credentials(url) for url in around):
            raise PageError(f"typing refused: {site_of(around[-1])[0] or 'this page'} is no host of credentials")
        if self._holds_secret(text, around):
            raise PageError("typing refused: the text holds a secret of another host")

    def _has_credentials(self, url: str) -> bool:
        return listed(self._config.credentials, *site_of(url))

    def _holds_secret(self, text: str, around: list[str]) -> bool:
        """Whether `text` has a secret that is not of every one of these URLs: a page could lie about what has the focus."""
        return any(
            secret.get_secret_value() in text and not all(listed({pattern}, *site_of(url)) for url in around)
            for pattern, secrets in self._config.credentials.items()
            for secret in secrets
        )

    async def _command(self, name: str, options: dict[str, Any] | None = None) -> Any:
        """Of the DevTools protocol, to the newest tab."""

        async def send() -> Any:
            return await (await self._session()).send(name, options)

        return await self._uninterrupted(send)

    async def _session(self) -> CDPSession:
        """Of the newest tab."""
        raw = self.raw
        if raw not in self._sessions:
            session = self._sessions[raw] = await self.call(raw.context.new_cdp_session(raw))
            session.on("Page.windowOpen", self._on_window_open)
            await self.call(session.send("Page.enable"))
        return self._sessions[raw]

    async def close(self) -> bool:
        """Close the context; False if it did not answer in time."""
        try:
            async with asyncio.timeout(min(5.0, self.timeout_s)):
                if self._context is not None:
                    await self._context.close()
        except TimeoutError:
            return False
        except Exception:  # it is gone already
            return True
        finally:
            if self._gateway is not None:
                await self._gateway.close()
            for answer in list(self._answers):
                answer.cancel()
        return True
