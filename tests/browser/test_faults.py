"""A page for each way in which the web misbehaves; each is survived, bounded in time, and told to the agent."""

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fault_site import FaultSite

from megatron_webrl.browser import AllowList, Page, PagePool, PageTimeout, perform
from megatron_webrl.config import BrowserConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLICK = {"action": "left_click", "coordinate": [500, 500]}
CONFIG = BrowserConfig(
    slots=2,
    viewport=(300, 200),
    action_timeout_s=10,
    settle_limit_s=2,
    allow_hosts=["*"],
    private_hosts=["localhost"],
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultSite]:
    async with FaultSite().serving(tmp_path_factory.mktemp("tls")) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web_pool(web: FaultSite) -> AsyncIterator[PagePool]:
    pool = PagePool(CONFIG, AllowList.of_web(CONFIG))
    yield pool
    await pool.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(web_pool: PagePool) -> AsyncIterator[Page]:
    page = await web_pool.acquire()
    yield page
    await web_pool.release(page)


async def visit(page: Page, url: str) -> None:
    await page.goto(url)
    await page.settle()


async def do(page: Page, action: dict[str, object]) -> tuple[str, str, list[str]]:
    """(error, title once the page has settled, notes)."""
    error = await perform(page, dict(action))
    title = (await page.settle()).title
    assert await page.screenshot()
    return error, title, page.take_notes()


@pytest.mark.parametrize(
    ("name", "title", "note"),
    [
        ("alert", "after", "alert dialog 'watch out': accepted"),
        ("confirm", "true", "confirm dialog 'sure?': accepted"),
        ("prompt", "null", "prompt dialog 'name?': dismissed"),
    ],
)
async def test_dialogs_are_answered_and_told(web: FaultSite, page: Page, name: str, title: str, note: str) -> None:
    await visit(page, f"{web.url}/{name}")
    assert await do(page, CLICK) == ("", title, [note])


async def test_many_dialogs_do_not_fill_the_notes(web: FaultSite, page: Page) -> None:
    await visit(page, f"{web.url}/alerts")
    error, title, notes = await do(page, CLICK)
    assert (error, title, len(notes)) == ("", "after", 10)


async def test_a_page_cannot_keep_the_agent_from_leaving(web: FaultSite, page: Page) -> None:
    """beforeunload asks only after the user did something; navigation and going back go through."""
    await visit(page, f"{web.url}/index")
    for leave in ({"action": "navigate", "url": f"{web.url}/index"}, {"action": "go_back"}):
        await visit(page, f"{web.url}/leaving")
        assert (await do(page, CLICK))[1] == "touched"
        assert await do(page, leave) == ("", "index", [])


async def test_print_and_file_choosers_and_permissions_do_not_wait_for_anybody(web: FaultSite, page: Page) -> None:
    await visit(page, f"{web.url}/print")
    assert await do(page, CLICK) == ("", "after", [])
    await visit(page, f"{web.url}/chooser")
    assert await do(page, CLICK) == ("", "chooser", [])
    await visit(page, f"{web.url}/permissions")
    assert await do(page, CLICK) == ("", "denied 1", [])
    assert await page.evaluate("() => window.asked") == "denied"


async def test_the_agent_follows_new_tabs_and_comes_back(web: FaultSite, page: Page) -> None:
    """By the tab's own closing, and by going back at its first page."""
    await visit(page, f"{web.url}/tab")
    for back in (CLICK, {"action": "go_back"}):
        error, title, notes = await do(page, CLICK)
        assert (error, title) == ("", "new tab")
        assert "a new tab opened" in notes[0]
        assert page.url == f"{web.url}/closing"
        error, title, notes = await do(page, back)
        assert (error, title, notes) == ("", "opener", ["the tab was closed: you are back in the one before"])


async def test_a_storm_of_tabs_is_bounded(web: FaultSite, page: Page) -> None:
    await visit(page, f"{web.url}/storm")
    _, title, notes = await do(page, CLICK)
    assert title == "index"
    assert any("8 are open" in note for note in notes)
    await page.settle()
    assert len(page.raw.context.pages) <= 9


async def test_going_back_from_the_first_page_is_refused(web: FaultSite, page: Page) -> None:
    """An episode's first page is the first: the blank one before it is none to go back to."""
    await page.begin(f"{web.url}/index")
    assert await do(page, {"action": "go_back"}) == ("there is no page before this one", "index", [])
    await visit(page, f"{web.url}/late")
    assert (await do(page, {"action": "go_back"}))[1] == "index"
    assert (await do(page, {"action": "go_back"}))[0] == "there is no page before this one"


async def test_downloads_are_refused_and_told(web: FaultSite, page: Page) -> None:
    await visit(page, f"{web.url}/file")
    error, _, notes = await do(page, CLICK)
    assert (error, notes) == ("", ["the download of 'a.bin' was refused"])
    assert page.url == f"{web.url}/file"
    error, _, notes = await do(page, {"action": "navigate", "url": f"{web.url}/attachment"})
    assert "download" in error.lower() or "ERR_ABORTED" in error


@pytest.mark.parametrize(("path", "why"), [("/redirect", "ERR_TOO_MANY_REDIRECTS"), ("cert", "ERR_CERT_AUTHORITY")])
async def test_addresses_that_do_not_load_are_told(web: FaultSite, page: Page, path: str, why: str) -> None:
    """Endless redirects and certificates that nobody signed; the agent sees Chromium's page, and can go elsewhere."""
    url = f"{web.secure_url}/index" if path == "cert" else web.url + path
    error, *_ = await do(page, {"action": "navigate", "url": url})
    assert why in error
    assert await do(page, {"action": "navigate", "url": f"{web.url}/index"}) == ("", "index", [])


async def test_a_page_that_never_rests_is_seen_as_it_is(web: FaultSite, page: Page) -> None:
    """Settling ends at its limit."""
    began = time.monotonic()
    assert await do(page, {"action": "navigate", "url": f"{web.url}/growing"}) == ("", "growing", [])
    assert time.monotonic() - began < CONFIG.settle_limit_s + 4


async def test_a_page_that_navigates_for_ever_is_left(web: FaultSite, page: Page) -> None:
    error, _, notes = await do(page, {"action": "navigate", "url": f"{web.url}/circle"})
    assert (error, notes) == ("", ["the page went on to others without end: you are on a blank page"])
    assert await do(page, {"action": "navigate", "url": f"{web.url}/index"}) == ("", "index", [])


async def test_a_huge_page_is_seen(web: FaultSite, page: Page) -> None:
    """100,000 paragraphs: the screenshot is of the view, not of the page."""
    await visit(page, f"{web.url}/huge")
    assert await do(page, {"action": "scroll", "direction": "down"}) == ("", "huge", [])


async def test_a_hung_page_times_out_and_others_go_on(web: FaultSite, web_pool: PagePool) -> None:
    page = await web_pool.acquire()
    await visit(page, f"{web.url}/hang")
    page.timeout_s = 1.0
    with pytest.raises(PageTimeout):
        await do(page, CLICK)
    other = await web_pool.acquire()
    await other.goto(f"{web.url}/index")
    assert (await other.settle()).title == "index"
    await web_pool.release(page)
    await web_pool.release(other)


async def test_settling_waits_for_the_network_and_for_animations_that_end(web: FaultSite, page: Page) -> None:
    """A click whose page comes after 0.8 s is seen on that page; what moves is seen where it comes to rest."""
    await visit(page, f"{web.url}/slow")
    assert (await do(page, CLICK))[1] == "late"
    await visit(page, f"{web.url}/moving")
    await page.settle()
    assert await page.evaluate("() => document.querySelector('#m').getBoundingClientRect().left") == 100


async def test_every_episode_has_a_context_of_its_own(web: FaultSite, web_pool: PagePool) -> None:
    """No cookie, no storage, no tab of the one before."""
    for _ in range(3):
        page = await web_pool.acquire()
        for title in ("|", "k=1|v"):
            await visit(page, f"{web.url}/storage")
            assert (await page.settle()).title == title
        await web_pool.release(page)
