"""Chromium through Playwright: processes, pages with deadlines, the computer_use actions, the sandbox."""

from megatron_webrl.browser.actions import (
    ACTIONS,
    DIRECTIONS,
    MAX_WAIT_S,
    SCALE,
    check_action,
    from_pixels,
    perform,
    to_pixels,
)
from megatron_webrl.browser.chromium import Chromium, find_chromium
from megatron_webrl.browser.faults import BrowserFault, PageError, PageTimeout, SiteBlocked
from megatron_webrl.browser.page import Page
from megatron_webrl.browser.pool import PagePool
from megatron_webrl.browser.sandbox import AllowList

__all__ = [
    "ACTIONS",
    "DIRECTIONS",
    "MAX_WAIT_S",
    "SCALE",
    "AllowList",
    "BrowserFault",
    "Chromium",
    "Page",
    "PageError",
    "PagePool",
    "PageTimeout",
    "SiteBlocked",
    "check_action",
    "find_chromium",
    "from_pixels",
    "perform",
    "to_pixels",
]
