"""Screenshots as patches: decoded once, in the background and on several cores, and kept within a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from torch import Tensor

from megatron_webrl.errors import UserError
from megatron_webrl.processor import Grid, Processor

DECODE_TIMEOUT_S = 120.0
"""Longest wait for one image, whatever is being decoded before it."""


@dataclass
class _Image:
    data: bytes
    patches: Future[tuple[Tensor, Grid]] | None = None


class PixelStore:
    """Patches of screenshots by digest; only the lead of a data-parallel shard has one.

    threads: that decode; limit_bytes: of patches held.  Beyond it the least recently used go: those of the present step are
    decoded again when they are wanted, others are forgotten.  Thread-safe.
    """

    def __init__(self, processor: Processor, *, threads: int, limit_bytes: int) -> None:
        self._processor = processor
        self._limit = limit_bytes
        self._threads = ThreadPoolExecutor(threads, "decode")
        self._lock = threading.RLock()  # a future that is done already calls back at once
        self._images: OrderedDict[str, _Image] = OrderedDict()
        self._step: frozenset[str] = frozenset()
        self.bytes = 0
        """Of patches held."""

    def lacking(self, digests: Iterable[str]) -> list[str]:
        """Those whose bytes are not here, sorted."""
        with self._lock:
            return sorted(set(digests) - set(self._images))

    @property
    def crowded(self) -> bool:
        """Whether half of the bound is used, so that no more should be decoded ahead."""
        return 2 * self.bytes >= self._limit

    def settle(self) -> None:
        """Return when all that was added is decoded, or after a deadline."""
        with self._lock:
            futures = [image.patches for image in self._images.values() if image.patches is not None]
        wait(futures, DECODE_TIMEOUT_S)

    def add(self, images: Mapping[str, bytes]) -> None:
        """Begin to decode encoded images by digest."""
        with self._lock:
            for digest, data in images.items():
                if digest not in self._images:
                    self._images[digest] = _Image(data)
                    self._decode(digest)

    def begin_step(self, digests: Iterable[str]) -> None:
        """From now on these are wanted; all must have been added.  What an earlier step wanted goes first."""
        with self._lock:
            for digest in self._step.difference(digests):
                self._forget(digest)
            self._step = frozenset(digests)

    def get(self, wanted: Mapping[str, Grid]) -> list[Tensor]:
        """Patches uint8 [h·w, C·P·P] of each image, in order of `wanted`.

        Raises KeyError for an image that was never added, UserError if one cannot be decoded or has another grid than its
        reference says.
        """
        with self._lock:
            for digest in wanted:
                if self._images[digest].patches is None:
                    self._decode(digest)
                self._images.move_to_end(digest)
            futures = {digest: self._images[digest].patches for digest in wanted}
        out = []
        for digest, future in futures.items():
            assert future is not None
            try:
                patches, grid = future.result(DECODE_TIMEOUT_S)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"screenshot {digest} cannot be decoded ({error}): its worker sent a broken image"
                ) from None
            if grid != wanted[digest]:
                raise UserError(
                    f"screenshot {digest} becomes {grid} patches, but its reference says {wanted[digest]}: the trainer's "
                    "processor files differ from the workers'"
                )
            out.append(patches)
        return out

    def close(self) -> None:
        """Decode no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _decode(self, digest: str) -> None:
        image = self._images[digest]
        image.patches = future = self._threads.submit(self._processor.patches, image.data)
        future.add_done_callback(lambda done: self._decoded(image, done))

    def _decoded(self, image: _Image, done: Future[tuple[Tensor, Grid]]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        with self._lock:
            if image.patches is not done:  # forgotten meanwhile
                return
            self.bytes += done.result()[0].nbytes
            for digest in list(self._images):
                if self.bytes <= self._limit:
                    break
                if self._images[digest] is not image:
                    self._forget(digest, bytes_too=digest not in self._step)

    def _forget(self, digest: str, *, bytes_too: bool = True) -> None:
        image = self._images[digest]
        if image.patches is not None and image.patches.done() and image.patches.exception() is None:
            self.bytes -= image.patches.result()[0].nbytes
            image.patches = None
        elif image.patches is not None and not bytes_too:
            return  # on its way
        if bytes_too:
            image.patches = None
            del self._images[digest]
