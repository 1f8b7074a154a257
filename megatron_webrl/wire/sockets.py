"""Requests and replies over ZeroMQ: a ROUTER server, an asyncio DEALER client and a blocking one.

A message is two frames: a header (protocol, run id, request id, sender) and the body.  Every request has a deadline;
bytes that cannot be read are answered and counted, never fatal; LINGER is 0, so closing never hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, overload

import msgspec
import zmq
import zmq.asyncio

from megatron_webrl.wire.messages import PROTOCOL, AnyMessage, Failed, Message, Refused

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 30
HIGH_WATER_MARK = 10_000
MAX_CONCURRENT_HANDLERS = 4096

Reply = TypeVar("Reply", bound=Message)
Handler = Callable[[str, Any], Awaitable[Message]]


class WireError(Exception):
    """Base of what a request can raise."""


class RequestTimeout(WireError):
    """No reply before the deadline."""


class RequestFailed(WireError):
    """The peer's handler raised."""


class RequestRefused(WireError):
    """The peer is of another run or protocol version, or could not read the message."""


class Header(msgspec.Struct, array_like=True):
    """First frame of every message."""

    protocol: int
    run_id: str
    request: int
    sender: str


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_body = msgspec.msgpack.Decoder(AnyMessage).decode


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    return socket


def _checked(body: Message, expect: Any, address: str, request: Message) -> Message:
    """The reply if it is of the expected type; raises what the peer said otherwise."""
    what = type(request).__name__
    if isinstance(body, Failed):
        raise RequestFailed(f"{what} failed at {address}: {body.error}")
    if isinstance(body, Refused):
        raise RequestRefused(f"{what} refused by {address}: {body.reason}")
    if not isinstance(body, expect):
        raise RequestFailed(f"{what} at {address} answered {type(body).__name__}, expected {expect}")
    return body


class Server:
    """Answers requests, each in its own task.

    address: to bind; `tcp://127.0.0.1:*` takes a free port, see `self.address` after `start`.
    handlers: message type -> async function of (sender, message) that returns the reply.
    """

    def __init__(self, address: str, run_id: str, handlers: Mapping[type[Message], Handler]) -> None:
        self.address = address
        self.run_id = run_id
        self.malformed = 0
        self._handlers = dict(handlers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_HANDLERS)

    async def start(self) -> None:
        """Bind and begin to answer.  Raises zmq.ZMQError if the address is taken."""
        self._socket = _socket(zmq.asyncio.Context.instance(), zmq.ROUTER)
        self._socket.router_mandatory = 1
        self._socket.bind(self.address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop = asyncio.create_task(self._receive())

    async def close(self) -> None:
        """Stop answering; requests that are being handled are cancelled."""
        tasks = [t for t in (self._loop, *self._tasks) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close(0)

    async def _receive(self) -> None:
        while True:
            await self._slots.acquire()
            frames = await self._socket.recv_multipart()
            task = asyncio.create_task(self._answer(frames))
            self._tasks.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()

    async def _answer(self, frames: list[bytes]) -> None:
        identity, request = frames[0], -1
        try:
            header = _decode_header(frames[1])
            request = header.request
            if header.protocol != PROTOCOL:
                reply: Message = Refused(
                    f"protocol {header.protocol}, this is {PROTOCOL}: run the same version everywhere"
                )
            elif header.run_id != self.run_id:
                reply = Refused(f"run {header.run_id!r}, this is {self.run_id!r}: the address belongs to another run")
            else:
                reply = await self._handle(header.sender, _decode_body(frames[2]))
        except (msgspec.MsgspecError, IndexError) as error:
            self.malformed += 1
            reply = Refused(f"malformed message: {error}")
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone: nobody waits for the reply
            await self._socket.send_multipart(
                [identity, _encode(Header(PROTOCOL, self.run_id, request, "")), _encode(reply)], copy=False
            )

    async def _handle(self, sender: str, message: Message) -> Message:
        handler = self._handlers.get(type(message))
        if handler is None:
            return Failed(f"{type(message).__name__} is not answered here")
        try:
            return await handler(sender, message)
        except Exception as error:
            log.exception("handling %s of %s", type(message).__name__, sender)
            return Failed(f"{type(error).__name__}: {error}")


class Client:
    """Asyncio client of one server; any number of requests may be in flight."""

    def __init__(self, address: str, run_id: str, name: str) -> None:
        self.address = address
        self.run_id = run_id
        self.name = name
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._socket = _socket(zmq.asyncio.Context.instance(), zmq.DEALER)
        self._socket.connect(address)
        self._loop: asyncio.Task[None] | None = None

    @overload
    async def request(self, message: Message, *, timeout: float, expect: type[Reply]) -> Reply: ...
    @overload
    async def request(self, message: Message, *, timeout: float, expect: tuple[type[Message], ...]) -> Message: ...
    async def request(self, message: Message, *, timeout: float, expect: Any) -> Any:
        """Send and await the reply.  timeout: seconds.  Raises RequestTimeout, RequestFailed, RequestRefused."""
        if self._loop is None:
            self._loop = asyncio.create_task(self._receive())
        request = next(self._ids)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        try:
            async with asyncio.timeout(timeout):
                await self._socket.send_multipart(
                    [_encode(Header(PROTOCOL, self.run_id, request, self.name)), _encode(message)], copy=False
                )
                body = await future
        except TimeoutError:
            raise RequestTimeout(f"{type(message).__name__}: no reply from {self.address} in {timeout:.1f} s") from None
        finally:
            del self._waiting[request]
        return _checked(body, expect, self.address, message)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                header, body = _decode_header(frames[0]), _decode_body(frames[1])
            except (msgspec.MsgspecError, IndexError) as error:
                log.warning("malformed reply from %s: %s", self.address, error)
                continue
            future = self._waiting.get(header.request)
            if future is not None and not future.done():
                future.set_result(body)

    def close(self) -> None:
        """Drop the connection; requests in flight time out."""
        if self._loop is not None:
            self._loop.cancel()
        self._socket.close(0)


class BlockingClient:
    """The same without asyncio, one request at a time, for the trainer.  Not thread-safe."""

    def __init__(self, address: str, run_id: str, name: str) -> None:
        self.address = address
        self.run_id = run_id
        self.name = name
        self._ids = itertools.count()
        self._socket = _socket(zmq.Context.instance(), zmq.DEALER)
        self._socket.connect(address)

    @overload
    def request(self, message: Message, *, timeout: float, expect: type[Reply]) -> Reply: ...
    @overload
    def request(self, message: Message, *, timeout: float, expect: tuple[type[Message], ...]) -> Message: ...
    def request(self, message: Message, *, timeout: float, expect: Any) -> Any:
        """As `Client.request`."""
        request = next(self._ids)
        deadline = time.monotonic() + timeout
        self._socket.sndtimeo = max(1, int(timeout * 1000))
        try:
            self._socket.send_multipart([_encode(Header(PROTOCOL, self.run_id, request, self.name)), _encode(message)])
            while self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                frames = self._socket.recv_multipart()
                header, body = _decode_header(frames[0]), _decode_body(frames[1])
                if header.request == request:
                    return _checked(body, expect, self.address, message)
        except zmq.Again:
            pass
        raise RequestTimeout(f"{type(message).__name__}: no reply from {self.address} in {timeout:.1f} s")

    def close(self) -> None:
        self._socket.close(0)
