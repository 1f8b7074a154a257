"""The generation side of an engine host: the gate that opens when it serves, the cache of image bytes, and the forms that
a request and its reply take in SGLang.  Nothing here does input or output.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_webrl.engine.sglang_server import SglangError, SglangGone
from megatron_webrl.screenshots import is_jpeg
from megatron_webrl.trajectory import INT32, unpack
from megatron_webrl.wire.messages import Generate

CHUNK_TOKENS = 16
"""SGLang is asked to hand tokens out so many at a time: the most, of each request, that its death loses."""
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

    def __init__(self, limit: int) -> None:
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


def request_body(message: Generate, images: Sequence[bytes], *, version: int) -> dict[str, Any]:
    """Body of SGLang's /generate, as a stream.

    images: encoded bytes, one an image_pad, in order.  version: that SGLang serves; its prefix cache is keyed by it, so that
    no later request meets the KV of older weights where a refresh leaves the cache alone (`refresh.mode: in_place`).
    Raises ValueError if `prefix_ids` is a whole reply already.
    """
    prefix = unpack(message.prefix_ids, INT32).tolist()
    stop = unpack(message.stop_ids, INT32).tolist()
    if why := ended(prefix, stop, message.max_new_tokens):
        raise ValueError(f"there is nothing to continue: the {len(prefix)} tokens of prefix_ids end by {why!r}")
    body: dict[str, Any] = {
        "input_ids": unpack(message.prompt_ids, INT32).tolist() + prefix,
        "sampling_params": {
            "temperature": message.temperature,
            "top_p": message.top_p,
            "top_k": message.top_k or -1,
            "max_new_tokens": message.max_new_tokens - len(prefix),
            "stop_token_ids": stop,
            "logit_bias": {str(token): NEVER for token in unpack(message.banned_ids, INT32).tolist()},
            "sampling_seed": message.seed & 0x7FFFFFFF,
            "stream_interval": CHUNK_TOKENS,
        },
        "return_logprob": True,
        "stream": True,
        "extra_key": str(version),
    }
    if images:
        body["image_data"] = [base64.b64encode(data + AFTER_JPEG * is_jpeg(data)).decode() for data in images]
    return body


def ended(ids: Sequence[int], stop_ids: Sequence[int], max_new_tokens: int) -> str:
    """Why a reply of these tokens is finished, `stop` or `length`; empty if it is not."""
    if ids and ids[-1] in stop_ids:
        return "stop"
    return "length" if len(ids) >= max_new_tokens else ""


class Sampled:
    """What one request to SGLang has sampled so far: ids, logprobs and versions of its tokens, and in the end why it ended.

    version: that SGLang served when the request was sent.
    """

    def __init__(self, version: int) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason = ""
        """`stop` or `length`; empty while it goes on."""
        self._version = version

    def add(self, chunk: Mapping[str, Any]) -> None:
        """The next chunk of the stream.

        Only the last chunk has the version of every token.  Until it comes tokens count as of the version that was served
        when the chunk *before* theirs was sent: weights may have changed since, so they are that new at least.
        Raises SglangError if SGLang refused the request, SglangGone if it dropped it, ValueError if the chunk contradicts
        itself.
        """
        if error := chunk.get("error"):
            raise (SglangError if 400 <= int(error.get("code") or 400) < 500 else SglangGone)(error.get("message"))
        meta = chunk["meta_info"]
        finish = meta["finish_reason"]
        if finish and finish["type"] == "abort":  # what comes with it may repeat a token
            refused = finish.get("status_code") == 400
            raise (SglangError if refused else SglangGone)(f"SGLang aborted it: {finish.get('message')}")
        ids, entries = chunk["output_ids"], meta["output_token_logprobs"]
        if [entry[1] for entry in entries] != ids:
            raise ValueError(f"SGLang gave {len(ids)} tokens and the logprobs of {len(entries)} others")
        self.ids += ids
        self.logprobs += [entry[0] for entry in entries]
        self.versions += [self._version] * len(ids)
        self._version = int(meta["weight_version"])
        if finish:
            self.versions = token_versions(meta["weight_versions"], len(self.ids)).tolist()
            self.finish_reason = "length" if finish["type"] == "length" else "stop"


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
