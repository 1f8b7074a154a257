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

STALL_S = 120.0
"""Longest wait for an image while no image at all is decoded."""


@dataclass
class _Image:
    data: bytes
    patches: Future[tuple[Tensor, Grid]] | None = None
    counted: int = 0
    """Bytes of its patches that the store has counted as held."""


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
        self._decodings = 0
        self.bytes = 0
        """Of patches held."""

    # The trainer ----------------------------------------------------------------------------------------------------

    def begin_step(self, digests: Iterable[str]) -> list[str]:
        """From now on these are wanted, and what the step before wanted no more.  Returns those to `add`, sorted."""
        with self._lock:
            before, self._step = self._step, frozenset(digests)
            for digest in before - self._step:
                self._forget(digest)
            return sorted(self._step - set(self._images))

    def add(self, images: Mapping[str, bytes]) -> None:
        """Begin to decode encoded images by digest."""
        with self._lock:
            for digest, data in images.items():
                if digest not in self._images:
                    image = self._images[digest] = _Image(data)
                    self._decode(image)

    def get(self, wanted: Mapping[str, Grid]) -> list[Tensor]:
        """Patches uint8 [h·w, C·P·P] of each image, in order of `wanted`.

        Raises KeyError for an image that was never added, UserError if one cannot be decoded or has another grid than its
        reference says, or if decoding stands still.
        """
        with self._lock:
            futures = {}
            for digest in wanted:
                self._images.move_to_end(digest)
                image = self._images[digest]
                futures[digest] = image.patches or self._decode(image)
        out = []
        for digest, future in futures.items():
            try:
                patches, grid = self._result(future)
            except TimeoutError:
                raise UserError(
                    f"no screenshot was decoded for {STALL_S:.0f} s: give more cores, or set trainer.image_threads"
                ) from None
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

    # What decodes ahead of it ---------------------------------------------------------------------------------------

    def lacking(self, digests: Iterable[str]) -> list[str]:
        """Those whose bytes are not here, sorted."""
        with self._lock:
            return sorted(set(digests) - set(self._images))

    @property
    def far_ahead(self) -> bool:
        """Whether what the present step does not want fills half of the bound, or all of it with what it wants."""
        with self._lock:
            ahead = sum(image.counted for digest, image in self._images.items() if digest not in self._step)
            return 2 * ahead >= self._limit or (ahead > 0 and self.bytes >= self._limit)

    def keep_ahead(self, digests: Iterable[str]) -> None:
        """Forget what neither the present step wants nor these name."""
        with self._lock:
            for digest in set(self._images).difference(digests, self._step):
                self._forget(digest)

    def settle(self) -> None:
        """Return when all that was added is decoded, or after a deadline."""
        with self._lock:
            futures = [image.patches for image in self._images.values() if image.patches is not None]
        wait(futures, STALL_S)

    # Inside ---------------------------------------------------------------------------------------------------------

    def _decode(self, image: _Image) -> Future[tuple[Tensor, Grid]]:
        image.patches = future = self._threads.submit(self._processor.patches, image.data)
        future.add_done_callback(lambda done: self._decoded(image, done))
        return future

    def _decoded(self, image: _Image, done: Future[tuple[Tensor, Grid]]) -> None:
        with self._lock:
            self._decodings += 1
            if image.patches is not done or done.cancelled() or done.exception() is not None:
                return  # forgotten meanwhile, or of no use
            image.counted = done.result()[0].nbytes
            self.bytes += image.counted
            for digest, other in list(self._images.items()):
                if self.bytes <= self._limit:
                    break
                if other is not image and digest in self._step:
                    self._drop(other)
                elif other is not image:
                    self._forget(digest)

    def _result(self, future: Future[tuple[Tensor, Grid]]) -> tuple[Tensor, Grid]:
        """Raises TimeoutError when nothing is decoded any more, and what decoding raised."""
        while True:
            before = self._decodings
            wait([future], STALL_S)
            if future.done() or self._decodings == before:
                return future.result(0)

    def _drop(self, image: _Image) -> None:
        """Its patches, if they are here."""
        if image.counted:
            self.bytes -= image.counted
            image.patches, image.counted = None, 0

    def _forget(self, digest: str) -> None:
        if image := self._images.pop(digest, None):
            self._drop(image)
            image.patches = None
