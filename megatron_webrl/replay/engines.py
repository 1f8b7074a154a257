"""Which engine hosts there are, by what they say of themselves each second."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from hashlib import blake2b

from megatron_webrl.wire.messages import EngineStatus

log = logging.getLogger(__name__)

SILENT_S = 5.0


class EngineRegistry:
    """The newest word of every host that ever spoke; one that is silent for `SILENT_S` counts as dead."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[EngineStatus, float]] = {}

    def hear(self, status: EngineStatus) -> bool:
        """Returns whether the host's state or version changed."""
        old = self._heard.get(status.name)
        self._heard[status.name] = (status, time.monotonic())
        changed = old is None or (old[0].state, old[0].version) != (status.state, status.version)
        if changed:
            log.info("engine host %s: %s, version %d", status.name, status.state, status.version)
        return changed

    def hosts(self) -> list[EngineStatus]:
        now = time.monotonic()
        for name, (status, heard) in self._heard.items():
            if now - heard > SILENT_S and status.state != "dead":
                status.state = "dead"
                log.warning("engine host %s is silent for %.0f s", name, now - heard)
        return [status for status, _ in self._heard.values()]

    def given(self, worker: str, count: int) -> list[EngineStatus]:
        """The hosts that a worker is to generate on."""
        return share(worker, [h for h in self.hosts() if h.state not in ("draining", "dead")], count)

    def behind(self, version: int) -> bool:
        """Whether an engine serves weights older than `version`: its refresh is under way."""
        return any(h.state == "serving" and h.version < version for h in self.hosts())


def share(worker: str, hosts: Sequence[EngineStatus], count: int) -> list[EngineStatus]:
    """`count` of the hosts for this worker, or all if there are fewer; such that serve before others.

    By rendezvous hashing (Thaler and Ravishankar 1998): every worker ranks the hosts by a hash of both names.  A host that
    comes or goes changes the share of those workers only that have it among their first.
    """

    def rank(host: EngineStatus) -> tuple[bool, bytes]:
        return host.state != "serving", blake2b(f"{worker}\0{host.name}".encode(), digest_size=8).digest()

    return sorted(hosts, key=rank)[:count]
