"""Requests and replies: correlated, bounded in time, refused across runs and versions, never killed by bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from megatron_webrl.wire import BlockingClient, Client, RequestFailed, RequestRefused, RequestTimeout, Server, sockets
from megatron_webrl.wire.messages import PROTOCOL, ClaimVersion, Done, GetImages, Images, StoreStatus, Version


async def echo(sender: str, message: GetImages) -> Images:
    await asyncio.sleep(0.05 if message.digests == ["slow"] else 0)
    return Images({d: sender.encode() for d in message.digests}, [])


async def broken(sender: str, message: ClaimVersion) -> Version:
    raise RuntimeError("out of versions")


async def never(sender: str, message: StoreStatus) -> Done:
    await asyncio.sleep(60)
    return Done()


@pytest.fixture(params=["tcp", "ipc"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    address = "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/s"
    server = Server(address, "run", {GetImages: echo, ClaimVersion: broken, StoreStatus: never})
    await server.start()
    yield server
    await server.close()


async def test_replies_find_their_requests_whatever_the_order(server: Server) -> None:
    client = Client(server.address, "run", "me")
    names = ["slow", *map(str, range(50))]
    replies = await asyncio.gather(*(client.request(GetImages([n]), timeout=5, expect=Images) for n in names))
    assert [list(r.images.items()) for r in replies] == [[(n, b"me")] for n in names]
    client.close()


async def test_a_handler_that_raises_fails_the_request_and_nothing_else(server: Server) -> None:
    client = Client(server.address, "run", "me")
    with pytest.raises(RequestFailed, match="out of versions"):
        await client.request(ClaimVersion(), timeout=5, expect=Version)
    assert (await client.request(GetImages(["a"]), timeout=5, expect=Images)).images
    with pytest.raises(RequestFailed, match="not answered here"):
        await client.request(Done(), timeout=5, expect=Done)
    client.close()


async def test_every_request_has_a_deadline(server: Server) -> None:
    client = Client(server.address, "run", "me")
    with pytest.raises(RequestTimeout):
        await client.request(StoreStatus(), timeout=0.1, expect=Done)
    client.close()
    nobody = Client("tcp://127.0.0.1:1", "run", "me")
    with pytest.raises(RequestTimeout):
        await nobody.request(StoreStatus(), timeout=0.1, expect=Done)
    nobody.close()


async def test_another_run_and_another_protocol_are_refused_with_the_reason(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = Client(server.address, "other", "me")
    with pytest.raises(RequestRefused, match="another run"):
        await stranger.request(GetImages([]), timeout=5, expect=Images)
    stranger.close()
    old = Client(server.address, "run", "me")
    header = sockets.Header
    monkeypatch.setattr(sockets, "Header", lambda p, *rest: header(p + (rest[-1] == "me"), *rest))
    with pytest.raises(RequestRefused, match="same version"):
        await old.request(GetImages([]), timeout=5, expect=Images)
    old.close()


@pytest.mark.parametrize(
    "frames", [[b""], [b"x"], [b"x", b"y"], [msgspec.msgpack.encode([PROTOCOL, "run", 1, "a"]), b"\xc1"]]
)
async def test_malformed_bytes_are_answered_and_counted(server: Server, frames: list[bytes]) -> None:
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(server.address)
    await socket.send_multipart(frames)
    reply = await asyncio.wait_for(socket.recv_multipart(), 5)
    assert b"malformed" in reply[1]
    assert server.malformed == 1
    socket.close(0)
    client = Client(server.address, "run", "me")
    assert await client.request(GetImages([]), timeout=5, expect=Images)
    client.close()


async def test_the_blocking_client_agrees_and_forgets_late_replies(server: Server) -> None:
    def work() -> list[bytes]:
        client = BlockingClient(server.address, "run", "sync")
        with pytest.raises(RequestTimeout):
            client.request(GetImages(["slow"]), timeout=0.01, expect=Images)
        replies = [client.request(GetImages([str(i)]), timeout=5, expect=Images).images[str(i)] for i in range(5)]
        client.close()
        return replies

    out: list[bytes] = []
    thread = threading.Thread(target=lambda: out.extend(work()))
    thread.start()
    await asyncio.to_thread(thread.join, 20)
    assert out == [b"sync"] * 5
