"""Where pages may go: an allow-list of folders and hosts, and which addresses are nobody's to reach.

It is held at three places: asked before a navigation (`Page.goto`), at the network layer (files: a route; hosts: the
gateway, which is a context's only way out), and in Chromium's own resolver, which knows no host at all.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from megatron_webrl.config import BrowserConfig

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Route

DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
NEVER = tuple(
    ipaddress.ip_network(network)
    for network in ("169.254.0.0/16", "fe80::/10", "fd00:ec2::/32", "100.100.100.200/32", "192.0.0.192/32")
)
"""Link-local, and where clouds keep the metadata and credentials of their machines."""
HARMLESS = ("about:blank", "about:srcdoc", "chrome-error://chromewebdata/")
"""Pages that come from nowhere: blank ones, and Chromium's word that another did not load."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class AllowList:
    """folders: file: URLs are allowed under these (symbolic links resolved) and nowhere else.
    hosts, denied, private: see browser.allow_hosts, deny_hosts and private_hosts.  Every scheme but file, http and https is
    refused."""

    folders: tuple[Path, ...] = ()
    hosts: frozenset[str] = frozenset()
    denied: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()

    @classmethod
    def of_web(cls, config: BrowserConfig, folders: tuple[Path, ...] = ()) -> AllowList:
        """What the configuration allows."""
        lists = (config.allow_hosts, config.deny_hosts, config.private_hosts)
        return cls(folders, *map(frozenset, lists))

    def permits(self, url: str) -> bool:
        """Whether a page may load `url`, as far as its text tells."""
        try:
            parts = urlsplit(url)
            if parts.scheme == "file":
                path = Path(unquote(parts.path)).resolve()
                return not parts.netloc and any(path.is_relative_to(folder.resolve()) for folder in self.folders)
            return parts.scheme in ("http", "https") and self.permits_host(*site_of(url))
        except (ValueError, OSError):  # malformed URL, null byte in a path, loop of links
            return False

    def permits_host(self, host: str, port: int) -> bool:
        """Whether the network may be asked for it."""
        if not listed(self.hosts, host, port) or listed(self.denied, host, port):
            return False
        try:
            literal = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return True
        return self.permits_address(host, port, literal)

    def permits_address(self, host: str, port: int, address: Address) -> bool:
        """Whether `host` may have that address: a public one, or a private one of a host that is said to have it."""
        address = _embedded(address)
        if any(address in network for network in NEVER if network.version == address.version):
            return False
        return (address.is_global and not address.is_multicast) or listed(self.private, host, port)

    @property
    def host_rules(self) -> str:
        """Value of Chromium's --host-resolver-rules: it resolves nothing, whoever asks; the gateway has a literal address."""
        return "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1" if self.hosts else "MAP * ~NOTFOUND"

    async def install(self, context: BrowserContext) -> None:
        """Abort what is not permitted, in every page of `context`.  (A route switches the HTTP cache off, so there is none
        where only hosts are allowed: a page of the web cannot open files, and the gateway holds the rest.)"""
        if self.hosts and not self.folders:
            return

        async def decide(route: Route) -> None:
            if self.permits(route.request.url):
                await route.continue_()
            else:
                await route.abort("blockedbyclient")

        await context.route(_unsure(self.folders), decide)


@cache
def _unsure(folders: tuple[Path, ...]) -> re.Pattern[str]:
    """Which URLs need a decision: all but plain paths under folders that hold no symbolic link.  (The driver passes those by
    itself; each decision costs it and us some milliseconds.)"""
    plain = []
    for folder in folders:
        inside = (
            name for path, names, files in os.walk(folder) for name in (os.path.join(path, n) for n in names + files)
        )
        if folder.resolve() == folder and not any(map(os.path.islink, inside)):
            plain.append(re.escape(folder.as_uri()) + r"/[A-Za-z0-9_/.-]*(?:[?#].*)?$")
    return re.compile(f"^(?!{'|'.join(plain)})" if plain else "")


def site_of(url: str) -> tuple[str, int]:
    """Host and port of a URL; ("", 0) where it has none."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        return "", 0


def listed(patterns: Collection[str], host: str, port: int) -> bool:
    """Whether one of `patterns`, lower case, names the host (see browser.allow_hosts); an empty host is never named."""
    host = host.lower().rstrip(".")
    if not host:
        return False
    parents = [host, *(f"*.{host.split('.', n)[n]}" for n in range(1, host.count(".") + 1)), f"*.{host}", "*"]
    return any(name in patterns or f"{name}:{port}" in patterns for name in parents)


def _embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for (mapped, 6to4, NAT64), or itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in ipaddress.ip_network("64:ff9b::/96"):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
