"""The content-addressed screenshot store: encoded bytes by hash, bounded, with references.

An image is kept while a trajectory retains it, and for a grace after it was last put or asked about: between its upload
and the trajectory's acceptance nobody retains it yet.  What no one claims expires, so a killed worker leaks nothing.
When the store is full an upload waits for room; the coordinator begins no new groups long before that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from megatron_webrl.trajectory import AttemptKey, image_digest
from megatron_webrl.wire import Message, Server
from megatron_webrl.wire.messages import (
    Done,
    GetImages,
    Images,
    Lacking,
    LackingImages,
    PutImages,
    ReleaseImages,
    RetainImages,
    StoreState,
    StoreStatus,
)

GRACE_S = 120.0
PUT_WAIT_S = 30.0


class StoreFull(Exception):
    """No room came free before the deadline of the upload."""


class ScreenshotStore:
    """Images by digest.  limit_bytes: bound of all encoded bytes; clock: seconds, monotonic."""

    def __init__(
        self, limit_bytes: int, *, grace_s: float = GRACE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._grace_s = grace_s
        self._clock = clock
        self._images: dict[str, bytes] = {}
        self._references: dict[str, int] = {}
        self._owned: dict[AttemptKey, list[str]] = {}
        self._touched: dict[str, float] = {}

    def lacking(self, digests: list[str]) -> list[str]:
        """Those that are not here; the others are protected for the grace."""
        now = self._clock()
        for digest in digests:
            if digest in self._images:
                self._touched[digest] = now
        return [d for d in digests if d not in self._images]

    def put(self, images: dict[str, bytes]) -> bool:
        """Add images; False if there is no room for them now.  Raises ValueError for bytes that do not match their name
        and for more than the store can ever hold."""
        for digest, data in images.items():
            if image_digest(data) != digest:
                raise ValueError(f"image {digest} does not match its {len(data)} bytes")
        new = {d: data for d, data in images.items() if d not in self._images}
        size = sum(map(len, new.values()))
        if size > self.limit_bytes:
            raise ValueError(f"{size} bytes exceed replay.screenshot_bytes={self.limit_bytes}: raise it")
        if self.bytes + size > self.limit_bytes:
            self.sweep()
            if self.bytes + size > self.limit_bytes:
                return False
        self._images.update(new)
        self.bytes += size
        now = self._clock()
        self._touched.update(dict.fromkeys(images, now))
        return True

    def get(self, digests: list[str]) -> dict[str, bytes]:
        """Those that are here."""
        return {d: self._images[d] for d in digests if d in self._images}

    def retain(self, owner: AttemptKey, digests: list[str]) -> list[str]:
        """`owner` wants these kept: if all are here, else none, and the missing ones are returned.  A repeat (its reply may
        have come too late) changes nothing."""
        if owner in self._owned:
            return []
        missing = [d for d in digests if d not in self._images]
        if not missing:
            self._owned[owner] = digests
            for digest in digests:
                self._references[digest] = self._references.get(digest, 0) + 1
        return missing

    def release(self, owners: list[AttemptKey]) -> None:
        """They want nothing kept any more; unknown ones are ignored."""
        for owner in owners:
            for digest in self._owned.pop(owner, []):
                self._references[digest] -= 1
                if not self._references[digest]:
                    del self._references[digest]

    def sweep(self) -> int:
        """Delete what no one retains and no one touched within the grace; returns how many."""
        before = self._clock() - self._grace_s
        dead = [d for d, t in self._touched.items() if d not in self._references and t <= before]
        for digest in dead:
            self.bytes -= len(self._images.pop(digest))
            del self._touched[digest]
        return len(dead)

    def state(self) -> StoreState:
        return StoreState(len(self._images), self.bytes, self.limit_bytes)


async def serve_store(address: str, run_id: str, limit_bytes: int) -> None:
    """Run a store at `address` until cancelled."""
    store = ScreenshotStore(limit_bytes)

    async def lacking(_: str, message: LackingImages) -> Message:
        return Lacking(store.lacking(message.digests))

    async def put(sender: str, message: PutImages) -> Message:
        deadline = time.monotonic() + PUT_WAIT_S
        while not store.put(message.images):
            if time.monotonic() > deadline:
                raise StoreFull(
                    f"replay.screenshot_bytes={limit_bytes} are in use for {PUT_WAIT_S:.0f} s: raise the bound"
                )
            await asyncio.sleep(0.2)
        return Done()

    async def get(_: str, message: GetImages) -> Message:
        images = store.get(message.digests)
        return Images(images, [d for d in message.digests if d not in images])

    async def retain(_: str, message: RetainImages) -> Message:
        return Lacking(store.retain(message.owner, message.digests))

    async def release(_: str, message: ReleaseImages) -> Message:
        store.release(message.owners)
        return Done()

    async def status(_: str, message: StoreStatus) -> Message:
        return store.state()

    server = Server(
        address,
        run_id,
        {
            LackingImages: lacking,
            PutImages: put,
            GetImages: get,
            RetainImages: retain,
            ReleaseImages: release,
            StoreStatus: status,
        },
    )
    await server.start()
    try:
        while True:
            await asyncio.sleep(GRACE_S / 10)
            store.sweep()
    finally:
        await server.close()
