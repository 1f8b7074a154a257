"""What is asked of a screenshot store: a worker's upload, and two ways to fetch, without and with asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from megatron_webrl.trajectory import AttemptKey, image_digest
from megatron_webrl.wire import BlockingClient, Client, WireError
from megatron_webrl.wire.messages import ClaimImages, Done, GetImages, Images, Lacking, PutImages

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
CLAIM_TIMEOUT_S = 5.0
PUT_TIMEOUT_S = 40.0
"""An upload waits for room."""
STORE_AWAY_S = 60.0
"""So long a fetch is repeated: a killed store is back in some seconds."""
IMAGES_A_MESSAGE = 32
BYTES_A_MESSAGE = 4 << 20


class ImagesMissing(WireError):
    """The store does not have them (any more)."""


async def upload(client: Client, owner: AttemptKey, images: dict[str, bytes]) -> None:
    """Let `owner` own these encoded images, by digest, and send those that are lacking.  To be repeated as a whole if it
    raises (WireError)."""
    if not images:
        return
    claim = ClaimImages(owner, list(images))
    lacking = (await client.request(claim, timeout=CLAIM_TIMEOUT_S, expect=Lacking)).digests
    for part in _parts({digest: images[digest] for digest in lacking}):
        await client.request(PutImages(owner, part), timeout=PUT_TIMEOUT_S, expect=Done)


def _parts(images: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
    """In the same order, each of at most BYTES_A_MESSAGE or a single one."""
    part: dict[str, bytes] = {}
    size = 0
    for digest, data in images.items():
        if part and size + len(data) > BYTES_A_MESSAGE:
            yield part
            part, size = {}, 0
        part[digest] = data
        size += len(data)
    if part:
        yield part


async def fetch(client: Client, digests: Sequence[str], *, timeout: float) -> dict[str, bytes]:
    """Encoded images by digest.  timeout: seconds for all.  Raises ImagesMissing naming some, and what `Client.request`
    raises."""
    found: dict[str, bytes] = {}
    left = list(dict.fromkeys(digests))
    deadline = asyncio.get_running_loop().time() + timeout
    while left:
        asked = left[:IMAGES_A_MESSAGE]
        wait = max(0.0, deadline - asyncio.get_running_loop().time())
        once = min(wait, REQUEST_TIMEOUT_S)
        reply = await client.request(GetImages(asked), timeout=once, expect=Images, retry_s=wait - once)
        missing = _take(reply, asked, found)
        if missing:
            raise ImagesMissing(f"the screenshot store lacks {len(missing)} of them: {missing[:3]}")
        left = [digest for digest in left if digest not in found]
    return found


def fetch_images(store: BlockingClient, digests: Sequence[str]) -> tuple[dict[str, bytes], list[str]]:
    """Encoded images by digest, and the digests that the store does not have.  Raises what `BlockingClient.request` raises."""
    found: dict[str, bytes] = {}
    missing: list[str] = []
    left = list(dict.fromkeys(digests))
    while left:
        asked = left[:IMAGES_A_MESSAGE]
        reply = store.request(GetImages(asked), timeout=REQUEST_TIMEOUT_S, expect=Images, retry_s=STORE_AWAY_S)
        missing += _take(reply, asked, found)
        left = [digest for digest in left if digest not in found and digest not in missing]
    return found, missing


def _take(reply: Images, asked: list[str], found: dict[str, bytes]) -> list[str]:
    """Add to `found` what is right; returns what is missing.  An answer that brings nothing at all is missing, too."""
    wrong = [digest for digest, data in reply.images.items() if image_digest(data) != digest]
    if wrong:
        log.error("the screenshot store sent %d images that do not match their names: %s", len(wrong), wrong[:3])
    found |= {digest: data for digest, data in reply.images.items() if digest not in wrong}
    missing = [*reply.missing, *wrong]
    return missing if missing or reply.images else asked
