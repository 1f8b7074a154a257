"""Requests and replies: correlated, bounded in time, refused across runs and versions, never killed by bytes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_webrl.wire import (
    BlockingClient,
    Client,
    MessageTooLarge,
    RequestFailed,
    RequestRefused,
    RequestTimeout,
    Server,
    sockets,
)
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
        await client.request(ClaimVersion(0), timeout=5, expect=Version)
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


class Raw:
    """A peer that sends any bytes."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    async def __call__(self, frames: list[bytes]) -> list[bytes]:
        await self.socket.send_multipart(frames)
        return await asyncio.wait_for(self.socket.recv_multipart(), 5)


messages = st.builds(GetImages, st.lists(st.text(max_size=8), max_size=3)).map(msgspec.msgpack.encode)
integers = st.integers(-(2**63), 2**64 - 1)
headers = st.tuples(st.integers(0, 9), st.text(max_size=5), integers, st.text(max_size=5)).map(msgspec.msgpack.encode)
anything = st.binary(max_size=40)
damaged = st.builds(
    lambda data, at, byte: data[:at] + bytes([byte]) + data[at + 1 :], messages, st.integers(0, 40), st.integers(0, 255)
)


@given(
    requests=st.lists(
        st.lists(anything | headers | messages | damaged, min_size=1, max_size=4), min_size=1, max_size=20
    )
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_kill_a_server_and_all_are_answered(requests: list[list[bytes]], tmp_path: Path) -> None:
    async def scenario() -> None:
        server = Server(f"ipc://{tmp_path}/s", "run", {GetImages: echo})
        await server.start()
        raw, client = Raw(server.address), Client(server.address, "run", "me")
        for frames in requests:
            assert len(await raw(frames)) == 2
        assert (await client.request(GetImages(["a"]), timeout=5, expect=Images)).images == {"a": b"me"}
        assert server.malformed <= len(requests)
        raw.socket.close(0)
        client.close()
        await server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("reply", [[b"x"], [b"x", b"y"], [b"", b"", b""]])
async def test_a_reply_that_cannot_be_read_is_no_reply(reply: list[bytes], tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/liar"
    liar = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    liar.bind(address)

    async def lie() -> None:
        while True:
            identity, *_ = await liar.recv_multipart()
            await liar.send_multipart([identity, *reply])

    lying = asyncio.create_task(lie())
    client, blocking = Client(address, "run", "me"), BlockingClient(address, "run", "me")
    with pytest.raises(RequestTimeout):
        await client.request(GetImages([]), timeout=0.2, expect=Images)
    with pytest.raises(RequestTimeout):
        await asyncio.to_thread(blocking.request, GetImages([]), timeout=0.2, expect=Images)
    lying.cancel()
    for opened in (client, blocking):
        opened.close()
    liar.close(0)


async def test_messages_are_bounded_on_both_sides(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 1000)
    client = Client(server.address, "run", "me")
    with pytest.raises(MessageTooLarge, match=r"GetImages: .* bytes exceed the 1000"):
        await client.request(GetImages(["a" * 1000]), timeout=5, expect=Images)
    with pytest.raises(
        RequestFailed, match=r"Images: .* exceed the 1000"
    ):  # each name costs five bytes more in the reply
        await client.request(GetImages([f"{i:04}" for i in range(150)]), timeout=5, expect=Images)
    assert (await client.request(GetImages(["a"]), timeout=5, expect=Images)).images
    client.close()


async def test_a_frame_beyond_the_bound_ends_its_connection_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 1000)
    server = Server(f"ipc://{tmp_path}/s", "run", {GetImages: echo})
    await server.start()
    raw, client = Raw(server.address), Client(server.address, "run", "me")
    await raw.socket.send_multipart([bytes(5000)])
    assert (await client.request(GetImages(["a"]), timeout=5, expect=Images)).images
    assert server.malformed == 0
    raw.socket.close(0)
    client.close()
    await server.close()


@pytest.mark.parametrize("kind", [Client, BlockingClient])
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
async def test_a_request_outlives_a_server_that_is_started_again(
    kind: type[Client] | type[BlockingClient], scheme: str, tmp_path: Path
) -> None:
    first = Server("tcp://127.0.0.1:*" if scheme == "tcp" else f"ipc://{tmp_path}/s", "run", {GetImages: echo})
    await first.start()
    client = kind(first.address, "run", "me")

    async def ask(name: str, retry_s: float) -> Images:
        question = dict(timeout=0.3, expect=Images, retry_s=retry_s)
        if isinstance(client, Client):
            return await client.request(GetImages([name]), **question)
        return await asyncio.to_thread(client.request, GetImages([name]), **question)

    assert (await ask("a", 0)).images
    await first.close()
    began = time.monotonic()
    with pytest.raises(RequestTimeout):
        await ask("b", 0.5)
    assert 0.5 <= time.monotonic() - began < 3
    asked = asyncio.create_task(ask("c", 20))
    await asyncio.sleep(0.5)
    second = Server(first.address, "run", {GetImages: echo})
    await second.start()
    assert list((await asked).images) == ["c"]
    client.close()
    await second.close()


async def test_a_server_bounds_what_it_handles_at_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_CONCURRENT_HANDLERS", 3)
    handled, most = 0, 0

    async def slow(sender: str, message: GetImages) -> Images:
        nonlocal handled, most
        handled += 1
        most = max(most, handled)
        await asyncio.sleep(0.01)
        handled -= 1
        return Images({}, [])

    server = Server(f"ipc://{tmp_path}/s", "run", {GetImages: slow})
    await server.start()
    client = Client(server.address, "run", "me")
    await asyncio.gather(*(client.request(GetImages([]), timeout=10, expect=Images) for _ in range(200)))
    assert most == 3
    client.close()
    await server.close()
