"""A store over real sockets: what a worker, the coordinator and a trainer see of it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from megatron_webrl.screenshots import (
    ImagesMissing,
    ScreenshotStore,
    client,
    fetch,
    fetch_images,
    serve_store,
    store,
    upload,
)
from megatron_webrl.trajectory import image_digest
from megatron_webrl.wire import BlockingClient, Client, RequestFailed, Server
from megatron_webrl.wire.messages import Done, GetImages, Images, KeepImages, ReleaseImages, StoreState, StoreStatus

LIMIT = 1000
OWNER, OTHER, THIRD = (1, 0, 0), (2, 0, 0), (3, 0, 0)


def images(*sizes: int) -> dict[str, bytes]:
    """Images of so many bytes, all different."""
    made = (n.to_bytes(2, "big").ljust(size, b".") for n, size in enumerate(sizes))
    return {image_digest(data): data for data in made}


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    address = f"ipc://{tmp_path}/store"
    serving = asyncio.create_task(serve_store(address, "run", tmp_path / "screenshots", LIMIT))
    yield address
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


@pytest.fixture
async def ask(address: str) -> AsyncIterator[Client]:
    ask = Client(address, "run", "asker")
    yield ask
    ask.close()


@pytest.fixture
async def blocking(address: str) -> AsyncIterator[BlockingClient]:
    blocking = BlockingClient(address, "run", "trainer")
    yield blocking
    blocking.close()


async def state(ask: Client) -> StoreState:
    return await ask.request(StoreStatus(), timeout=5, expect=StoreState)


async def until(condition: Callable[[StoreState], bool], ask: Client) -> None:
    async with asyncio.timeout(10):
        while not condition(await state(ask)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_is_uploaded_is_fetched_until_its_last_owner_goes(ask: Client, blocking: BlockingClient) -> None:
    """Uploading again changes nothing; an upload without images asks nothing."""
    mine, shared = images(10, 11, 12), images(10)
    await upload(ask, OWNER, mine)
    await upload(ask, OWNER, mine)
    await upload(ask, OTHER, shared)
    await upload(ask, OTHER, {})
    assert await state(ask) == StoreState(3, 33, LIMIT, 2, 0)
    wanted = [*mine, *mine]
    assert await fetch(ask, wanted, timeout=5) == mine
    assert await asyncio.to_thread(fetch_images, blocking, [*wanted, "ab" * 16]) == (mine, ["ab" * 16])
    await ask.request(ReleaseImages([OWNER]), timeout=5, expect=Done)
    assert await asyncio.to_thread(fetch_images, blocking, list(mine)) == (shared, list(mine)[1:])
    with pytest.raises(ImagesMissing, match=f"lacks 2 of them: .*{list(mine)[1]}"):
        await fetch(ask, list(mine), timeout=5)
    await ask.request(KeepImages([], 0.0), timeout=5, expect=Done)
    assert await state(ask) == StoreState(0, 0, LIMIT, 0, 0)


async def test_messages_are_bounded_in_images_and_bytes(
    ask: Client, blocking: BlockingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads and replies come in parts; an image that is larger than the bound comes alone."""
    monkeypatch.setattr(client, "BYTES_A_MESSAGE", 50)
    monkeypatch.setattr(client, "IMAGES_A_MESSAGE", 4)
    monkeypatch.setattr(store, "REPLY_BYTES", 40)
    puts: list[list[int]] = []
    replies: list[list[int]] = []
    put, get = ScreenshotStore.put, ScreenshotStore.get

    def watched_put(self: ScreenshotStore, owner: tuple[int, int, int], some: dict[str, bytes]) -> bool:
        puts.append(list(map(len, some.values())))
        return put(self, owner, some)

    def watched_get(self: ScreenshotStore, digests: list[str], limit: int) -> tuple[dict[str, bytes], list[str]]:
        found, missing = get(self, digests, limit)
        replies.append(list(map(len, found.values())))
        return found, missing

    monkeypatch.setattr(ScreenshotStore, "put", watched_put)
    monkeypatch.setattr(ScreenshotStore, "get", watched_get)
    mine = images(10, 30, 10, 20, 60, 5, 5, 5, 5, 5)
    await upload(ask, OWNER, mine)
    assert puts == [[10, 30, 10], [20], [60], [5, 5, 5, 5, 5]]
    in_parts = [[10, 30], [10, 20], [60], [5, 5, 5, 5], [5]]
    assert await fetch(ask, list(mine), timeout=5) == mine
    assert replies == in_parts
    replies.clear()
    assert await asyncio.to_thread(fetch_images, blocking, list(mine)) == (mine, [])
    assert replies == in_parts


async def test_an_upload_waits_for_room_in_the_order_in_which_it_came(ask: Client) -> None:
    """A small one that would fit does not overtake a large one; the store says how many wait, and answers meanwhile."""
    filling, large, small = images(900), images(500), images(50)
    await upload(ask, OWNER, filling)
    waiting = [asyncio.create_task(upload(ask, OTHER, large))]
    await until(lambda s: s.waiting == 1, ask)
    waiting.append(asyncio.create_task(upload(ask, THIRD, small)))
    await until(lambda s: s.waiting == 2, ask)
    await asyncio.sleep(2 * store.LOOK_AGAIN_S)
    assert not any(task.done() for task in waiting)
    await ask.request(ReleaseImages([OWNER]), timeout=5, expect=Done)
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
    assert await state(ask) == StoreState(2, 550, LIMIT, 2, 0)


async def test_no_room_names_the_key(ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the deadline of one upload; at once beyond what those that wait may hold; and for what can never fit."""
    monkeypatch.setattr(store, "PUT_WAIT_S", 1.0)
    monkeypatch.setattr(store, "WAITING_BYTES", 150)
    await upload(ask, OWNER, images(950))
    began = time.monotonic()
    first = asyncio.create_task(upload(ask, OTHER, images(100)))
    await until(lambda s: s.waiting == 1, ask)
    with pytest.raises(RequestFailed, match=r"StoreFull: no room in replay\.screenshot_bytes=1000.* 1 uploads wait"):
        await upload(ask, THIRD, images(90))
    assert time.monotonic() - began < 1
    with pytest.raises(RequestFailed, match=r"StoreFull: no room for 1 s in replay\.screenshot_bytes=1000"):
        await first
    with pytest.raises(RequestFailed, match=r"2000 bytes exceed replay\.screenshot_bytes=1000: raise it"):
        await upload(ask, THIRD, images(2000))
    assert (await state(ask)).waiting == 0


async def test_an_upload_whose_owner_was_released_waits_no_more(ask: Client) -> None:
    """Its attempt was dropped to make room."""
    await upload(ask, OWNER, images(950))
    waiting = asyncio.create_task(upload(ask, OTHER, images(100)))
    await until(lambda s: s.waiting == 1, ask)
    await ask.request(ReleaseImages([OTHER]), timeout=5, expect=Done)
    with pytest.raises(RequestFailed, match="not claimed"):
        await waiting


async def test_what_does_not_match_its_name_is_missing(tmp_path: Path) -> None:
    """Whoever sent it; so is what a store neither sends nor calls missing."""
    good, bad = list(images(10, 11))

    async def lie(_: str, m: GetImages) -> Images:
        return Images({digest: images(10)[good] for digest in m.digests if digest in (good, bad)}, [])

    server = Server(f"ipc://{tmp_path}/liar", "run", {GetImages: lie})
    await server.start()
    ask, blocking = Client(server.address, "run", "asker"), BlockingClient(server.address, "run", "trainer")
    assert await asyncio.to_thread(fetch_images, blocking, [good, bad, "none"]) == (images(10), [bad, "none"])
    for digests in ([good, bad], ["none"]):
        with pytest.raises(ImagesMissing, match=digests[-1]):
            await fetch(ask, digests, timeout=5)
    ask.close()
    blocking.close()
    await server.close()


def store_process(address: str, directory: Path) -> None:
    asyncio.run(serve_store(address, "run", directory, 10**8))


async def test_a_store_that_is_killed_keeps_what_it_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL in the middle of uploads, three times; they are said again, as a worker does, and a fetch that is under way
    outlives it, too."""
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_S", 1.0)
    monkeypatch.setattr(client, "PUT_TIMEOUT_S", 1.0)
    spawn = multiprocessing.get_context("spawn")
    address, directory = f"ipc://{tmp_path}/store", tmp_path / "screenshots"

    def start() -> multiprocessing.process.BaseProcess:
        process = spawn.Process(target=store_process, args=(address, directory))
        process.start()
        return process

    async def upload_all(first: int) -> None:
        for number in range(first, 1000, 4):
            if stop.is_set():
                return
            mine = {image_digest(data): data for data in (os.urandom(20_000) for _ in range(5))}
            while True:
                with contextlib.suppress(client.WireError):
                    await upload(ask, (number, 0, 0), mine)
                    break
            acknowledged.update(mine)

    acknowledged: dict[str, bytes] = {}
    stop = asyncio.Event()
    process = start()
    ask, blocking = Client(address, "run", "asker"), BlockingClient(address, "run", "trainer")
    try:
        await until(lambda s: True, ask)
        uploads = [asyncio.create_task(upload_all(first)) for first in range(4)]
        for _ in range(3):
            before = len(acknowledged)
            async with asyncio.timeout(20):
                while len(acknowledged) < before + 40:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert process.pid
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            known = dict(acknowledged)
            fetching = asyncio.create_task(fetch(ask, list(known), timeout=20))
            asking = asyncio.create_task(asyncio.to_thread(fetch_images, blocking, list(known)))
            process = start()
            assert await fetching == known
            assert await asking == (known, [])
        stop.set()
        await asyncio.gather(*uploads)
        assert (await state(ask)).images == len(acknowledged), "nothing is left over"
    finally:
        process.kill()
        process.join()
        ask.close()
        blocking.close()
