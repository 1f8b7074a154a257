import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from below import processes_below

from megatron_webrl.browser import AllowList, BrowserFault, Chromium, Page, PagePool, find_chromium
from megatron_webrl.browser import pool as pool_module
from megatron_webrl.config import BrowserConfig
from megatron_webrl.errors import UserError


def chromium_pids() -> list[int]:
    """The browsers' main processes below us."""
    drivers = psutil.Process().children()
    return [p.pid for driver in drivers for p in driver.children() if "--headless" in p.cmdline()]


async def test_nothing_is_left_after_close(pool: PagePool, page: Page) -> None:
    """Neither Chromium nor driver, no zombie; pages in use die with them."""
    assert chromium_pids()
    await pool.close()
    assert processes_below() == []
    await pool.release(page, reusable=True)


async def test_a_page_is_reused_only_when_given_back_as_reusable(pool: PagePool, page: Page) -> None:
    await pool.release(page, reusable=False)
    page.used_for = "site"
    second = await pool.acquire("site")
    assert second is not page
    second.used_for = "site"
    await pool.release(second, reusable=True)
    assert await pool.acquire("site") is second


async def test_the_number_of_pages_is_bounded(site: Path, config: BrowserConfig) -> None:
    """Then one of the commonest kind is closed for another purpose; with both slots in use a third episode waits."""
    pool = PagePool(config.model_copy(update={"pages": 3, "spare_contexts": 0}), AllowList(folders=(site,)))
    try:
        [a] = [await _use(pool, "a")]
        first, second = [await pool.acquire("b") for _ in range(2)]
        for page in (first, second):
            page.used_for = "b"
            await pool.release(page, reusable=True)
        c = await pool.acquire("c")
        assert c not in (a, first, second)
        assert sorted(page.alive for page in (first, second)) == [False, True]
        assert await pool.acquire("a") is a
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await pool.acquire("b")
    finally:
        await pool.close()


async def _use(pool: PagePool, purpose: str) -> Page:
    page = await pool.acquire(purpose)
    page.used_for = purpose
    await pool.release(page, reusable=True)
    return page


@pytest.mark.parametrize("victim", ["browser", "driver"])
async def test_a_killed_process_is_a_fault_and_replaced(pool: PagePool, page: Page, site: Path, victim: str) -> None:
    """Calls under way raise BrowserFault; the next page comes from a new browser."""
    pids = chromium_pids() if victim == "browser" else [p.pid for p in processes_below(recursive=False)]
    waiting = asyncio.create_task(page.evaluate("() => new Promise(() => {})"))
    await asyncio.sleep(0.1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(BrowserFault):
        await waiting
    await pool.release(page, reusable=True)
    fresh = await pool.acquire("site")
    await fresh.goto((site / "index.html").as_uri())
    assert await fresh.evaluate("() => document.title") == "field"


async def test_a_crashed_renderer_is_a_fault(pool: PagePool, page: Page, site: Path) -> None:
    waiting = asyncio.create_task(page.evaluate("() => new Promise(() => {})"))
    await asyncio.sleep(0.1)
    for process in processes_below():
        if "--type=renderer" in process.cmdline():
            process.kill()
    with pytest.raises(BrowserFault):
        await waiting
    await pool.release(page, reusable=True)
    assert await pool.acquire("site") is not page


async def test_a_browser_is_recycled_and_the_old_one_ends_with_its_last_page(site: Path, config: BrowserConfig) -> None:
    """After recycle_episodes uses; episodes under way are not disturbed."""
    pool = PagePool(config.model_copy(update={"recycle_episodes": 1}), AllowList(folders=(site,)))
    try:
        old = await pool.acquire("site")
        [first] = chromium_pids()
        await old.goto((site / "index.html").as_uri())
        new = await pool.acquire("site")
        assert new.chromium is not old.chromium
        assert len(chromium_pids()) == 2
        assert await old.evaluate("() => document.title") == "field"
        await pool.release(old, reusable=True)
        assert first not in chromium_pids()
        await pool.release(new, reusable=True)
    finally:
        await pool.close()
    assert processes_below() == []


async def test_the_next_context_is_ready_before_it_is_asked_for(pool: PagePool, page: Page, site: Path) -> None:
    """Made while an episode runs; fresh, and another is made after it was taken."""
    await _until(lambda: len(pool._spares) == 1)
    [spare] = pool._spares
    await pool.release(page)
    assert await pool.acquire() is spare
    assert spare.url == "about:blank"
    await _until(lambda: len(pool._spares) == 1)
    assert pool._spares != [spare]


@pytest.mark.parametrize("times", [1.5, 2.5])
async def test_a_browser_that_holds_too_much_is_replaced_and_killed_beyond_twice_that(
    site: Path, config: BrowserConfig, monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    """browser.slot_bytes a slot: above it the episodes under way end in it, above twice that they are faults."""
    monkeypatch.setattr(pool_module, "WATCH_S", 0.05)
    monkeypatch.setattr(Chromium, "held_bytes", lambda self: 0)
    pool = PagePool(config, AllowList(folders=(site,)))
    try:
        old = await pool.acquire()
        monkeypatch.setattr(Chromium, "held_bytes", lambda self: int(times * config.slot_bytes * config.slots))
        await _until(lambda: old.chromium.retired)
        if times > 2:
            with pytest.raises(BrowserFault):
                await old.evaluate("() => new Promise(() => {})")
        else:
            await old.goto((site / "index.html").as_uri(), until="load")
            assert await old.evaluate("() => document.title") == "field"
        monkeypatch.setattr(Chromium, "held_bytes", lambda self: 0)
        new = await pool.acquire()
        assert new.chromium is not old.chromium
        await pool.release(old)
        await pool.release(new)
    finally:
        await pool.close()
    assert processes_below() == []


async def test_what_a_browser_holds_is_measured(page: Page) -> None:
    """PSS of the browser and its renderers, hundreds of megabytes at most."""
    assert 50 << 20 < page.chromium.held_bytes() < 1 << 30


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (others' state, which announces nothing)
            await asyncio.sleep(0.02)


def test_a_missing_chromium_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"browser.executable=.*nowhere"):
        find_chromium(tmp_path / "nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.setattr("megatron_webrl.browser.chromium.SYSTEM_FOLDERS", ())
    with pytest.raises(UserError, match="chromium-headless-shell"):
        find_chromium(None)
    shell = tmp_path / "chromium_headless_shell-1200" / "chrome-linux" / "headless_shell"
    shell.parent.mkdir(parents=True)
    shell.touch(0o755)
    assert find_chromium(None) == shell


def test_the_allow_list_resolves_links_and_dots(site: Path) -> None:
    allow = AllowList(folders=(site,), hosts=frozenset({"example.org"}))
    assert allow.permits((site / "index.html").as_uri())
    assert allow.permits("https://example.org/a?b")
    for url in (
        (site / "link.txt").as_uri(),
        f"file://{site}/../secret.txt",
        f"file://{site}/%2e%2e/secret.txt",
        f"file://host{site}/index.html",
        "http://sub.example.org/",
        "http://example.org.evil.net/",
        "http://example.org@evil.net/",
        "ftp://example.org/",
        "http://[",
        "file:///%00",
    ):
        assert not allow.permits(url), url
    assert replace(allow, hosts=frozenset()).host_rules == "MAP * ~NOTFOUND"
