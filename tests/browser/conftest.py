from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from megatron_webrl.browser import AllowList, Page, PagePool
from megatron_webrl.config import BrowserConfig

PAGE = """<title>field</title><style>body {margin: 0} * {caret-color: transparent}</style>
<input id=a style="position:absolute;left:10px;top:10px;width:100px" value=old>
<div style="position:absolute;top:900px;left:0;width:50px;height:50px;background:red"></div>
<script>
const seen = [];
for (const kind of ['click', 'dblclick', 'contextmenu', 'keydown', 'mousemove'])
  addEventListener(kind, e => seen.push([kind, e.key ?? null, e.clientX ?? null, e.clientY ?? null]));
</script>"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one page, the only thing that the browser may open."""
    folder = tmp_path_factory.mktemp("web") / "site"
    folder.mkdir()
    (folder / "index.html").write_text(PAGE)
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    return folder


@pytest.fixture(scope="session")
def config() -> BrowserConfig:
    return BrowserConfig(slots=2, viewport=(300, 200), screenshot=(160, 100), action_timeout_s=10)


@pytest.fixture
async def pool(site: Path, config: BrowserConfig) -> AsyncIterator[PagePool]:
    """A browser of the test's own."""
    pool = PagePool(config, AllowList(folders=(site,)))
    yield pool
    await pool.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pool(site: Path, config: BrowserConfig) -> AsyncIterator[PagePool]:
    """One browser for all tests of a module that runs in one event loop."""
    pool = PagePool(config, AllowList(folders=(site,)))
    yield pool
    await pool.close()


@pytest.fixture
async def page(pool: PagePool, site: Path) -> Page:
    """A page of the test's own browser."""
    page = await pool.acquire("site")
    await page.goto((site / "index.html").as_uri())
    return page
