"""Weights into the SGLang of an engine host: by broadcasts of buckets, or from a directory on disk.

    join (one group a pipeline stage of the trainer) … begin, load a bucket, …, load the last, end

All or nothing: an SGLang that refused a step holds a mixture, serves nothing, and waits for an export on disk.  One that
is late, or broke, is killed: it may be inside a collective that will never come.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, Protocol

from megatron_webrl.engine.generation import ServingGate
from megatron_webrl.engine.sglang_server import SglangError, SglangGone, SglangServer
from megatron_webrl.observe import Tracer
from megatron_webrl.wire import Handler
from megatron_webrl.wire.messages import (
    BeginRefresh,
    Checksum,
    ChecksumValue,
    Done,
    EndRefresh,
    GiveUpBroadcast,
    JoinWeightGroup,
    LeaveWeightGroup,
    LoadBucket,
    LoadFromDisk,
    Message,
)

log = logging.getLogger(__name__)


class Host(Protocol):
    """What the receiver needs of the engine host that owns it."""

    name: str
    state: str
    version: int
    gate: ServingGate
    sglang: SglangServer

    @property
    def incarnation(self) -> int: ...
    def serve(self, version: int) -> None: ...
    def wait_for_weights(self) -> None: ...
    async def kill(self, incarnation: int) -> None: ...


class WeightReceiver:
    """Answers the trainer's control messages.

    mode: `retract`: requests in flight lose their KV and are recomputed with the new weights; `in_place`: they keep it.
    """

    def __init__(self, host: Host, mode: Literal["retract", "in_place"], trace: Tracer | None = None) -> None:
        self._host, self._mode, self._trace = host, mode, trace
        self._lock = asyncio.Lock()
        self._given_up = asyncio.Event()
        self._grace_s = 0.0
        self._began = 0.0
        self.reset()

    def reset(self) -> None:
        """Another SGLang is being started."""
        self._paused = self._session_open = False
        self._deadline: float | None = None

    def late(self) -> bool:
        """Whether a refresh was begun and not ended before its deadline."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Of the host's server."""
        return {
            JoinWeightGroup: self._join,
            LeaveWeightGroup: self._leave,
            BeginRefresh: self._begin,
            LoadBucket: self._load,
            EndRefresh: self._end,
            GiveUpBroadcast: self._give_up,
            LoadFromDisk: self._load_from_disk,
            Checksum: self._checksum,
        }

    async def _control(self, timeout_s: float, work: Callable[[], Awaitable[Message]], *, partial: bool) -> Message:
        """Run one message against the present SGLang.  One that is late or broke kills it; after one that was refused it
        waits for weights where `partial`: what it holds is no policy any more."""
        incarnation = self._host.incarnation
        if self._host.state not in ("waiting_weights", "serving"):
            raise SglangError(f"{self._host.name} is {self._host.state}: it takes no weights")
        if partial:  # the next step must come before this one's deadline and as long again
            self._deadline = time.monotonic() + 2 * timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._lock:
                return await work()
        except (SglangError, TimeoutError) as error:
            if isinstance(error, TimeoutError | SglangGone):
                log.warning("%s: killing its SGLang: %s", self._host.name, error or "late")
                await self._host.kill(incarnation)
            elif partial and incarnation == self._host.incarnation and self._host.state == "serving":
                self._host.wait_for_weights()
            raise SglangError(str(error) or f"not done within {timeout_s:.1f} s") from None

    async def _join(self, sender: str, message: JoinWeightGroup) -> Message:
        async def work() -> Message:
            await self._host.sglang.control(
                "/init_weights_update_group",
                message.timeout_s + 60.0,
                group_name=message.group,
                backend=message.backend,
                master_address=message.master_address,
                master_port=message.master_port,
                rank_offset=message.rank_offset,
                world_size=message.world_size,
            )
            return Done()

        return await self._control(message.timeout_s, work, partial=False)

    async def _leave(self, sender: str, message: LeaveWeightGroup) -> Message:
        async def work() -> Message:
            await self._host.sglang.control(
                "/destroy_weights_update_group", message.timeout_s, group_name=message.group
            )
            return Done()

        return await self._control(message.timeout_s, work, partial=False)

    async def _begin(self, sender: str, message: BeginRefresh) -> Message:
        async def work() -> Message:
            await self._pause(message.timeout_s)
            if not self._session_open:
                await self._host.sglang.control("/begin_weight_update", message.timeout_s)
                self._session_open = True
            return Done()

        return await self._control(message.timeout_s, work, partial=True)

    async def _load(self, sender: str, message: LoadBucket) -> Message:
        async def work() -> Message:
            if not self._session_open:
                raise SglangError("LoadBucket without BeginRefresh")
            self._given_up.clear()
            load = asyncio.ensure_future(
                self._host.sglang.control(
                    "/update_weights_from_distributed",
                    message.timeout_s + 60.0,
                    group_name=message.group,
                    names=message.names,
                    dtypes=message.dtypes,
                    shapes=message.shapes,
                    load_format="flattened_bucket",
                    flush_cache=message.version is not None and self._mode == "retract",
                    weight_version=None if message.version is None else str(message.version),
                )
            )
            given_up = asyncio.ensure_future(self._given_up.wait())
            try:
                await asyncio.wait({load, given_up}, return_when=asyncio.FIRST_COMPLETED)
                if not load.done():
                    async with asyncio.timeout(self._grace_s):
                        await load
                await load
            finally:
                given_up.cancel()
                load.cancel()
            return Done()

        return await self._control(message.timeout_s, work, partial=True)

    async def _give_up(self, sender: str, message: GiveUpBroadcast) -> Message:
        self._grace_s = message.grace_s
        self._given_up.set()
        return Done()

    async def _end(self, sender: str, message: EndRefresh) -> Message:
        async def work() -> Message:
            if not self._session_open:
                raise SglangError("EndRefresh without BeginRefresh")
            await self._end_session(message.timeout_s)
            await self._resume(message.version, message.timeout_s)
            return Done()

        return await self._control(message.timeout_s, work, partial=True)

    async def _load_from_disk(self, sender: str, message: LoadFromDisk) -> Message:
        async def work() -> Message:
            await self._pause(message.timeout_s)
            if self._session_open:
                await self._end_session(message.timeout_s)
            await self._host.sglang.control(
                "/update_weights_from_disk",
                message.timeout_s,
                model_path=message.path,
                load_format="auto",
                weight_version=str(message.version),
                flush_cache=self._mode == "retract",
            )
            await self._resume(message.version, message.timeout_s)
            return Done()

        return await self._control(message.timeout_s, work, partial=True)

    async def _checksum(self, sender: str, message: Checksum) -> Message:
        async def work() -> Message:
            reply = await self._host.sglang.control("/weights_checker", message.timeout_s, action="checksum")
            ranks = [rank["checksums"] for rank in reply["ranks"]]
            value = hashlib.sha256(json.dumps(ranks, sort_keys=True).encode()).hexdigest()
            return ChecksumValue(value, self._host.version)

        return await self._control(message.timeout_s, work, partial=False)

    async def _pause(self, timeout_s: float) -> None:
        """No token is sampled any more.  Requests in flight keep their tokens, and their KV unless they are retracted."""
        self._host.gate.shut()
        if not self._paused:
            self._began = time.time()
            await self._host.sglang.control("/pause_generation", timeout_s, mode=self._mode)
            self._paused = True

    async def _end_session(self, timeout_s: float) -> None:
        await self._host.sglang.control("/end_weight_update", timeout_s)
        self._session_open = False

    async def _resume(self, version: int, timeout_s: float) -> None:
        """Whole weights: go on with what is in flight, and let new requests in."""
        await self._host.sglang.control("/continue_generation", timeout_s)
        self._paused = False
        self._deadline = None
        self._host.serve(version)
        if self._trace is not None:
            self._trace.record("refresh", self._host.name, self._began, time.time(), version=version)
