import asyncio
import io
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image, ImageChops, ImageStat

from megatron_webrl.browser import AllowList, Page, PageError, PagePool, PageTimeout, perform
from megatron_webrl.config import BrowserConfig
from megatron_webrl.screenshots import image_size, is_jpeg

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def page(shared_pool: PagePool, site: Path) -> AsyncIterator[Page]:
    page = await shared_pool.acquire("site")
    await page.goto((site / "index.html").as_uri(), until="load")
    yield page
    await shared_pool.release(page, reusable=False)


TEXT = "() => document.body.innerText"


async def test_clicks_land_where_they_are_named(page: Page) -> None:
    """[500, 500] of a 160×100 view is pixel (80, 50)."""
    for action in ("left_click", "double_click", "right_click", "mouse_move"):
        assert await perform(page, {"action": action, "coordinate": [500, 500]}) == ""
    seen = {kind: (x, y) for kind, _, x, y in await page.evaluate("() => seen")}
    assert set(seen) == {"click", "dblclick", "contextmenu", "mousemove"}
    assert set(seen.values()) == {(80, 50)}


async def test_type_replaces_what_a_field_held(page: Page) -> None:
    """With a coordinate the field is cleared first; without, text goes where the focus is; Enter on request only."""
    value = "() => document.querySelector('#a').value"
    assert await perform(page, {"action": "type", "coordinate": [200, 200], "text": "new"}) == ""
    assert await page.evaluate(value) == "new"
    assert await perform(page, {"action": "type", "text": "er", "press_enter": True}) == ""
    assert await page.evaluate(value) == "newer"
    assert [key for kind, key, *_ in await page.evaluate("() => seen") if kind == "keydown"][-1] == "Enter"
    assert await perform(page, {"action": "key", "keys": ["ctrl", "a"]}) == ""
    assert await perform(page, {"action": "key", "keys": ["delete"]}) == ""
    assert await page.evaluate(value) == ""
    await perform(page, {"action": "type", "coordinate": [200, 200], "text": "x"})
    await perform(page, {"action": "type", "coordinate": [200, 200], "text": ""})
    assert await page.evaluate(value) == ""


async def test_the_screenshot_is_the_view_at_its_scroll_offset(page: Page) -> None:
    """PNG of the clip's size, also after scrolling."""
    first = Image.open(io.BytesIO(await page.screenshot()))
    assert first.format == "PNG"
    assert first.size == (160, 100)
    for _ in range(20):
        await perform(page, {"action": "scroll", "direction": "down"})
    x, y = await page.evaluate("() => [scrollX, scrollY]")
    assert y == 750  # of 950 in a viewport of 200
    scrolled = Image.open(io.BytesIO(await page.screenshot((x, y)))).convert("RGB")
    assert scrolled.getpixel((10, 99)) == (255, 255, 255)
    await page.evaluate("() => scrollTo(0, 880)")
    await page.evaluate("() => document.body.style.height = '2000px'")
    await page.evaluate("() => scrollTo(0, 880)")
    assert Image.open(io.BytesIO(await page.screenshot((0, 880)))).convert("RGB").getpixel((10, 30)) == (255, 0, 0)


async def test_screenshots_are_encoded_as_configured(site: Path, config: BrowserConfig) -> None:
    """The same view each time, and the same bytes for the same view: an unchanged page is seen as unchanged."""
    gradient = "() => document.body.style.background = 'linear-gradient(45deg, red, blue)'"
    taken = []
    for encoding, quality in (("png", 90), ("jpeg", 90), ("jpeg", 30)):
        settings = config.model_copy(update={"screenshot_format": encoding, "jpeg_quality": quality})
        pool = PagePool(settings, AllowList(folders=(site,)))
        page = await pool.acquire("site")
        await page.goto((site / "index.html").as_uri(), until="load")
        await page.evaluate(gradient)
        data, again = await page.screenshot(), await page.screenshot()
        await pool.close()
        assert data == again
        assert image_size(data) == (160, 100)
        assert is_jpeg(data) == (encoding == "jpeg")
        taken.append(data)
    png, fine, coarse = (Image.open(io.BytesIO(data)).convert("RGB") for data in taken)
    errors = [max(ImageStat.Stat(ImageChops.difference(png, jpeg)).mean) for jpeg in (fine, coarse)]
    assert 0 < errors[0] < errors[1] < 5
    assert len(taken[2]) < len(taken[1])


REFUSED = (
    "file:///etc/passwd",
    "file://localhost/etc/passwd",
    "view-source:file:///etc/passwd",
    "http://127.0.0.1:1/",
    "http://169.254.169.254/latest/meta-data/",
    "https://example.com/",
    "chrome://version",
    "data:text/html,hello",
    "javascript:document.title='x'",
    "about:blank",
    "nonsense",
)


async def test_navigation_outside_the_allow_list_is_told_and_does_not_happen(page: Page) -> None:
    """The page stays where it was, and the agent hears of it."""
    before = page.url
    for url in REFUSED:
        assert "not allowed" in await perform(page, {"action": "navigate", "url": url})
    assert page.url == before


async def test_the_network_layer_holds_the_allow_list_too(page: Page, site: Path) -> None:
    """Without the check before navigation: no file outside, no link out of the folder, no host, no frame, no pop-up."""
    for url in ("file:///etc/passwd", (site / "link.txt").as_uri(), "http://127.0.0.1:1/", "http://example.com/"):
        await page.goto((site / "index.html").as_uri(), until="load")
        with pytest.raises(PageError, match="BLOCKED_BY_CLIENT"):
            await page.call(page.raw.goto(url))
    await page.goto((site / "index.html").as_uri(), until="load")
    await page.evaluate("() => { window.open('file:///etc/passwd'); }")
    frame = """(url) => new Promise(done => { const f = document.createElement('iframe'); f.src = url;
        f.onload = () => done('loaded'); setTimeout(() => done('nothing'), 500); document.body.append(f); })"""
    await page.evaluate(frame, (site / "link.txt").as_uri())
    assert "secret" not in "".join([await f.evaluate(TEXT) for f in page.raw.frames if not f.is_detached()])


async def test_nothing_reaches_a_service_of_this_machine(page: Page) -> None:
    """A listener on loopback hears of no fetch, image, form, beacon, socket or event source, by address or by name."""
    heard: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append((await reader.read(200)).decode(errors="replace"))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    tries = """async (host) => {
      const url = `http://${host}/`, socket = new WebSocket(`ws://${host}/`);
      const form = document.createElement('form');
      form.action = url; form.method = 'post'; form.target = '_blank'; document.body.append(form); form.submit();
      new Image().src = url; navigator.sendBeacon(url, 'x'); new EventSource(url);
      await fetch(url, {mode: 'no-cors'}).catch(() => {});
      await new Promise(done => { socket.onclose = socket.onerror = done; setTimeout(done, 2000); });
      await new Promise(done => setTimeout(done, 300));
    }"""
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::ffff:127.0.0.1]:{port}"):
        await page.evaluate(tries, host)
    server.close()
    assert heard == []


async def test_a_hung_page_times_out_and_the_pool_goes_on(shared_pool: PagePool, site: Path) -> None:
    """An endless loop costs action_timeout_s, not the worker."""
    page = await shared_pool.acquire("site")
    await page.goto((site / "index.html").as_uri(), until="load")
    page.timeout_s = 1.0
    began = time.monotonic()
    with pytest.raises(PageTimeout):
        await page.evaluate("() => { for (;;) {} }")
    await shared_pool.release(page, reusable=False)
    assert time.monotonic() - began < 8
    other = await shared_pool.acquire("site")
    await other.goto((site / "index.html").as_uri(), until="load")
    assert await other.evaluate("() => document.title") == "field"
    await shared_pool.release(other, reusable=False)
