"""Who may speak: the CURVE keys of a run, and which socket needs them."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import zmq


@dataclass(frozen=True)
class Keys:
    """CURVE keys of one run (Z85, 40 bytes each): one pair for all that serve, one for all that ask.  Made by the driver and
    handed to roles as arguments; never printed."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes = field(repr=False)
    server_secret: bytes | None = field(repr=False)
    """None for a role that serves nothing."""

    @classmethod
    def make(cls) -> Keys:
        """New ones."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(server_public, client_public, client_secret, server_secret)

    def for_client(self) -> Keys:
        """Enough to ask."""
        return Keys(self.server_public, self.client_public, self.client_secret, None)


def secure_client(socket: Any, address: str, keys: Keys | None) -> None:
    """Make `socket` ask at `address` with the run's keys, if it is TCP.  Raises ValueError for an open network without keys."""
    if curve := _needed(address, keys):
        socket.curve_serverkey = curve.server_public
        socket.curve_publickey, socket.curve_secretkey = curve.client_public, curve.client_secret


def secure_server(socket: Any, address: str, keys: Keys | None) -> bool:
    """The same for one that serves; whether it needs a `ClientCheck` beside it."""
    curve = _needed(address, keys)
    if curve is None:
        return False
    if curve.server_secret is None:
        raise ValueError(f"{address}: these keys are a client's, and cannot serve")
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = curve.server_public, curve.server_secret
    return True


def _needed(address: str, keys: Keys | None) -> Keys | None:
    if not address.startswith("tcp://"):
        return None  # a Unix socket is guarded by its folder
    if keys is None and not _is_loopback(urlsplit(address).hostname or ""):
        raise ValueError(f"{address} is open to the network: it needs the run's keys")
    return keys


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ClientCheck:
    """Admits the holder of one client key: what the authenticator asks (ZAP)."""

    def __init__(self, keys: Keys) -> None:
        self._admitted = keys.client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._admitted
