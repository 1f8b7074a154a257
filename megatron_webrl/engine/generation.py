"""The generation side of an engine host: the gate that opens when it serves, the cache of image bytes, and the form
that a request takes in SGLang.  Nothing here does input or output.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_webrl.screenshots import is_jpeg
from megatron_webrl.trajectory import FLOAT32, INT32, pack, unpack
from megatron_webrl.wire.messages import Generate, Generated

IMAGE_CACHE_BYTES = 64 << 20
NEVER = -1e4
"""Added to the logit of a token that is never sampled; its probability is exactly 0 in float32 (JSON knows no −inf)."""
AFTER_JPEG = b"\0"
"""Decoders ignore it.  But SGLang on a GPU gives what ends as a JPEG must to nvJPEG, whose pixels are not those of PIL, which
the trainer and SGLang otherwise decode with."""


class ServingGate:
    """Open while the engine serves.  Counts the seconds it was shut, which are not the episodes'."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open = asyncio.Event()
        self._shut_since: float | None = clock()
        self._shut_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def open(self) -> None:
        """Let requests through."""
        if self._shut_since is not None:
            self._shut_s += self._clock() - self._shut_since
            self._shut_since = None
        self._open.set()

    def shut(self) -> None:
        """Hold requests back."""
        if self._shut_since is None:
            self._shut_since = self._clock()
        self._open.clear()

    async def wait(self) -> None:
        """Until it is open."""
        await self._open.wait()

    def shut_seconds(self) -> float:
        """Seconds shut since the beginning: take the difference of two readings."""
        return self._shut_s + (0.0 if self._shut_since is None else self._clock() - self._shut_since)


class ImageCache:
    """Encoded images by digest, least recently used out first, at most `limit` bytes."""

    def __init__(self, limit: int = IMAGE_CACHE_BYTES) -> None:
        self.limit = limit
        self.bytes = 0
        self._images: OrderedDict[str, bytes] = OrderedDict()

    def put(self, images: Mapping[str, bytes]) -> None:
        """Keep these, at the cost of the oldest."""
        for digest, data in images.items():
            if digest in self._images:
                self._images.move_to_end(digest)
                continue
            self._images[digest] = data
            self.bytes += len(data)
        while self.bytes > self.limit:
            self.bytes -= len(self._images.popitem(last=False)[1])

    def get(self, digest: str) -> bytes | None:
        """Its bytes, or None."""
        data = self._images.get(digest)
        if data is not None:
            self._images.move_to_end(digest)
        return data


def request_body(message: Generate, images: Sequence[bytes]) -> dict[str, Any]:
    """Body of SGLang's /generate.  images: encoded bytes, one an image_pad, in order."""
    body: dict[str, Any] = {
        "input_ids": unpack(message.prompt_ids, INT32).tolist(),
        "sampling_params": {
            "temperature": message.temperature,
            "top_p": message.top_p,
            "top_k": message.top_k or -1,
            "max_new_tokens": message.max_new_tokens,
            "stop_token_ids": unpack(message.stop_ids, INT32).tolist(),
            "logit_bias": {str(token): NEVER for token in unpack(message.banned_ids, INT32).tolist()},
            "sampling_seed": message.seed & 0x7FFFFFFF,
        },
        "return_logprob": True,
    }
    if images:
        body["image_data"] = [base64.b64encode(data + AFTER_JPEG * is_jpeg(data)).decode() for data in images]
    return body


def read_reply(reply: Mapping[str, Any], *, waited_s: float, running: int) -> Generated | None:
    """SGLang's reply -> Generated; None if the request was aborted.  Raises ValueError if it contradicts itself."""
    meta = reply["meta_info"]
    finish = meta["finish_reason"]["type"]
    if finish == "abort":
        return None
    ids = reply["output_ids"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    if [entry[1] for entry in meta["output_token_logprobs"]] != ids:
        raise ValueError(f"SGLang gave {len(ids)} tokens and the logprobs of {len(logprobs)} others")
    return Generated(
        response_ids=pack(ids, INT32),
        logprobs=pack(logprobs, FLOAT32),
        versions=pack(token_versions(meta["weight_versions"], len(ids)), INT32),
        finish_reason="length" if finish == "length" else "stop",
        waited_s=waited_s,
        running=running,
    )


def token_versions(spans: Sequence[Mapping[str, Any]], tokens: int) -> np.ndarray:
    """SGLang's `weight_versions` -> version of every token, int32 [tokens].

    spans: {version, start, end (exclusive)} without gaps.  Raises ValueError if they do not cover the tokens.
    """
    versions = np.empty(tokens, dtype=INT32)
    end = 0
    for span in spans:
        if span["start"] != end:
            raise ValueError(f"version spans leave a gap at token {end}: {list(spans)}")
        end = span["end"]
        versions[span["start"] : end] = int(span["version"])
    if end < tokens:
        raise ValueError(f"version spans cover {end} of {tokens} tokens: {list(spans)}")
    return versions
