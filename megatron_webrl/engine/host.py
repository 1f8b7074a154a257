"""An engine host: starts and watches one SGLang, answers generation, and takes weights in.

    starting -> waiting_weights -> serving(version)          (its SGLang died: starting, one incarnation further)

A host that waits for weights serves nothing: whatever its SGLang loaded from disk, the trainer did not publish it.
A refresh step that fails or is late kills the SGLang, so that no mixture of weights ever serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from megatron_webrl.config import RunConfig
from megatron_webrl.engine.generation import ImageCache, ServingGate, read_reply, request_body
from megatron_webrl.engine.receiver import WeightReceiver
from megatron_webrl.engine.sglang_server import INITIAL_VERSION, SglangError, SglangGone, SglangServer, resolve_device
from megatron_webrl.observe import Tracer
from megatron_webrl.wire import Client, Keys, Server, WireError
from megatron_webrl.wire.messages import (
    Done,
    EngineStatus,
    EngineUnavailable,
    Generate,
    Generated,
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
        self._keys = keys
        self.gate = ServingGate()
        self._weights = WeightReceiver(self, config.refresh.mode, trace)
        self._images = ImageCache()
        self._slots = asyncio.Semaphore(
            config.engine.max_running_requests
        )  # so that queueing is seen, and counted as such
        self._running = 0
        self._changed = asyncio.Event()
        self._life_lock = asyncio.Lock()
        self._wire = Server(
            address,
            run_id,
            {Generate: self._generate, **self._weights.handlers()},
            keys=keys,
        )
        self.sglang: SglangServer

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
        self.sglang = SglangServer(self._config, index=self._index, device=device, mark=mark, log=self._log)
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
            await self.sglang.close()
            await self._wire.close()
            coordinator.close()

    # Life of the SGLang -----------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        failures = 0
        while True:
            async with self._life_lock:  # a kill that is still busy must not find the new processes
                self.starts += 1
                self._weights.reset()
                self._set("starting")
                self.sglang.start()
            try:
                await self.sglang.wait_ready(self._config.engine.start_timeout_s)
            except SglangError as error:
                failures += 1
                reason = str(error)
            else:
                failures = 0
                self._set("waiting_weights")
                reason = await self._watch()
            await self.kill(self.incarnation)
            if self.starts > self._config.engine.max_restarts:
                raise SglangError(f"{self.name}: its SGLang ended {self.starts} times (engine.max_restarts): {reason}")
            log.warning("%s: SGLang start %d ended: %s", self.name, self.starts, reason)
            await asyncio.sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**failures))

    async def kill(self, incarnation: int) -> None:
        """End that incarnation of the SGLang, if it is the present one; nothing is served any more."""
        async with self._life_lock:
            if incarnation == self.incarnation:
                self._set("starting")
                await asyncio.to_thread(self.sglang.kill)

    async def _watch(self) -> str:
        """Returns why the SGLang ended, or must."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if not self.sglang.alive():
                return f"a process of it died: {self.sglang.log_tail()}"
            if self._weights.late():
                return "a refresh was begun and not ended before its deadline"

    def serve(self, version: int) -> None:
        """Whole weights of `version` are there: let requests in."""
        self.version = version
        self._set("serving")
        self.gate.open()

    def wait_for_weights(self) -> None:
        """What the SGLang holds is not whole: nothing is served until it is."""
        self._set("waiting_weights")

    def _set(self, state: str) -> None:
        self.state = state
        if state != "serving":
            self.gate.shut()
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
            await self.gate.wait()
            sent, shut = time.monotonic(), self.gate.shut_seconds()
            with contextlib.suppress(SglangGone):
                reply = await self.sglang.generate(body, deadline_s)
                waited = sent - arrived + self.gate.shut_seconds() - shut
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
