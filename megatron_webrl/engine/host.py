"""An engine host: starts and watches one SGLang, answers generation, and takes weights in.

    starting -> waiting_weights -> serving(version) -> draining -> dead
        (its SGLang died, or gave no sign of life: starting, one incarnation further)

A host that waits for weights serves nothing: whatever its SGLang loaded from disk, the trainer did not publish it.
A refresh step that fails or is late kills the SGLang, so that no mixture of weights ever serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from megatron_webrl.config import RunConfig
from megatron_webrl.engine.generation import ServingGate
from megatron_webrl.engine.receiver import WeightReceiver
from megatron_webrl.engine.requests import GenerationTable
from megatron_webrl.engine.sglang_server import INITIAL_VERSION, SglangError, SglangServer, resolve_device
from megatron_webrl.observe import Tracer
from megatron_webrl.wire import Client, Keys, Server, WireError
from megatron_webrl.wire.messages import Done, Drain, EngineStatus, Message

log = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0
WATCH_EVERY_S = 0.25
PROBE_EVERY_S = 10.0
"""Of the health of an SGLang that should serve; oftener where engine.health_timeout_s is short."""
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
        self._generations = GenerationTable(self, config.engine)
        self._changed = asyncio.Event()
        self._drain_until = 0.0
        self._draining = asyncio.Event()
        self._heard = 0.0
        self._life_lock = asyncio.Lock()
        self._wire = Server(
            address,
            run_id,
            {Drain: self._drain, **self._generations.handlers(), **self._weights.handlers()},
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
            running=self._generations.running,
            starts=self.starts,
        )

    async def run(self) -> None:
        """Until cancelled or drained, leaving nothing behind.  Raises UserError (port taken), SglangError (too many
        restarts)."""
        device = await resolve_device(self._config)
        mark = f"{self._run_id}/{self.name}/sglang"
        self.sglang = SglangServer(self._config, index=self._index, device=device, mark=mark, log=self._log)
        coordinator = Client(self._coordinator_address, self._run_id, self.name, keys=self._keys)
        try:
            await self._wire.start()
            life, leaving = asyncio.create_task(self._supervise()), asyncio.create_task(self._leave())
            tasks = [life, leaving, asyncio.create_task(self._heartbeat(coordinator))]
            try:
                await asyncio.wait({life, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if life.done():
                    life.result()
                await leaving
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._set("dead")
                with contextlib.suppress(WireError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        await coordinator.request(self.status(), timeout=1.0, expect=Done)
        finally:
            await self._generations.close()
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
            if self._draining.is_set():
                return
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
        probing = asyncio.create_task(self._probe())
        try:
            while True:
                await asyncio.sleep(WATCH_EVERY_S)
                if not self.sglang.alive():
                    return f"a process of it died: {self.sglang.log_tail()}"
                if self._weights.late():
                    return "a refresh was begun and not ended before its deadline"
                silent_s = time.monotonic() - self._heard
                if self.gate.is_open and silent_s > self._config.engine.health_timeout_s:
                    return f"it gave no sign of life for {silent_s:.0f} s (engine.health_timeout_s)"
        finally:
            probing.cancel()

    async def _probe(self) -> None:
        """Have it generate from time to time, while it serves."""
        timeout = self._config.engine.health_timeout_s
        while True:
            await asyncio.sleep(min(PROBE_EVERY_S, timeout / 4))
            await self.gate.wait()
            if await self.sglang.healthy(timeout / 2):
                self.heard()

    def heard(self) -> None:
        """It gave a sign of life, or is asked for one from now on."""
        self._heard = time.monotonic()

    def serve(self, version: int) -> None:
        """Whole weights of `version` are there: let requests in."""
        self.heard()
        self.version = version
        self._set("serving")
        self.gate.open()

    def wait_for_weights(self) -> None:
        """What the SGLang holds is not whole: nothing is served until it is."""
        self._set("waiting_weights")

    def _set(self, state: str) -> None:
        if state not in ("serving", "draining"):
            self.gate.shut()
            self.version = INITIAL_VERSION
        if self.state != "draining" or state == "dead":
            self.state = state
        self._changed.set()

    # Leaving ----------------------------------------------------------------------------------------------------------

    async def _drain(self, sender: str, message: Drain) -> Message:
        self._drain_until = time.monotonic() + message.timeout_s
        self._draining.set()
        return Done()

    async def _leave(self) -> None:
        """Returns once the host was drained."""
        await self._draining.wait()
        while self.state == "serving" and not self.gate.is_open and time.monotonic() < self._drain_until:  # noqa: ASYNC110
            await asyncio.sleep(WATCH_EVERY_S)  # a refresh is under way: its end lets what is in flight go on
        self._set("draining")
        await self._generations.drain(self._drain_until, f"{self.name} is draining")

    async def _heartbeat(self, coordinator: Client) -> None:
        while True:
            self._generations.sweep()
            self._changed.clear()
            with contextlib.suppress(WireError):
                await coordinator.request(self.status(), timeout=2.0, expect=Done)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_EVERY_S):
                    await self._changed.wait()
