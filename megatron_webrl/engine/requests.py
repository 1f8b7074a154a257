"""The generations of an engine host: begun by one message, told by others, kept until they are told.

A generation belongs to its id, not to a connection: every message may be repeated, and a connection that breaks loses
nothing.  What nobody asks for any more is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Protocol

from megatron_webrl.config import EngineConfig
from megatron_webrl.engine.generation import ImageCache, Sampled, ServingGate, request_body
from megatron_webrl.engine.sglang_server import SglangError, SglangGone, SglangServer
from megatron_webrl.trajectory import FLOAT32, INT32, pack
from megatron_webrl.wire import Handler
from megatron_webrl.wire.messages import (
    CancelGeneration,
    Done,
    EngineUnavailable,
    Generate,
    Generated,
    Generating,
    Message,
    NeedImages,
    PollGeneration,
)

log = logging.getLogger(__name__)

ABANDONED_S = 15.0
"""A generation that nobody has asked for so long is aborted, or, if it is finished, forgotten."""
MOST_GENERATIONS = 4096
ABORT_TIMEOUT_S = 5.0
TELL_S = 5.0
"""So long a host that leaves waits for its clients to ask once more."""


class Host(Protocol):
    """What the generations need of the engine host that owns them."""

    state: str
    version: int
    gate: ServingGate
    sglang: SglangServer

    def heard(self) -> None:
        """Its SGLang gave a sign of life."""


class _Generation:
    """One reply: what is sampled of it, and how long it waited."""

    def __init__(self, gate: ServingGate) -> None:
        self.sampled = Sampled(0)
        self.unavailable = ""
        """Why it ended without a finished reply."""
        self.error: Exception | None = None
        """The request itself is wrong."""
        self.told = False
        """Somebody was sent its end."""
        self.asking = 0
        self.asked_at = time.monotonic()
        self.task: asyncio.Task[None]
        self._gate = gate
        self._arrived = time.monotonic()
        self._sent: tuple[float, float] | None = None
        """When it was sent to SGLang, and how long the gate had been shut until then."""
        self._kept = (self._arrived, 0.0)
        """When its newest token came, and how long it had waited until then."""
        self._waited_s: float | None = None

    def send(self, version: int) -> None:
        """It goes to SGLang now, which serves `version`."""
        self.sampled = Sampled(version)
        self._sent = time.monotonic(), self._gate.shut_seconds()
        self.keep()

    def keep(self) -> None:
        """Tokens came."""
        self._kept = time.monotonic(), self.waited_s()

    def waited_s(self) -> float:
        """Seconds without an engine that serves it, so far."""
        if self._waited_s is not None:
            return self._waited_s
        if self._sent is None:
            return time.monotonic() - self._arrived
        sent, shut_s = self._sent
        return sent - self._arrived + self._gate.shut_seconds() - shut_s

    def end(self) -> None:
        """Nothing changes any more.  Of an unfinished reply, all the time since its newest token was in vain."""
        at, waited_s = self._kept
        self._waited_s = self.waited_s() if self.sampled.finish_reason else waited_s + time.monotonic() - at


class GenerationTable:
    """Answers Generate, PollGeneration and CancelGeneration.

    A generation is held until SGLang serves, sent once, and ends with its reply, or unavailable with what was sampled: then
    its client goes on from there, wherever an engine serves.
    """

    def __init__(self, host: Host, engine: EngineConfig) -> None:
        self._host = host
        self._images = ImageCache(engine.image_cache_bytes)
        self._slots = asyncio.Semaphore(engine.max_running_requests)  # so that queueing is seen, and counted as such
        self._table: dict[str, _Generation] = {}
        self.running = 0
        """Generations that are not finished."""
        self._refusing = ""
        self._aborts: set[asyncio.Task[None]] = set()

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Of the host's server."""
        return {Generate: self._begin, PollGeneration: self._poll, CancelGeneration: self._cancel}

    def sweep(self) -> None:
        """Abort and forget what nobody asks for.  To be called every second or so."""
        now = time.monotonic()
        for request, generation in list(self._table.items()):
            if not generation.asking and now - generation.asked_at > ABANDONED_S:
                self._interrupt(generation, "nobody asked for it any more")
                del self._table[request]

    async def drain(self, deadline: float, reason: str) -> None:
        """Begin none.  Returns when all have ended, at `deadline` (time.monotonic) or without an engine interrupted with what
        they have, and their clients know."""
        self._refusing = reason
        while self.running and self._host.gate.is_open and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for generation in self._table.values():
            self._interrupt(generation, reason)
        told_by = time.monotonic() + TELL_S
        while time.monotonic() < told_by and not all(g.told for g in self._table.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Abort everything."""
        tasks = [g.task for g in self._table.values()]
        for task in (*tasks, *self._aborts):
            task.cancel()
        await asyncio.gather(*tasks, *self._aborts, return_exceptions=True)

    # Messages ---------------------------------------------------------------------------------------------------------

    async def _begin(self, sender: str, message: Generate) -> Message:
        generation = self._table.get(message.request)
        if generation is None:
            self._images.put(message.images)
            found = {digest: message.images.get(digest) or self._images.get(digest) for digest in message.digests}
            if lacking := [digest for digest, data in found.items() if data is None]:
                return NeedImages(lacking)
            if self._refusing or not self._room():
                return EngineUnavailable(self._refusing or f"{len(self._table)} generations are under way")
            images = [found[digest] or b"" for digest in message.digests]
            generation = self._table[message.request] = _Generation(self._host.gate)
            generation.task = asyncio.create_task(self._run(generation, message, images))
            generation.task.add_done_callback(self._ended)
            self.running += 1
        return await self._answer(generation, 0, message.wait_s)

    async def _poll(self, sender: str, message: PollGeneration) -> Message:
        generation = self._table.get(message.request)
        if generation is None:
            return EngineUnavailable("no such generation: the host was replaced, or gave it up")
        return await self._answer(generation, message.have, message.wait_s)

    async def _cancel(self, sender: str, message: CancelGeneration) -> Message:
        generation = self._table.pop(message.request, None)
        if generation is not None:
            self._interrupt(generation, "cancelled")
        return Done()

    async def _answer(self, generation: _Generation, have: int, wait_s: float) -> Message:
        generation.asking += 1
        try:
            await asyncio.wait({generation.task}, timeout=wait_s)
        finally:
            generation.asking -= 1
            generation.asked_at = time.monotonic()
        sampled, ended = generation.sampled, generation.task.done()
        generation.told |= ended
        if generation.error is not None:
            raise generation.error
        finished = ended and sampled.finish_reason != ""
        since = 0 if finished else max(0, have)
        tokens = (
            pack(sampled.ids[since:], INT32),
            pack(sampled.logprobs[since:], FLOAT32),
            pack(sampled.versions[since:], INT32),
        )
        if finished:
            return Generated(*tokens, sampled.finish_reason, generation.waited_s(), self.running)
        if ended:
            return EngineUnavailable(generation.unavailable, *tokens, generation.waited_s())
        return Generating(*tokens, generation.waited_s(), self.running)

    def _room(self) -> bool:
        """For one more, at the cost of the first whose end was told."""
        if len(self._table) >= MOST_GENERATIONS:
            told = next((request for request, g in self._table.items() if g.told), None)
            if told is None:
                return False
            del self._table[told]
        return True

    # A generation -----------------------------------------------------------------------------------------------------

    async def _run(self, generation: _Generation, message: Generate, images: list[bytes]) -> None:
        rid = ""
        try:
            async with asyncio.timeout(message.deadline_s), self._slots:
                while not self._host.gate.is_open:
                    await self._host.gate.wait()
                version = self._host.version
                body = request_body(message, images, version=version)
                rid = body["rid"] = uuid.uuid4().hex  # of this try alone: SGLang aborts all that begin with a given one
                generation.send(version)
                async with contextlib.aclosing(self._host.sglang.generate(body)) as chunks:
                    async for chunk in chunks:
                        generation.sampled.add(chunk)
                        generation.keep()
                        self._host.heard()
            if not generation.sampled.finish_reason:
                raise SglangGone("SGLang ended its reply without a reason")
        except TimeoutError:
            generation.unavailable = f"{self._host.state} and no reply within {message.deadline_s:.1f} s"
        except SglangGone as error:
            generation.unavailable = str(error)
        except asyncio.CancelledError:
            if not generation.unavailable:
                raise
        except Exception as error:  # what is wrong with the request is told to who asks
            generation.error = error
        finally:
            generation.end()
            if rid and not generation.sampled.finish_reason and self._host.state not in ("starting", "dead"):
                self._abort(rid)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.running -= 1

    def _interrupt(self, generation: _Generation, reason: str) -> None:
        if not generation.task.done():
            generation.unavailable = reason
            generation.task.cancel()

    def _abort(self, rid: str) -> None:
        """Tell SGLang, which goes on sampling otherwise until it sees that its connection was closed."""

        async def tell() -> None:
            with contextlib.suppress(SglangError):
                await self._host.sglang.control("/abort_request", ABORT_TIMEOUT_S, rid=rid)

        task = asyncio.create_task(tell())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
