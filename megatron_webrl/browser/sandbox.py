"""Where pages may go: an allow-list of folders and hosts, held at the network layer and asked before navigation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Route


@dataclass(frozen=True)
class AllowList:
    """folders: file: URLs are allowed under these (symbolic links resolved) and nowhere else.
    hosts: http(s) is allowed to exactly these host names.  Every other scheme is refused."""

    folders: tuple[Path, ...] = ()
    hosts: frozenset[str] = frozenset()

    def permits(self, url: str) -> bool:
        """Whether a page may load `url`."""
        try:
            parts = urlsplit(url)
            if parts.scheme == "file":
                path = Path(unquote(parts.path)).resolve()
                return not parts.netloc and any(path.is_relative_to(folder.resolve()) for folder in self.folders)
            return parts.scheme in ("http", "https") and parts.hostname in self.hosts
        except (ValueError, OSError):  # malformed URL, null byte in a path, loop of links
            return False

    @property
    def host_rules(self) -> str:
        """Value of Chromium's --host-resolver-rules: every other host does not resolve, whoever asks for it."""
        return ", ".join(["MAP * ~NOTFOUND", *(f"EXCLUDE {host}" for host in sorted(self.hosts))])

    async def install(self, context: BrowserContext) -> None:
        """Abort what is not permitted, in every page of `context`."""

        async def decide(route: Route) -> None:
            if self.permits(route.request.url):
                await route.continue_()
            else:
                await route.abort("blockedbyclient")

        await context.route("**/*", decide)
