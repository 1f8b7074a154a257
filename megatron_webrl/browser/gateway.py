"""The only way from a browser context to the network: an HTTP proxy of its own on loopback.

It resolves names itself, refuses what the allow-list refuses after resolution, and connects to the very address that it
judged: a name cannot change its mind in between.  It also tells when the context's network is quiet.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from megatron_webrl.browser.sandbox import DEFAULT_PORTS, AllowList

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 15.0
IDLE_TIMEOUT_S = 120.0
CHUNK_BYTES = 64 << 10
ANSWER_S = 10.0
"""A request that is not answered for so long does not count as traffic any more."""
LOCAL_SCHEMES = ("", "http", "ws")


class Refused(Exception):
    """The sandbox refuses a request; the message says why."""


async def resolve(host: str, port: int) -> list[str]:
    """Addresses of a name, as the system tells.  Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Gateway:
    """note: is told of each refusal, in words."""

    def __init__(self, allow: AllowList, note: Callable[[str], None]) -> None:
        self._allow = allow
        self._note = note
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._asked: dict[object, float] = {}
        """Connections whose client spoke last, and when: they wait for an answer."""
        self._last = 0.0

    async def start(self) -> str:
        """Listen; returns the proxy's URL."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=HEAD_BYTES)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """End every connection.  Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def quiet_s(self) -> float:
        """Seconds since bytes went through, 0 while a request waits for its answer."""
        now = time.monotonic()
        if any(now - asked < ANSWER_S for asked in self._asked.values()):
            return 0.0
        return now - self._last

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) <= MAX_CONNECTIONS:
                await self._serve(reader, writer)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("gateway: %s", error)
        except asyncio.CancelledError:
            pass  # the gateway closes
        finally:
            self._connections.discard(task)
            self._asked.pop(reader, None)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HEAD_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        self._moved()
        self._asked[reader] = time.monotonic()
        try:
            method, host, port, request = _read_head(head)
            upstream, up = await self._connect(host, port)
        except Refused as refused:
            self._note(str(refused))
            return await _answer(writer, "403 Forbidden", str(refused))
        except (OSError, TimeoutError) as error:
            return await _answer(writer, "502 Bad Gateway", f"no connection: {error}")
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                await writer.drain()
            else:
                up.write(request)
                await up.drain()
            ways = (self._pump(reader, up, reader, asks=True), self._pump(upstream, writer, reader, asks=False))
            await _first_of(*ways)
        finally:
            up.close()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises Refused, OSError, TimeoutError."""
        if not self._allow.permits_host(host, port):
            raise Refused(f"{host}:{port} is not allowed")
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            addresses = await resolve(host, port)
            for address in addresses:
                if not self._allow.permits_address(host, port, ipaddress.ip_address(address.partition("%")[0])):
                    raise Refused(f"{host}:{port} has the address {address}, which is not public")
            error: OSError = OSError(f"{host} has no address")
            for address in addresses:
                try:
                    return await asyncio.open_connection(address, port)
                except OSError as failed:
                    error = failed
            raise error

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, key: object, *, asks: bool) -> None:
        while True:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                data = await source.read(CHUNK_BYTES)
            if not data:
                return
            self._moved()
            if asks:
                self._asked[key] = time.monotonic()
            else:
                self._asked.pop(key, None)
            sink.write(data)
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                await sink.drain()

    def _moved(self) -> None:
        self._last = time.monotonic()


def _read_head(head: bytes) -> tuple[str, str, int, bytes]:
    """Of a proxy request: method, host, port, and the head as the host itself is to see it (one request a connection).
    Raises Refused."""
    lines = head.split(b"\r\n")
    try:
        method, target, version = lines[0].decode("ascii").split(" ")
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise Refused("a malformed request") from None
    if not host or parts.scheme not in LOCAL_SCHEMES:
        raise Refused("a malformed request")
    if method == "CONNECT":
        return method, host, port or DEFAULT_PORTS["https"], b""
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    kept = [line for line in lines[1:] if not line.lower().startswith((b"proxy-", b"connection:"))]
    upgrades = any(line.lower().startswith(b"upgrade:") for line in kept)
    begin = [f"{method} {path} {version}".encode(), b"Connection: upgrade" if upgrades else b"Connection: close"]
    return method, host, port or DEFAULT_PORTS["http"], b"\r\n".join([*begin, *kept])


async def _answer(writer: asyncio.StreamWriter, status: str, text: str) -> None:
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    with contextlib.suppress(OSError):
        async with asyncio.timeout(5):
            await writer.drain()


async def _first_of(*ways: Awaitable[None]) -> None:
    """Until one ends; the others are cancelled."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
