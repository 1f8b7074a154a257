"""Attempts to get out, on a site that is allowed: to files, to this machine, to metadata, by redirect, name, worker, tab."""

import ipaddress
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fault_site import FaultSite

from megatron_webrl.browser import AllowList, Page, PageError, PagePool, perform
from megatron_webrl.browser import gateway as gateway_module
from megatron_webrl.config import BrowserConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

PASSWORD = "correct horse"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def inside(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultSite]:
    """A service of this machine that no page may reach."""
    async with FaultSite().serving(tmp_path_factory.mktemp("tls")) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultSite]:
    """The site that is allowed."""
    async with FaultSite().serving(tmp_path_factory.mktemp("tls")) as site:
        yield site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def config(web: FaultSite) -> BrowserConfig:
    return BrowserConfig(
        slots=2,
        viewport=(300, 200),
        settle_limit_s=1.5,
        private_hosts=[f"localhost:{web.port}", f"login.test:{web.port}", "169.254.169.254"],
        credentials={f"login.test:{web.port}": [PASSWORD]},
    )


NAMES = {
    "public.test": ["93.184.215.14"],
    "inner.test": ["10.0.0.7"],
    "both.test": ["93.184.215.14", "127.0.0.1"],
    "mapped.test": ["::ffff:127.0.0.1"],
    "meta.test": ["169.254.169.254"],
    "login.test": ["127.0.0.1"],
    "localhost": ["127.0.0.1"],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web_pool(config: BrowserConfig) -> AsyncIterator[PagePool]:
    """Names resolve as NAMES says, literal addresses as themselves."""

    async def resolve(host: str, port: int) -> list[str]:
        if host in NAMES:
            return NAMES[host]
        return [str(ipaddress.ip_address(host))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway_module, "resolve", resolve)
        pool = PagePool(config, AllowList.of_web(config))
        yield pool
        await pool.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(web_pool: PagePool, web: FaultSite, inside: FaultSite) -> AsyncIterator[Page]:
    inside.heard.clear()
    page = await web_pool.acquire()
    await page.goto(f"{web.url}/index")
    await page.settle()
    yield page
    await web_pool.release(page)
    assert inside.heard == [], "somebody got in"


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "view-source:file:///etc/passwd",
        "chrome://version",
        "data:text/html,<h1>hello</h1>",
        "javascript:document.title='x'",
        "ftp://example.org/",
        "blob:null/1",
        "http://169.254.169.254/latest/meta-data/",
        "http://[fd00:ec2::254]/",
        "http://127.0.0.1:{port}/index",
        "http://[::1]:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://10.0.0.1/",
    ],
)
async def test_the_agent_cannot_navigate_out(page: Page, web: FaultSite, inside: FaultSite, url: str) -> None:
    """By what the address says: refused before anything is asked, also where the list names a metadata address."""
    error = await perform(page, {"action": "navigate", "url": url.format(port=inside.port)})
    assert "not allowed" in error
    assert page.url == f"{web.url}/index"


@pytest.mark.parametrize(
    "name", ["inner.test", "both.test", "mapped.test", "meta.test", "127.1", "0x7f.1", "2130706433"]
)
async def test_a_name_that_means_a_private_address_is_refused_after_resolution(
    page: Page, inside: FaultSite, name: str
) -> None:
    """Also if it has a public address beside; what kind of number it is written as does not matter."""
    await perform(page, {"action": "navigate", "url": f"http://{name}:{inside.port}/index"})
    await perform(page, {"action": "navigate", "url": f"https://{name}:{inside.port}/index"})
    facts = await page.settle()
    assert facts.title != "index"
    notes = page.take_notes()
    assert notes
    assert all("not public" in note or "not allowed" in note for note in notes)


async def test_a_redirect_to_this_machine_is_refused_and_told(page: Page, web: FaultSite, inside: FaultSite) -> None:
    for target in (inside.url, f"http://127.0.0.1:{inside.port}", "http://169.254.169.254", "file:///etc/passwd"):
        error = await perform(page, {"action": "navigate", "url": f"{web.url}/to?url={target}/index"})
        facts = await page.settle()
        assert facts.title != "index"
        assert error or page.take_notes()
        assert "root:" not in await page.evaluate("() => document.documentElement.innerText")


async def test_a_page_reaches_nothing_by_itself(page: Page, inside: FaultSite) -> None:
    """No fetch, image, beacon, socket, event source, frame, form, worker, WebRTC candidate or prefetch gets through."""
    tries = """async (host) => {
      const url = `http://${host}/index`;
      const add = (tag, set) => {
        const e = Object.assign(document.createElement(tag), set);
        document.body.append(e);
        return e;
      };
      new Image().src = url; navigator.sendBeacon(url, 'x'); new EventSource(url); new WebSocket(`ws://${host}/`);
      add('iframe', {src: url}); add('iframe', {src: 'file:///etc/passwd'}); add('link', {rel: 'prefetch', href: url});
      add('link', {rel: 'preconnect', href: url}); add('script', {src: url}); add('object', {data: url});
      add('form', {action: url, method: 'post', target: '_blank'}).submit();
      const worker = new Worker(URL.createObjectURL(new Blob([`fetch(${JSON.stringify(url)}, {mode: 'no-cors'})`])));
      const peer = new RTCPeerConnection({iceServers: [{urls: `stun:${host}`}, {urls: `turn:${host}?transport=tcp`,
        username: 'u', credential: 'c'}]});
      peer.createDataChannel('x'); peer.setLocalDescription(await peer.createOffer());
      try { new WebTransport(`https://${host}/`); } catch {}
      await fetch(url, {mode: 'no-cors'}).catch(() => {});
      await new Promise(done => setTimeout(done, 700));
      worker.terminate();
    }"""
    for host in (f"127.0.0.1:{inside.port}", f"localhost:{inside.port}", f"inner.test:{inside.port}"):
        await page.evaluate(tries, host)
    assert "root:" not in "".join(
        [await f.evaluate("() => document.documentElement.innerText") for f in page.raw.frames]
    )
    assert any("not public" in note or "not allowed" in note for note in page.take_notes())


@pytest.mark.parametrize("how", ["window.open('{}')", "location.href = '{}'", "document.write('<iframe src={}>')"])
@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "chrome://version", "data:text/html,<title>data</title>", "{inside}"]
)
async def test_a_page_opens_nothing_outside(page: Page, inside: FaultSite, how: str, url: str) -> None:
    """Tabs, navigations and frames to files, Chromium's own pages, data: documents and this machine."""
    await page.evaluate(f"() => {{ {how.format(url.format(inside=inside.url))}; }}")
    facts = await page.settle()
    assert facts.title not in ("data", "About Version")
    for frame in page.raw.frames:
        assert not frame.url.startswith(("file:", "chrome:"))


async def test_service_workers_are_refused(page: Page, web: FaultSite) -> None:
    """They would go on between pages."""
    await page.goto(f"{web.url}/worker")
    await page.settle()
    assert await page.evaluate("() => navigator.serviceWorker?.getRegistrations().then(r => r.length) ?? 0") == 0
    assert "/sw.js" not in web.heard


async def test_a_page_s_own_files_do_not_open_others_to_the_web(
    web: FaultSite, config: BrowserConfig, tmp_path: Path
) -> None:
    """Folders and hosts allowed together: each keeps to its own."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "index.html").write_text("<title>local</title>")
    (tmp_path / "secret.html").write_text("<title>secret</title>")
    pool = PagePool(config, AllowList.of_web(config, (folder,)))
    try:
        page = await pool.acquire()
        await page.goto((folder / "index.html").as_uri())
        assert (await page.settle()).title == "local"
        assert "not allowed" in await perform(page, {"action": "navigate", "url": (tmp_path / "secret.html").as_uri()})
        with pytest.raises(PageError):
            await page.call(page.raw.goto((tmp_path / "secret.html").as_uri()))
        await page.goto(f"{web.url}/index")
        assert (await page.settle()).title == "index"
    finally:
        await pool.close()


TYPE = {"action": "type", "coordinate": [500, 250], "text": PASSWORD}


async def test_secrets_are_typed_on_their_own_hosts_only(page: Page, web: FaultSite) -> None:
    """Into a password field nothing goes elsewhere, a secret nowhere elsewhere: no field, no address, no frame, no key."""
    value = "() => document.querySelectorAll('input')[{}].value"
    await page.goto(f"{web.url}/login")
    await page.settle()
    assert "typing refused" in await perform(page, TYPE)
    assert "typing refused" in await perform(page, {**TYPE, "text": "other"})
    assert "typing refused" in await perform(page, {"action": "key", "keys": ["a"]})
    assert "secret" in await perform(page, {**TYPE, "coordinate": [500, 750], "text": f"my {PASSWORD}"})
    assert await perform(page, {**TYPE, "coordinate": [500, 750], "text": "other"}) == ""
    assert await page.evaluate(value.format(0)) == ""
    assert await page.evaluate(value.format(1)) == "other"
    assert "secret" in await perform(page, {"action": "navigate", "url": f"{web.url}/index?{PASSWORD}"})

    home = f"http://login.test:{web.port}"
    await page.goto(f"{home}/login")
    await page.settle()
    assert await perform(page, TYPE) == ""
    assert await page.evaluate(value.format(0)) == PASSWORD
    for frame, refused in ((f"{web.url}/login", True), (f"{home}/login", False)):  # the frame has the field
        await page.goto(f"{home}/frame?url={frame}")
        await page.settle()
        assert ("refused" in await perform(page, TYPE)) == refused
    await page.goto(f"{web.url}/frame?url={home}/login")  # a foreign page around it
    await page.settle()
    assert "typing refused" in await perform(page, TYPE)
