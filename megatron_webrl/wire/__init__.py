"""Sockets between roles: requests and replies with deadlines over ZeroMQ.  The messages are in `wire.messages`."""

from megatron_webrl.wire.keys import Keys
from megatron_webrl.wire.messages import PROTOCOL, Message
from megatron_webrl.wire.sockets import (
    BlockingClient,
    Client,
    Handler,
    MessageTooLarge,
    RequestFailed,
    RequestRefused,
    RequestTimeout,
    Server,
    WireError,
)

__all__ = [
    "PROTOCOL",
    "BlockingClient",
    "Client",
    "Handler",
    "Keys",
    "Message",
    "MessageTooLarge",
    "RequestFailed",
    "RequestRefused",
    "RequestTimeout",
    "Server",
    "WireError",
]
