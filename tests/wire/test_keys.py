"""Over TCP only the holders of a run's keys are heard, and its server alone is believed."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from megatron_webrl.wire import BlockingClient, Client, Keys, RequestTimeout, Server
from megatron_webrl.wire.messages import GetImages, Images

KEYS, OTHERS = Keys.make(), Keys.make()


async def answer(sender: str, message: GetImages) -> Images:
    return Images({}, message.digests)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server("tcp://127.0.0.1:*", "run", {GetImages: answer}, keys=KEYS)
    await server.start()
    yield server
    await server.close()


async def test_both_clients_are_heard_with_the_keys(server: Server) -> None:
    client = Client(server.address, "run", "me", keys=KEYS.for_client())
    blocking = BlockingClient(server.address, "run", "me", keys=KEYS)
    assert (await client.request(GetImages(["a"]), timeout=5, expect=Images)).missing == ["a"]
    reply = await asyncio.to_thread(blocking.request, GetImages(["b"]), timeout=5, expect=Images)
    assert reply.missing == ["b"]
    client.close()
    blocking.close()


STRANGERS = {
    "no keys": None,
    "another run's": OTHERS.for_client(),
    "a made up client": replace(OTHERS.for_client(), server_public=KEYS.server_public),
    "for another server": replace(KEYS.for_client(), server_public=OTHERS.server_public),
}


@pytest.mark.parametrize("who", STRANGERS)
async def test_nobody_else_is_heard(server: Server, who: str) -> None:
    stranger = Client(server.address, "run", "me", keys=STRANGERS[who])
    with pytest.raises(RequestTimeout):
        await stranger.request(GetImages([]), timeout=0.5, expect=Images)
    friend = Client(server.address, "run", "me", keys=KEYS.for_client())
    assert await friend.request(GetImages([]), timeout=5, expect=Images)
    assert server.malformed == 0
    stranger.close()
    friend.close()


async def test_a_server_without_keys_is_not_believed() -> None:
    open_server = Server("tcp://127.0.0.1:*", "run", {GetImages: answer})
    await open_server.start()
    client = Client(open_server.address, "run", "me", keys=KEYS.for_client())
    with pytest.raises(RequestTimeout):
        await client.request(GetImages([]), timeout=0.5, expect=Images)
    client.close()
    await open_server.close()


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.1.2.3:5555", "tcp://node7:5555", "tcp://[::]:5"]
)
async def test_nothing_is_open_to_the_network_without_keys(address: str) -> None:
    with pytest.raises(ValueError, match="open to the network"):
        await Server(address, "run", {}).start()
    for kind in (Client, BlockingClient):
        with pytest.raises(ValueError, match="open to the network"):
            kind(address, "run", "me")


async def test_a_clients_keys_cannot_serve() -> None:
    with pytest.raises(ValueError, match="cannot serve"):
        await Server("tcp://127.0.0.1:*", "run", {}, keys=KEYS.for_client()).start()


async def test_unix_sockets_need_none(tmp_path: Path) -> None:
    server = Server(f"ipc://{tmp_path}/s", "run", {GetImages: answer}, keys=KEYS)
    await server.start()
    client = Client(server.address, "run", "me")
    assert await client.request(GetImages([]), timeout=5, expect=Images)
    client.close()
    await server.close()


def test_keys_travel_and_hide_their_secrets() -> None:
    assert pickle.loads(pickle.dumps(KEYS)) == KEYS
    for secret in (KEYS.server_secret, KEYS.client_secret):
        assert secret is not None and secret.decode() not in f"{KEYS!r} {KEYS} {[KEYS]}"
    assert KEYS.for_client().server_secret is None
    assert len({zmq.utils.z85.decode(key) for key in (KEYS.server_public, KEYS.client_public)}) == 2
