"""An engine host: starts and watches one SGLang, answers generation, and takes weights in.

    starting -> waiting_weights -> serving(version)          (its SGLang died: starting, one incarnation further)

A host that waits for weights serves nothing: whatever its SGLang loaded from disk, the trainer did not publish it.
A refresh step that fails or is late kills the SGLang, so that no mixture of weights ever serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megatron_webrl.config import RunConfig
from megatron_webrl.engine.generation import ImageCache, ServingGate, read_reply, request_body
from megatron_webrl.engine.sglang_server import INITIAL_VERSION, SglangError, SglangGone, SglangServer, resolve_device
from megatron_webrl.observe import Tracer
from megatron_webrl.wire import Client, Keys, Server, WireError
from megatron_webrl.wire.messages import (
    BeginRefresh,
    Checksum,
    ChecksumValue,
    Done,
    EndRefresh,
    EngineStatus,
    EngineUnavailable,
    Generate,
    Generated,
    JoinWeightGroup,
    LeaveWeightGroup,
    LoadBucket,
    LoadFromDisk,
    Message,
    NeedImages,
)

log = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0
WATCH_EVERY_S = 0.25
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0


class EngineHost:
    """One SGLang and its address on the wire.

    index: its place among the hosts (its port counts up from engine.port); address: to bind for Generate and control;
    log_dir: gets SGLang's output; trace: gets a span for every refresh.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        name: str,
        index: int,
        address: str,
        coordinator_address: str,
        log_dir: Path,
        keys: Keys | None = None,
        trace: Tracer | None = None,
    ) -> None:
        self.name, self.state, self.version = name, "starting", INITIAL_VERSION
        self.starts = 0
        self._first_incarnation = int(time.time() * 1000)
        self._config, self._run_id, self._index = config, run_id, index
        self._coordinator_address, self._log = coordinator_address, log_dir / f"{name}-sglang.log"
        self._trace, self._keys = trace, keys
        self._gate = ServingGate()
        self._images = ImageCache()
        self._slots = asyncio.Semaphore(
            config.engine.max_running_requests
        )  # so that queueing is seen, and counted as such
        self._running = 0
        self._changed = asyncio.Event()
        self._control_lock = asyncio.Lock()
        self._life_lock = asyncio.Lock()
        self._paused = self._session_open = False
        self._refresh_began = 0.0
        self._refresh_deadline: float | None = None
        self._wire = Server(
            address,
            run_id,
            {
                Generate: self._generate,
                JoinWeightGroup: self._join,
                LeaveWeightGroup: self._leave,
                BeginRefresh: self._begin_refresh,
                LoadBucket: self._load_bucket,
                EndRefresh: self._end_refresh,
                Checksum: self._checksum,
                LoadFromDisk: self._load_from_disk,
            },
            keys=keys,
        )
        self._sglang: SglangServer

    @property
    def incarnation(self) -> int:
        """Never repeats, also over restarts of the host itself; minus `starts` it names the host's process."""
        return self._first_incarnation + self.starts

    def status(self) -> EngineStatus:
        """What the coordinator is told."""
        return EngineStatus(
            name=self.name,
            address=self._wire.address,
            state=self.state,
            version=self.version,
            incarnation=self.incarnation,
            ranks=self._config.engine.tp,
            running=self._running,
            starts=self.starts,
        )

    async def run(self) -> None:
        """Until cancelled, leaving nothing behind.  Raises UserError (port taken), SglangError (too many restarts)."""
        device = await resolve_device(self._config)
        mark = f"{self._run_id}/{self.name}/sglang"
        self._sglang = SglangServer(self._config, index=self._index, device=device, mark=mark, log=self._log)
        coordinator = Client(self._coordinator_address, self._run_id, self.name, keys=self._keys)
        try:
            await self._wire.start()
            heartbeat = asyncio.create_task(self._heartbeat(coordinator))
            try:
                await self._supervise()
            finally:
                heartbeat.cancel()
                self._set("dead")
                with contextlib.suppress(WireError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        await coordinator.request(self.status(), timeout=1.0, expect=Done)
        finally:
            await self._sglang.close()
            await self._wire.close()
            coordinator.close()

    # Life of the SGLang -----------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        failures = 0
        while True:
            async with self._life_lock:  # a kill that is still busy must not find the new processes
                self.starts += 1
                self._paused = self._session_open = False
                self._refresh_deadline = None
                self._set("starting")
                self._sglang.start()
            try:
                await self._sglang.wait_ready(self._config.engine.start_timeout_s)
            except SglangError as error:
                failures += 1
                reason = str(error)
            else:
                failures = 0
                self._set("waiting_weights")
                reason = await self._watch()
            await self._kill(self.incarnation)
            if self.starts > self._config.engine.max_restarts:
                raise SglangError(f"{self.name}: its SGLang ended {self.starts} times (engine.max_restarts): {reason}")
            log.warning("%s: SGLang start %d ended: %s", self.name, self.starts, reason)
            await asyncio.sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**failures))

    async def _kill(self, incarnation: int) -> None:
        """End that incarnation of the SGLang, if it is the present one; nothing is served any more."""
        async with self._life_lock:
            if incarnation == self.incarnation:
                self._set("starting")
                await asyncio.to_thread(self._sglang.kill)

    async def _watch(self) -> str:
        """Returns why the SGLang ended, or must."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if not self._sglang.alive():
                return f"a process of it died: {self._sglang.log_tail()}"
            if self._refresh_deadline is not None and time.monotonic() > self._refresh_deadline:
                return "a refresh was begun and not ended before its deadline"

    def _set(self, state: str) -> None:
        self.state = state
        if state != "serving":
            self._gate.shut()
            self.version = INITIAL_VERSION
        self._changed.set()

    async def _heartbeat(self, coordinator: Client) -> None:
        while True:
            self._changed.clear()
            with contextlib.suppress(WireError):
                await coordinator.request(self.status(), timeout=2.0, expect=Done)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_EVERY_S):
                    await self._changed.wait()

    # Generation -------------------------------------------------------------------------------------------------------

    async def _generate(self, sender: str, message: Generate) -> Message:
        arrived = time.monotonic()
        self._images.put(message.images)
        found = {digest: message.images.get(digest) or self._images.get(digest) for digest in message.digests}
        if lacking := [digest for digest, data in found.items() if data is None]:
            return NeedImages(lacking)
        body = request_body(message, [found[digest] or b"" for digest in message.digests])
        try:
            async with asyncio.timeout(message.deadline_s), self._counted(), self._slots:
                return await self._sample(body, arrived, message.deadline_s)
        except TimeoutError:
            return EngineUnavailable(f"{self.state} and no reply within {message.deadline_s:.1f} s")

    async def _sample(self, body: dict[str, Any], arrived: float, deadline_s: float) -> Generated:
        """Send until a reply comes: a request that died with its SGLang is sampled anew by the next one."""
        while True:
            await self._gate.wait()
            sent, shut = time.monotonic(), self._gate.shut_seconds()
            with contextlib.suppress(SglangGone):
                reply = await self._sglang.generate(body, deadline_s)
                waited = sent - arrived + self._gate.shut_seconds() - shut
                generated = read_reply(reply, waited_s=waited, running=self._running)
                if generated is not None:
                    return generated
            await asyncio.sleep(WATCH_EVERY_S)  # until the watch has seen what happened

    @contextlib.asynccontextmanager
    async def _counted(self) -> Any:
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    # Weights ----------------------------------------------------------------------------------------------------------

    async def _control(self, timeout_s: float, work: Callable[[], Awaitable[Message]], *, fatal: bool) -> Message:
        """Run one control message against the present SGLang.  One that is late, or fails where `fatal`, kills it."""
        incarnation = self.incarnation
        if self.state not in ("waiting_weights", "serving"):
            raise SglangError(f"{self.name} is {self.state}: it takes no weights")
        if fatal:  # a step of a refresh: the next one must come before this one's deadline and as long again
            self._refresh_deadline = time.monotonic() + 2 * timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._control_lock:
                return await work()
        except (SglangError, TimeoutError) as error:
            if fatal or isinstance(error, TimeoutError):
                log.warning("%s: killing its SGLang: %s", self.name, error or "late")
                await self._kill(incarnation)
            raise SglangError(str(error) or f"not done within {timeout_s:.1f} s") from None

    async def _join(self, sender: str, message: JoinWeightGroup) -> Message:
        async def work() -> Message:
            await self._sglang.control(
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

        return await self._control(message.timeout_s, work, fatal=False)

    async def _leave(self, sender: str, message: LeaveWeightGroup) -> Message:
        async def work() -> Message:
            await self._sglang.control("/destroy_weights_update_group", message.timeout_s, group_name=message.group)
            return Done()

        return await self._control(message.timeout_s, work, fatal=False)

    async def _begin_refresh(self, sender: str, message: BeginRefresh) -> Message:
        async def work() -> Message:
            await self._pause(message.timeout_s)
            if not self._session_open:
                await self._sglang.control("/begin_weight_update", message.timeout_s)
                self._session_open = True
            return Done()

        return await self._control(message.timeout_s, work, fatal=True)

    async def _load_bucket(self, sender: str, message: LoadBucket) -> Message:
        async def work() -> Message:
            if not self._session_open:
                raise SglangError("LoadBucket without BeginRefresh")
            await self._sglang.control(
                "/update_weights_from_distributed",
                message.timeout_s + 60.0,
                group_name=message.group,
                names=message.names,
                dtypes=message.dtypes,
                shapes=message.shapes,
                load_format="flattened_bucket",
                flush_cache=False,
            )
            return Done()

        return await self._control(message.timeout_s, work, fatal=True)

    async def _end_refresh(self, sender: str, message: EndRefresh) -> Message:
        async def work() -> Message:
            if not self._session_open:
                raise SglangError("EndRefresh without BeginRefresh")
            await self._sglang.control("/end_weight_update", message.timeout_s)
            self._session_open = False
            await self._sglang.control(
                "/update_weight_version", message.timeout_s, new_version=str(message.version), abort_all_requests=False
            )
            await self._resume(message.version, message.timeout_s)
            return Done()

        return await self._control(message.timeout_s, work, fatal=True)

    async def _load_from_disk(self, sender: str, message: LoadFromDisk) -> Message:
        async def work() -> Message:
            await self._pause(message.timeout_s)
            await self._sglang.control(
                "/update_weights_from_disk",
                message.timeout_s,
                model_path=message.path,
                load_format="auto",
                weight_version=str(message.version),
            )
            await self._resume(message.version, message.timeout_s)
            return Done()

        return await self._control(message.timeout_s, work, fatal=True)

    async def _checksum(self, sender: str, message: Checksum) -> Message:
        async def work() -> Message:
            reply = await self._sglang.control("/weights_checker", message.timeout_s, action="checksum")
            ranks = [rank["checksums"] for rank in reply["ranks"]]
            return ChecksumValue(hashlib.sha256(json.dumps(ranks, sort_keys=True).encode()).hexdigest())

        return await self._control(message.timeout_s, work, fatal=False)

    async def _pause(self, timeout_s: float) -> None:
        """No token is sampled any more; requests in flight keep their tokens and lose their KV."""
        self._gate.shut()
        if not self._paused:
            self._refresh_began = time.time()
            await self._sglang.control("/pause_generation", timeout_s, mode="retract")
            self._paused = True
        await self._sglang.control("/flush_cache", timeout_s)

    async def _resume(self, version: int, timeout_s: float) -> None:
        """Whole weights: go on with what is in flight, and let new requests in."""
        await self._sglang.control("/continue_generation", timeout_s)
        self._paused = False
        self._refresh_deadline = None
        self.version = version
        self._set("serving")
        self._gate.open()
        if self._trace is not None:
            self._trace.record("refresh", self.name, self._refresh_began, time.time(), version=version)
