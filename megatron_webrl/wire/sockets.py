"""Requests and replies over ZeroMQ: a ROUTER server, an asyncio DEALER client and a blocking one.

A message is two frames: a header (protocol, run id, request id, sender) and the body.  Every request has a deadline;
bytes that cannot be read are answered and counted, never fatal; LINGER is 0, so closing never hangs.  Over TCP with the run's
`Keys` all is encrypted and only their holders are heard (CURVE); heartbeats find a peer that is gone without a word.
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
from zmq.auth.asyncio import AsyncioAuthenticator

from megatron_webrl.wire.keys import ClientCheck, Keys, secure_client, secure_server
from megatron_webrl.wire.messages import PROTOCOL, AnyMessage, Failed, Message, Refused

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 << 20
HIGH_WATER_MARK = 10_000
MAX_CONCURRENT_HANDLERS = 4096
HEARTBEAT_MS = 5_000
"""Of a connection; one that is silent for three of them is made anew."""
RECONNECT_MS = (100, 1_000)
RECEIVED_AT_ONCE = 64
"""Messages that a server takes before others of its event loop have their turn."""

COPIED_BYTES = 1 << 16
"""A larger reply is sent without a copy."""
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # zmq's own flags are slow to combine

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


class MessageTooLarge(WireError):
    """More than MAX_MESSAGE_BYTES: the peer would close the connection."""


class Header(msgspec.Struct, array_like=True, gc=False):
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
    socket.heartbeat_ivl = socket.handshake_ivl = socket.connect_timeout = HEARTBEAT_MS
    socket.heartbeat_timeout = socket.heartbeat_ttl = 3 * HEARTBEAT_MS
    socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS
    return socket


def _dealer(context: Any, address: str, keys: Keys | None) -> Any:
    socket = _socket(context, zmq.DEALER)
    try:
        secure_client(socket, address, keys)
        socket.connect(address)
    except BaseException:
        socket.close(0)
        raise
    return socket


def _encoded(run_id: str, request: int, sender: str, message: Message) -> list[bytes]:
    """The frames.  Raises MessageTooLarge."""
    body = _encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"{type(message).__name__}: {len(body)} bytes exceed the {MAX_MESSAGE_BYTES} of a message"
        )
    return [_encode(Header(PROTOCOL, run_id, request, sender)), body]


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
    keys: of the run, for TCP; without them it must be loopback.
    """

    def __init__(
        self, address: str, run_id: str, handlers: Mapping[type[Message], Handler], *, keys: Keys | None = None
    ) -> None:
        self.address = address
        self.run_id = run_id
        self.malformed = 0
        """Messages that could not be read."""
        self._keys = keys
        self._handlers = dict(handlers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = self._scheduled = False

    async def start(self) -> None:
        """Bind and begin to answer.  Raises zmq.ZMQError if the address is taken, ValueError if it needs other keys."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()  # of its own: a context has one authenticator
        self._authenticator: AsyncioAuthenticator | None = None
        self._socket = _socket(zmq.Context.shadow(self._context), zmq.ROUTER)
        try:
            self._socket.router_mandatory = 1
            if secure_server(self._socket, self.address, self._keys):
                assert self._keys is not None
                self._authenticator = AsyncioAuthenticator(self._context, log=log.getChild("keys"))
                self._authenticator.configure_curve_callback("*", ClientCheck(self._keys))
                self._authenticator.start()
            self._socket.bind(self.address)
        except BaseException:
            self._release()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._loop.add_reader(self._socket.fd, self._receive)
        self._receive_soon()

    async def close(self) -> None:
        """Stop answering; requests that are being handled are cancelled."""
        self._closed = True
        self._loop.remove_reader(self._socket.fd)
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._release()

    def _release(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.close(0)
        self._context.term()

    # The socket's descriptor is edge-triggered: it says once that something came, and a send may swallow that.  So after
    # every event and every reply the socket itself is asked, until it has nothing.

    def _receive_soon(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        for _ in range(RECEIVED_AT_ONCE):
            if len(self._tasks) >= MAX_CONCURRENT_HANDLERS:
                return  # `_finished` goes on
            try:
                frames = [self._socket.recv(_NOW, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more:
                frames.append(self._socket.recv(_NOW, copy=False))
            task = asyncio.Task(self._answer(frames), loop=self._loop, eager_start=True)
            if not task.done():
                self._tasks.add(task)
                task.add_done_callback(self._finished)
        self._receive_soon()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._receive_soon()

    async def _answer(self, frames: list[zmq.Frame]) -> None:
        identity, request = frames[0].bytes, -1
        try:
            header = _decode_header(frames[1].buffer)
            request = header.request
            if header.protocol != PROTOCOL:
                reply: Message = Refused(
                    f"protocol {header.protocol}, this is {PROTOCOL}: run the same version everywhere"
                )
            elif header.run_id != self.run_id:
                reply = Refused(f"run {header.run_id!r}, this is {self.run_id!r}: the address belongs to another run")
            else:
                message = _decode_body(frames[2].buffer)
                frames.clear()  # what was decoded is a copy
                reply = await self._handle(header.sender, message)
        except (msgspec.MsgspecError, IndexError) as error:
            self.malformed += 1
            reply = Refused(f"malformed message: {error}")
        try:
            head, body = _encoded(self.run_id, request, "", reply)
        except MessageTooLarge as error:
            head, body = _encoded(self.run_id, request, "", Failed(str(error)))
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone, or does not read: it will ask again
            self._socket.send(identity, _NOW_AND_MORE)
            self._socket.send(head, _NOW_AND_MORE)
            self._socket.send(body, _NOW, copy=len(body) < COPIED_BYTES)
        self._receive_soon()

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
    """Asyncio client of one server; any number of requests may be in flight.  keys: of the run, for TCP."""

    def __init__(self, address: str, run_id: str, name: str, *, keys: Keys | None = None) -> None:
        self.address = address
        self.run_id = run_id
        self.name = name
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._socket = _dealer(zmq.asyncio.Context.instance(), address, keys)
        self._loop: asyncio.Task[None] | None = None

    @overload
    async def request(
        self, message: Message, *, timeout: float, expect: type[Reply], retry_s: float = 0.0
    ) -> Reply: ...
    @overload
    async def request(
        self, message: Message, *, timeout: float, expect: tuple[type[Message], ...], retry_s: float = 0.0
    ) -> Message: ...
    async def request(self, message: Message, *, timeout: float, expect: Any, retry_s: float = 0.0) -> Any:
        """Send and await the reply.

        timeout: seconds for one reply.  retry_s: after a timeout ask again until so many seconds have passed, since the peer
        may be starting again; for requests whose repetition changes nothing.
        Raises RequestTimeout, RequestFailed, RequestRefused, MessageTooLarge.
        """
        give_up = time.monotonic() + retry_s
        while True:
            try:
                return _checked(await self._once(message, timeout), expect, self.address, message)
            except RequestTimeout:
                if time.monotonic() >= give_up:
                    raise

    async def _once(self, message: Message, timeout: float) -> Message:
        if self._loop is None:
            self._loop = asyncio.create_task(self._receive())
        request = next(self._ids)
        frames = _encoded(self.run_id, request, self.name, message)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        try:
            async with asyncio.timeout(timeout):
                await self._socket.send_multipart(frames, copy=False)
                return await future
        except TimeoutError:
            raise RequestTimeout(f"{type(message).__name__}: no reply from {self.address} in {timeout:.1f} s") from None
        finally:
            del self._waiting[request]

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if (found := _read_reply(frames, self.address)) is not None:
                future = self._waiting.get(found[0])
                if future is not None and not future.done():
                    future.set_result(found[1])

    def close(self) -> None:
        """Drop the connection; requests in flight time out."""
        if self._loop is not None:
            self._loop.cancel()
        self._socket.close(0)


class BlockingClient:
    """The same without asyncio, one request at a time, for the trainer.  Not thread-safe."""

    def __init__(self, address: str, run_id: str, name: str, *, keys: Keys | None = None) -> None:
        self.address = address
        self.run_id = run_id
        self.name = name
        self._ids = itertools.count()
        self._socket = _dealer(zmq.Context.instance(), address, keys)

    @overload
    def request(self, message: Message, *, timeout: float, expect: type[Reply], retry_s: float = 0.0) -> Reply: ...
    @overload
    def request(
        self, message: Message, *, timeout: float, expect: tuple[type[Message], ...], retry_s: float = 0.0
    ) -> Message: ...
    def request(self, message: Message, *, timeout: float, expect: Any, retry_s: float = 0.0) -> Any:
        """As `Client.request`."""
        give_up = time.monotonic() + retry_s
        while True:
            try:
                return _checked(self._once(message, timeout), expect, self.address, message)
            except RequestTimeout:
                if time.monotonic() >= give_up:
                    raise

    def _once(self, message: Message, timeout: float) -> Message:
        request = next(self._ids)
        deadline = time.monotonic() + timeout
        self._socket.sndtimeo = max(1, int(timeout * 1000))
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(_encoded(self.run_id, request, self.name, message))
            while self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                found = _read_reply(self._socket.recv_multipart(), self.address)
                if found is not None and found[0] == request:
                    return found[1]
        raise RequestTimeout(f"{type(message).__name__}: no reply from {self.address} in {timeout:.1f} s")

    def close(self) -> None:
        self._socket.close(0)


def _read_reply(frames: list[bytes], address: str) -> tuple[int, Message] | None:
    """(request id, reply); None for what cannot be read, which its request then waits for in vain."""
    try:
        return _decode_header(frames[0]).request, _decode_body(frames[1])
    except (msgspec.MsgspecError, IndexError) as error:
        log.warning("malformed reply from %s: %s", address, error)
        return None
