"""The coordinator's side of the screenshot store: what may go, what is full, and what it lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from megatron_webrl.trajectory import AttemptKey
from megatron_webrl.wire import Client, WireError
from megatron_webrl.wire.messages import (
    Done,
    KeepImages,
    Lacking,
    LackingImages,
    ReleaseImages,
    StoreState,
    StoreStatus,
)

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
HIGH_WATER = 0.8
"""Share of the store in use above which no new group begins."""
KEEP_EVERY_S = 60.0
"""How often the store is told who may own screenshots."""
KEEP_OLDER_THAN_S = 300.0
"""A younger owner may be one that the list did not know yet."""
DROP_AFTER_S = 20.0
"""Uploads have waited so long for room: groups that are not complete must give way, one in so many seconds."""


class ScreenshotKeeper:
    """Asks the store at `client`.  owners: the attempts that may own screenshots now."""

    def __init__(self, client: Client, owners: Callable[[], list[AttemptKey]]) -> None:
        self.full = self.crowded = False
        """No new groups: it is crowded, or does not answer.  Crowded: above high water, or uploads wait for room."""
        self.state = StoreState(0, 0, 0, 0, 0)
        self._client = client
        self._owners = owners
        self._to_release: list[AttemptKey] = []
        self._held: dict[AttemptKey, int] = {}
        self._kept_at = time.monotonic()
        self._waiting_since: float | None = None

    def hold(self, keys: Iterable[AttemptKey]) -> None:
        """Do not release these until `let_go`, whatever becomes of them."""
        for key in keys:
            self._held[key] = self._held.get(key, 0) + 1

    def let_go(self, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    def release(self, keys: list[AttemptKey]) -> None:
        """These attempts need no screenshots any more; said to the store at the next `turn`."""
        self._to_release += keys

    async def turn(self) -> None:
        """Housekeeping: release what may go, ask how full the store is, now and then say who may own anything at all."""
        try:
            if now := [key for key in self._to_release if key not in self._held]:
                await self._client.request(ReleaseImages(now), timeout=TIMEOUT_S, expect=Done)
                gone = set(now)
                self._to_release = [key for key in self._to_release if key not in gone]
            if time.monotonic() - self._kept_at > KEEP_EVERY_S:
                owners = [*self._owners(), *self._held, *self._to_release]
                await self._client.request(KeepImages(owners, KEEP_OLDER_THAN_S), timeout=TIMEOUT_S, expect=Done)
                self._kept_at = time.monotonic()
            self.state = await self._client.request(StoreStatus(), timeout=TIMEOUT_S, expect=StoreState)
        except WireError as error:  # all of it is said again
            if not self.full:
                log.warning("screenshot store: %s; no new groups until it answers", error)
            self.full = True
            return
        self.crowded = full = self.state.bytes > HIGH_WATER * self.state.limit_bytes or self.state.waiting > 0
        if full != self.full:
            verb = "wait" if full else "begin"
            log.warning(
                "screenshot store: %d of %d bytes: new groups %s", self.state.bytes, self.state.limit_bytes, verb
            )
        self.full = full

    def must_drop(self) -> bool:
        """Whether uploads have waited for room so long that a group that is not complete is to be dropped; then not again for
        as long."""
        now = time.monotonic()
        if not self.state.waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > DROP_AFTER_S:
            self._waiting_since = now
            return True
        return False

    async def lacking(self, digests: list[str]) -> set[str]:
        """Which of these the store lost.  Raises WireError."""
        found = await self._client.request(LackingImages(digests), timeout=TIMEOUT_S, expect=Lacking)
        return set(found.digests)
