"""One Chromium process with its Playwright driver: found, launched without downloads, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import subprocess
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megatron_webrl.browser.faults import BrowserFault
from megatron_webrl.browser.sandbox import AllowList
from megatron_webrl.config import BrowserConfig
from megatron_webrl.errors import UserError
from megatron_webrl.processes import MARK, reap

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Playwright

log = logging.getLogger(__name__)

LAUNCH_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0

NAMES = ("chromium-headless-shell", "headless_shell", "chromium", "chromium-browser", "google-chrome")
SYSTEM_FOLDERS = (Path("/usr/lib/chromium"), Path("/usr/lib64/chromium-browser"))
FLAGS = (
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Rastering only the changed part of a tile leaves traces of the page before: with it a reused page is not the same,
    # to the byte, as a fresh one.
    "--disable-partial-raster",
    # Packets that no proxy carries reach nobody.
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-quic",
)

_numbers = itertools.count()


def find_chromium(executable: Path | None) -> Path:
    """`executable` if given; else a headless shell or Chromium of the system, else Playwright's own download.
    Raises UserError if there is none."""
    if executable is not None:
        if executable.is_file() and os.access(executable, os.X_OK):
            return executable
        raise UserError(
            f"browser.executable={executable} is no executable file: give Chromium's path, or null to search"
        )
    for name in NAMES:  # a distribution's command may be a shell script, whose death the driver does not notice
        for folder in SYSTEM_FOLDERS:
            if os.access(folder / name, os.X_OK):
                return folder / name
    downloads = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    for pattern in ("chromium_headless_shell-*/*/*headless*shell", "chromium-*/*/chrome"):
        for file in sorted(downloads.glob(pattern), reverse=True):
            if os.access(file, os.X_OK):
                return file
    for name in NAMES:
        if (found := shutil.which(name)) and _answers(found):
            return Path(found)
    raise UserError(
        "browser.executable=null and no Chromium was found: install the system package chromium-headless-shell, "
        "or run `playwright install chromium-headless-shell`, or set browser.executable"
    )


def _answers(command: str) -> bool:
    """Ubuntu's command is a stub that only advises to install a snap."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        out = subprocess.run(
            [command, "--version"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
        return out.returncode == 0 and "chrom" in out.stdout.lower()
    return False


class Chromium:
    """A running browser; made by `Chromium.launch`."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._drivers: list[psutil.Process] = []
        self._processes: list[psutil.Process] = []
        """The drivers and the browsers' main processes."""
        self.pages = 0
        """Open pages."""
        self.uses = 0
        """Episodes that it has carried."""
        self.retired = False
        """To be closed as soon as its last page is given back."""

    @classmethod
    async def launch(cls, config: BrowserConfig, allow: AllowList) -> Chromium:
        """Start driver and browser.  Raises UserError without a Chromium, BrowserFault if it does not start."""
        from playwright.async_api import async_playwright

        executable = find_chromium(config.executable)
        mark = f"{os.environ.get(MARK, 'local')}/chromium-{os.getpid()}-{next(_numbers)}"
        self = cls(mark)
        try:
            async with asyncio.timeout(LAUNCH_TIMEOUT_S):
                before = {p.pid for p in psutil.Process().children()}
                self._playwright = await async_playwright().start()
                self._drivers = [p for p in psutil.Process().children() if p.pid not in before]
                self._browser = await self._playwright.chromium.launch(
                    executable_path=executable,
                    args=[*FLAGS, f"--host-resolver-rules={allow.host_rules}"],
                    env={**os.environ, MARK: mark},
                    timeout=LAUNCH_TIMEOUT_S * 1000,
                )
                self._processes = [*self._drivers, *(child for driver in self._drivers for child in driver.children())]
        except Exception as error:
            await self.close()
            raise BrowserFault(f"{executable} did not start: {str(error).partition(chr(10))[0]}") from error
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def connected(self) -> bool:
        """Whether browser and driver are alive, as far as is known."""
        return (
            self._browser is not None and self._browser.is_connected() and all(p.is_running() for p in self._processes)
        )

    async def new_context(self, **options: Any) -> BrowserContext:
        """A context without cookies, storage or cache of another.  The caller sets the deadline."""
        if self._browser is None:
            raise BrowserFault("the browser is closed")
        return await self._browser.new_context(**options)

    def held_bytes(self) -> int:
        """Memory of the browser and its renderers, shared pages in proportion (PSS)."""
        return sum(_pss(process) for main in self._browsers() for process in (main, *main.children(recursive=True)))

    def kill(self) -> None:
        """End the browser at once; its pages notice."""
        for process in self._browsers():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _browsers(self) -> list[psutil.Process]:
        return [process for process in self._processes if process not in self._drivers and process.is_running()]

    async def close(self) -> None:
        """End browser and driver; what does not go by itself is killed.  Idempotent."""
        browser, playwright = self._browser, self._playwright
        self._browser = self._playwright = None
        if browser is not None:
            await _quietly(browser.close())
        await asyncio.to_thread(reap, self._mark)
        if playwright is not None:
            await _quietly(playwright.stop())
        for driver in self._drivers:
            with contextlib.suppress(psutil.Error):
                driver.kill()
        for _ in range(20):  # the event loop reaps its child
            if not any(d.is_running() for d in self._drivers):
                break
            await asyncio.sleep(0.05)
        self._drivers = []


def _pss(process: psutil.Process) -> int:
    """Bytes; 0 if it is gone.  (psutil's own figure reads a hundred times as much.)"""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) << 10
    return 0


async def _quietly(call: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await call
    except Exception as error:
        log.debug("while closing a browser: %s", error)
