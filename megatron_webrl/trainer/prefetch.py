"""Screenshots of groups that are still queued, fetched and decoded before a batch is cut from them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from megatron_webrl.screenshots import IMAGES_A_MESSAGE, fetch_images
from megatron_webrl.trainer.pixels import PixelStore
from megatron_webrl.trainer.schedule import share_out
from megatron_webrl.wire import BlockingClient, Keys, WireError
from megatron_webrl.wire.messages import ListUpcoming, Upcoming

log = logging.getLogger(__name__)

POLL_S = 1.0
REQUEST_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0


class Prefetcher:
    """A thread of a data-parallel shard's lead that keeps `pixels` ahead of the trainer, within half of its bound.

    It guesses which groups the shard will get: all of them if there is one shard, else as `share_out` would share out
    what is queued now.  A wrong guess costs a fetch, and is forgotten when its group has left the queue.
    """

    def __init__(
        self,
        pixels: PixelStore,
        *,
        coordinator_address: str,
        store_address: str,
        run_id: str,
        keys: Keys | None,
        name: str,
        shard: int,
        shards: int,
        version: Callable[[], int],
    ) -> None:
        self._pixels = pixels
        self._addresses = (coordinator_address, store_address)
        self._run_id, self._name, self._keys = run_id, name, keys
        self._shard, self._shards = shard, shards
        self._version = version
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; returns when the thread has ended, or waits for a reply that it will make nothing of."""
        self._stop.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        coordinator, store = (
            BlockingClient(address, self._run_id, self._name, keys=self._keys) for address in self._addresses
        )
        try:
            while not self._stop.wait(POLL_S):
                try:
                    self._once(coordinator, store)
                except WireError as error:  # the trainer itself asks the same, and is the one to say so
                    log.debug("prefetch: %s", error)
                except Exception:  # the trainer goes on without; but it will have to wait for pixels
                    log.exception("prefetching screenshots failed")
        finally:
            coordinator.close()
            store.close()

    def _once(self, coordinator: BlockingClient, store: BlockingClient) -> None:
        if self._version() < 0:
            return
        question = ListUpcoming(self._version())
        groups = coordinator.request(question, timeout=REQUEST_TIMEOUT_S, expect=Upcoming).groups
        self._pixels.keep_ahead(digest for _, digests in groups for digest in digests)
        sizes = [len(digests) for _, digests in groups]
        mine = share_out(range(len(groups)), sizes, self._shards)[self._shard]
        lacking = self._pixels.lacking(digest for p in sorted(mine) for digest in groups[p][1])
        for first in range(0, len(lacking), IMAGES_A_MESSAGE):
            if self._stop.is_set() or self._pixels.far_ahead:
                return
            images, _ = fetch_images(store, lacking[first : first + IMAGES_A_MESSAGE])
            if self._stop.is_set():
                return
            self._pixels.add(images)
            self._pixels.settle()
