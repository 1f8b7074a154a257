"""The generation client of a browser worker: picks a host, sends images once, keeps what was sampled when a host is lost,
and never waits past its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from random import Random

import numpy as np

from megatron_webrl.config import SamplingConfig
from megatron_webrl.engine.generation import ended
from megatron_webrl.engine.routing import pick
from megatron_webrl.trajectory import INT32, pack, unpack
from megatron_webrl.wire import Client, Keys, RequestFailed, RequestRefused, RequestTimeout, WireError
from megatron_webrl.wire.messages import (
    CancelGeneration,
    Done,
    Engines,
    EngineStatus,
    EngineUnavailable,
    Generate,
    Generated,
    Generating,
    ListEngines,
    Message,
    NeedImages,
    PollGeneration,
)

POLL_S = 2.0
"""How long a host may wait with its answer: the tokens that are older than this outlive it."""
REPLY_S = 2.0
"""How much later an answer counts as lost, and is asked for again."""
SILENT_S = 10.0
"""A host that is silent for so long is left, or earlier if the coordinator misses it too."""
LIST_S = 1.0
"""How often routes are asked for."""
AVOID_S = 1.0
"""A host that just failed a request is asked again after so many seconds, if there is another."""
HOMES = 4096
"""Episodes whose host is remembered."""


class EngineUnreachable(Exception):
    """No engine host could serve the request before its deadline: a fault, not the policy's doing."""


class _Route:
    """A host, the connection to it, and what is known of its load."""

    def __init__(self, status: EngineStatus, client: Client) -> None:
        self.status, self.client = status, client
        self.listed = True
        self.ours = 0
        """Generations of this client that are there."""
        self.others = 0
        """Of other clients, by its newest word."""
        self.avoid_until = 0.0

    def hear(self, running: int) -> None:
        """It says how many it has."""
        self.others = max(0, running - self.ours)


class _Reply:
    """What was sampled of a reply so far, at one host after another.  Packed; see Generated."""

    def __init__(self) -> None:
        self.ids = self.logprobs = self.versions = b""
        self.waited_s = 0.0

    def add(self, part: Generating | Generated | EngineUnavailable, *, again: int = 0) -> int:
        """Returns the number of its tokens, of which the first `again` are there already and replaced."""
        keep = len(self.ids) - INT32.itemsize * again
        self.ids = self.ids[:keep] + part.response_ids
        self.logprobs = self.logprobs[:keep] + part.logprobs
        self.versions = self.versions[:keep] + part.versions
        return len(part.response_ids) // INT32.itemsize


class GenerationClient:
    """Token-in, token-out over the engine hosts that the coordinator gives.

    coordinator: shared with its owner, who closes it; its name is that of the worker.  keys: of the run.
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
        self._routes: dict[str, _Route] = {}
        """By address."""
        self._homes: OrderedDict[Hashable, str] = OrderedDict()
        """Address of the host that served an episode last."""
        self._random = Random(coordinator.name)
        self._listed_at = -LIST_S
        self._listing = asyncio.Lock()
        self._cancelling: set[asyncio.Task[None]] = set()

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
        affinity: Hashable | None = None,
    ) -> Generated:
        """Sample one reply.

        prompt_ids: int [P], one image_pad an image.  images: encoded bytes by digest, oldest first.  digests: one an
        image_pad, where a screenshot occurs twice; else the order of `images`.  temperature 0 is greedy; top_k 0 is off.
        affinity: names the episode; its requests go to one host as long as that serves and is not too busy.
        The reply's `waited_s` includes what was spent here without a host that serves.  Cancelled, it is aborted at its host.
        Raises EngineUnreachable after `timeout_s` (or the client's request timeout, if that is shorter), and at once
        when a host says that the request itself failed.
        """
        order = list(images if digests is None else digests)
        request = Generate(
            request="",
            prompt_ids=pack(prompt_ids, INT32),
            digests=order,
            images={},
            max_new_tokens=self._sampling.max_new_tokens,
            temperature=temperature,
            seed=seed,
            banned_ids=self._banned,
            stop_ids=self._stop,
            deadline_s=0.0,
            wait_s=POLL_S,
            top_p=top_p,
            top_k=top_k,
        )
        reply = _Reply()
        asked: set[str] = set()
        carried = order[-1:]
        home = None if affinity is None else self._homes.get(affinity)
        began = idle_since = time.monotonic()
        deadline = began + min(timeout_s, self._request_timeout_s)
        reason = "no engine host is known to the coordinator"
        while (left := deadline - time.monotonic()) > 0:
            await self._list(min(left, 1.0))
            route = self._choose(home)
            if route is None:
                await asyncio.sleep(min(0.1, left))
                continue
            reply.waited_s += time.monotonic() - idle_since
            request.request, request.prefix_ids = uuid.uuid4().hex, reply.ids
            request.images = {digest: images[digest] for digest in carried}
            answer = await self._ask(route, request, reply, deadline)
            idle_since = time.monotonic()
            if isinstance(answer, NeedImages):
                asked |= set(answer.digests)
                if lacking := asked - set(images):
                    raise ValueError(f"the prompt names images that were not given: {sorted(lacking)}")
                carried, home = list(asked), route.status.address
                continue
            finish = answer.finish_reason if isinstance(answer, Generated) else self._ended(reply.ids)
            if finish:
                if affinity is not None:
                    self._remember(affinity, route)
                return Generated(
                    reply.ids, reply.logprobs, reply.versions, finish, reply.waited_s, route.others + route.ours
                )
            reason = f"{route.status.name}: {answer}"
            route.avoid_until = time.monotonic() + AVOID_S
            await asyncio.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
        raise EngineUnreachable(f"no engine served the request within {time.monotonic() - began:.1f} s: {reason}")

    async def close(self) -> None:
        """Close the sockets to the hosts; requests in flight fail."""
        for task in (tasks := list(self._cancelling)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for route in self._routes.values():
            route.client.close()
        self._routes.clear()

    def _ended(self, ids: bytes) -> str:
        """Why a reply of these tokens is finished, if it is: its host may be lost before it says so."""
        return ended(unpack(ids, INT32).tolist(), unpack(self._stop, INT32).tolist(), self._sampling.max_new_tokens)

    # Routes -----------------------------------------------------------------------------------------------------------

    def _choose(self, home: str | None) -> _Route | None:
        """Among hosts that serve, else among any that may yet: they hold the request until they do."""
        now = time.monotonic()
        routes = [r for r in self._routes.values() if r.listed and r.status.state not in ("draining", "dead")]
        for wanted in (
            [r for r in routes if r.status.state == "serving" and r.avoid_until <= now],
            [r for r in routes if r.avoid_until <= now],
            routes,
        ):
            if wanted:
                loads = {r.status.address: r.ours + r.others for r in wanted}
                return self._routes[pick(loads, home, self._random)]
        return None

    def _another_serves(self, route: _Route) -> bool:
        return any(r.listed and r.status.state == "serving" for r in self._routes.values() if r is not route)

    def _remember(self, affinity: Hashable, route: _Route) -> None:
        self._homes[affinity] = route.status.address
        self._homes.move_to_end(affinity)
        while len(self._homes) > HOMES:
            self._homes.popitem(last=False)

    async def _list(self, timeout: float) -> None:
        """Ask the coordinator for the hosts, at most once a second for all callers together."""
        if time.monotonic() - self._listed_at < LIST_S:
            return
        async with self._listing:
            if time.monotonic() - self._listed_at < LIST_S:
                return
            with contextlib.suppress(RequestTimeout, RequestFailed):  # the known routes stay good meanwhile
                reply = await self._coordinator.request(
                    ListEngines(self._coordinator.name), timeout=timeout, expect=Engines
                )
                self._update(reply.hosts)
            self._listed_at = time.monotonic()

    def _update(self, hosts: list[EngineStatus]) -> None:
        for route in self._routes.values():
            route.listed = False
        for status in hosts:
            known = self._routes.get(status.address)
            if known is None:
                client = Client(status.address, self._coordinator.run_id, self._coordinator.name, keys=self._keys)
                known = self._routes[status.address] = _Route(status, client)
            known.status, known.listed = status, True
            known.hear(status.running)
        for address, route in list(self._routes.items()):
            if not route.listed and not route.ours:
                self._routes.pop(address).client.close()

    # One host ---------------------------------------------------------------------------------------------------------

    async def _ask(
        self, route: _Route, request: Generate, reply: _Reply, deadline: float
    ) -> Generated | NeedImages | str:
        """Generate on one host.  Returns the end, or why there is none; what was sampled and told is added to the reply."""
        request.deadline_s = deadline - time.monotonic()
        message: Generate | PollGeneration = request
        have, heard, waited_s, wait_s = 0, time.monotonic(), 0.0, POLL_S
        answer: Message | None = None
        route.ours += 1
        try:
            while (left := deadline - time.monotonic()) > 0:
                message.wait_s = min(wait_s, left)
                try:
                    answer = await route.client.request(
                        message,
                        timeout=min(wait_s + REPLY_S, left + 1.0),
                        expect=(Generating, Generated, EngineUnavailable, NeedImages),
                    )
                except RequestTimeout as error:  # the message or its answer may be lost, or the host
                    await self._list(1.0)
                    missed = not route.listed or route.status.state == "dead"
                    if missed or time.monotonic() - heard > SILENT_S:
                        return str(error)
                    wait_s = 0.0  # it is to answer at once, if it is there
                    continue
                if isinstance(answer, NeedImages):
                    return answer
                assert isinstance(answer, Generating | Generated | EngineUnavailable)
                heard, waited_s, wait_s = time.monotonic(), answer.waited_s, POLL_S
                if isinstance(answer, EngineUnavailable):
                    reply.add(answer)
                    return answer.reason
                route.hear(answer.running)
                if isinstance(answer, Generated):
                    reply.add(answer, again=have)
                    return answer
                have += reply.add(answer)
                message = PollGeneration(request.request, have, POLL_S)
                if not have:
                    await self._list(1.0)
                    if route.status.state != "serving" and self._another_serves(route):
                        return f"it is {route.status.state}"
            return "it was not finished at the deadline"
        except (RequestFailed, RequestRefused) as error:
            answer = None
            raise EngineUnreachable(str(error)) from None
        finally:
            route.ours -= 1
            if not isinstance(answer, Generated | NeedImages | EngineUnavailable):
                reply.waited_s += waited_s + time.monotonic() - heard
                self._cancel(route, request.request)
            else:
                reply.waited_s += waited_s

    def _cancel(self, route: _Route, request: str) -> None:
        """Tell the host that the generation is not wanted any more, without waiting for it."""

        async def tell() -> None:
            if self._routes.get(route.status.address) is not route:
                return  # its socket is closed
            with contextlib.suppress(WireError):
                await route.client.request(CancelGeneration(request), timeout=REPLY_S, expect=Done)

        task = asyncio.create_task(tell())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)
