"""The generation client of a browser worker: picks a host, sends images once, and never waits past its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import numpy as np

from megatron_webrl.config import SamplingConfig
from megatron_webrl.trajectory import INT32, pack
from megatron_webrl.wire import Client, Keys, RequestFailed, RequestRefused, RequestTimeout
from megatron_webrl.wire.messages import (
    Engines,
    EngineStatus,
    EngineUnavailable,
    Generate,
    Generated,
    ListEngines,
    NeedImages,
)

_REFRESH_S = 1.0
"""How often routes are asked for while a request waits."""
_AVOID_S = 1.0
"""A host that just failed a request is asked again after so many seconds, if there is another."""


class EngineUnreachable(Exception):
    """No engine host could serve the request before its deadline: a fault, not the policy's doing."""


class GenerationClient:
    """Token-in, token-out over all engine hosts that the coordinator knows.

    coordinator: shared with its owner, who closes it.  keys: of the run.
    banned_ids: tokens never sampled; stop_ids: tokens that end a reply and are kept in it.
    request_timeout_s: upper bound of every call's timeout.
    """

    def __init__(
        self,
        coordinator: Client,
        sampling: SamplingConfig,
        banned_ids: Sequence[int] | np.ndarray,
        stop_ids: Sequence[int] | np.ndarray,
        request_timeout_s: float,
        *,
        keys: Keys | None = None,
    ) -> None:
        self._coordinator, self._keys = coordinator, keys
        self._sampling = sampling
        self._banned, self._stop = pack(banned_ids, INT32), pack(stop_ids, INT32)
        self._request_timeout_s = request_timeout_s
        self._hosts: dict[str, EngineStatus] = {}
        self._clients: dict[str, Client] = {}
        self._in_flight: dict[str, int] = {}
        self._avoid: dict[str, float] = {}
        self._listed_at = -_REFRESH_S
        self._listing = asyncio.Lock()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        images: dict[str, bytes],
        *,
        seed: int,
        temperature: float,
        timeout_s: float,
        digests: Sequence[str] | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Generated:
        """Sample one reply.

        prompt_ids: int [P], one image_pad an image.  images: encoded bytes by digest, oldest first.  digests: one an
        image_pad, where a screenshot occurs twice; else the order of `images`.  temperature 0 is greedy.
        The reply's `waited_s` includes what was spent here without a host that serves.
        Raises EngineUnreachable after `timeout_s` (or the client's request timeout, if that is shorter), and at once
        when a host says that the request itself failed.
        """
        order = list(images if digests is None else digests)
        prompt = pack(prompt_ids, INT32)
        carried = {d: images[d] for d in order[-1:]}
        began = time.monotonic()
        deadline = began + min(timeout_s, self._request_timeout_s)
        reason = "no engine host is known to the coordinator"
        while (left := deadline - time.monotonic()) > 0:
            await self._refresh_routes(min(left, 5.0))
            host = self._choose()
            if host is None:
                await asyncio.sleep(min(0.1, left))
                continue
            sent = time.monotonic()
            request = Generate(
                prompt_ids=prompt,
                digests=order,
                images=carried,
                max_new_tokens=self._sampling.max_new_tokens,
                temperature=temperature,
                seed=seed,
                banned_ids=self._banned,
                stop_ids=self._stop,
                deadline_s=left,
                top_p=top_p,
                top_k=top_k,
            )
            reply = await self._ask(host, request, deadline)
            if isinstance(reply, Generated):
                reply.waited_s += sent - began
                return reply
            if isinstance(reply, NeedImages):
                lacking = [d for d in reply.digests if d not in images]
                if lacking:
                    raise ValueError(f"the prompt names images that were not given: {lacking}")
                carried = dict(images)
                continue
            reason = f"{host.name}: {reply}"
            self._avoid[host.name] = time.monotonic() + _AVOID_S
            await asyncio.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
        raise EngineUnreachable(f"no engine served the request within {time.monotonic() - began:.1f} s: {reason}")

    async def close(self) -> None:
        """Close the sockets to the hosts; requests in flight fail."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _choose(self) -> EngineStatus | None:
        """Fewest of our own requests in flight among hosts that serve, else among any that may yet."""
        now = time.monotonic()
        hosts = [h for h in self._hosts.values() if h.state != "dead"]
        for wanted in (
            [h for h in hosts if h.state == "serving" and self._avoid.get(h.name, 0.0) <= now],
            [h for h in hosts if self._avoid.get(h.name, 0.0) <= now],
            hosts,
        ):
            if wanted:
                return min(wanted, key=lambda h: (self._in_flight.get(h.name, 0), h.running, h.name))
        return None

    async def _ask(self, host: EngineStatus, request: Generate, deadline: float) -> Generated | NeedImages | str:
        """The reply, or why there is none.  A host whose process was replaced meanwhile has lost the request."""
        client = self._clients.get(host.address)
        if client is None:
            client = self._clients[host.address] = Client(
                host.address, self._coordinator.run_id, self._coordinator.name, keys=self._keys
            )
        self._in_flight[host.name] = self._in_flight.get(host.name, 0) + 1
        wait = max(0.1, deadline - time.monotonic())
        task = asyncio.ensure_future(
            client.request(request, timeout=wait + 1.0, expect=(Generated, NeedImages, EngineUnavailable))
        )
        try:
            while not (await asyncio.wait({task}, timeout=_REFRESH_S))[0]:
                await self._refresh_routes(_REFRESH_S)
                now = self._hosts.get(host.name)
                if now is None or now.state == "dead" or _process(now) != _process(host):
                    return "the host went away"
            reply = task.result()
            assert isinstance(reply, Generated | NeedImages | EngineUnavailable)
            return reply.reason if isinstance(reply, EngineUnavailable) else reply
        except RequestTimeout as error:
            return str(error)
        except (RequestFailed, RequestRefused) as error:
            raise EngineUnreachable(str(error)) from None
        finally:
            task.cancel()
            self._in_flight[host.name] -= 1

    async def _refresh_routes(self, timeout: float) -> None:
        """Ask the coordinator for the hosts, at most once a second for all callers together."""
        if time.monotonic() - self._listed_at < _REFRESH_S:
            return
        async with self._listing:
            if time.monotonic() - self._listed_at < _REFRESH_S:
                return
            with contextlib.suppress(RequestTimeout, RequestFailed):  # the known routes stay good meanwhile
                reply = await self._coordinator.request(ListEngines(), timeout=timeout, expect=Engines)
                self._hosts = {h.name: h for h in reply.hosts}
                gone = set(self._clients) - {h.address for h in reply.hosts}
                for address in gone:
                    self._clients.pop(address).close()
            self._listed_at = time.monotonic()


def _process(host: EngineStatus) -> tuple[str, int]:
    """Identity of the host's own process: it counts its SGLang's incarnations from one base."""
    return host.address, host.incarnation - host.starts
