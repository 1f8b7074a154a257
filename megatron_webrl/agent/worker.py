"""The browser worker: one Chromium, N slots, each running one episode after another, for ever.

A slot is free again when its trajectory is acknowledged: its screenshots are in the store by then, and a restart of the
worker misses nothing.  An attempt that is judged gives its slot back before: at most `slots` attempts are judged and
delivered so; when more are, slots wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid

from megatron_webrl.agent.endpoint import EndpointPolicy
from megatron_webrl.agent.episode import EpisodeResult, Trace, run_episode
from megatron_webrl.browser import find_chromium
from megatron_webrl.config import RunConfig
from megatron_webrl.engine import GenerationClient
from megatron_webrl.processor import Processor
from megatron_webrl.screenshots import upload
from megatron_webrl.tasks import make_environment
from megatron_webrl.trajectory import Assignment, Lane, Outcome, encode_steps
from megatron_webrl.wire import Client, Keys, MessageTooLarge, WireError
from megatron_webrl.wire.messages import (
    Assignments,
    GetAssignments,
    Submitted,
    SubmitTrajectory,
)

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
DELIVERY_DEADLINE_S = 300.0
"""After so many seconds of failed deliveries the attempt is given up; its lease then ends and it is issued again."""
PAUSE_S = (0.2, 5.0)
"""First and longest pause after a failure; doubled each time."""

Key = tuple[int, int, int]


class _Slot:
    """One of the worker's slots, from when an episode takes it until it is free again."""

    def __init__(self, free: list[int]) -> None:
        self._free = free
        self.lane = free.pop()
        self.held = True

    def free(self) -> None:
        """Give it back, once."""
        if self.held:
            self.held = False
            self._free.append(self.lane)


class BrowserWorker:
    """Runs episodes for the coordinator at `coordinator_address`; screenshots go to the store at `store_address`.

    trace: gets a span for each episode and each generation, one lane a slot.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        name: str,
        coordinator_address: str,
        store_address: str,
        keys: Keys | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.config = config
        self.name = name
        self._run_id = run_id
        self._session = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
        self._addresses, self._keys = (coordinator_address, store_address), keys
        self._trace = trace
        self._stopping = asyncio.Event()
        self._running: dict[Key, asyncio.Task[list[Assignment]]] = {}
        self._lanes = list(range(config.browser.slots - 1, -1, -1))
        """Of the free slots."""
        self._changed = asyncio.Event()
        """A slot or an attempt has ended since it was cleared."""
        self._faults = 0
        """Consecutive ones, over all slots."""
        self._paused_until = 0.0

    def stop(self) -> None:
        """Make `run` return soon; episodes under way are abandoned."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until stopped or cancelled; then no browser is left.  Raises UserError without a Chromium or a readable
        model directory."""
        find_chromium(self.config.browser.executable)
        self._processor = await asyncio.to_thread(Processor.load, self.config.model.path, self.config.sampling.stop)
        self._environment = make_environment(self.config)
        self._coordinator, self._store = (
            Client(address, self._run_id, self.name, keys=self._keys) for address in self._addresses
        )
        self._generation: GenerationClient | EndpointPolicy
        if self.config.evaluation.endpoint is not None:
            self._generation = EndpointPolicy(self.config, self._processor)
        else:
            self._generation = GenerationClient(
                self._coordinator,
                self.config.sampling,
                self._processor.banned_ids(),
                self._processor.stop_ids(),
                self.config.engine.request_timeout_s,
                keys=self._keys,
            )
        stopped = asyncio.ensure_future(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                polling = asyncio.ensure_future(self._poll())
                try:
                    await asyncio.wait({polling, stopped}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    polling.cancel()
                    [ended] = await asyncio.gather(polling, return_exceptions=True)
                if isinstance(ended, Exception):
                    raise ended
        finally:
            stopped.cancel()
            await self._close()

    async def _close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._environment.close()
        await self._generation.close()
        self._coordinator.close()
        self._store.close()

    async def _poll(self) -> None:
        """Renew the leases, fill the free slots; returns when a slot is free or a heartbeat is due."""
        heartbeat_s = self.config.replay.lease_s / 3
        paused = time.monotonic() < self._paused_until
        self._changed.clear()
        free = 0 if paused else self._free
        running = [key for key, task in self._running.items() if not task.cancelling()]
        wait_s = heartbeat_s if free else 0.0
        try:
            reply = await self._coordinator.request(
                GetAssignments(self.name, self._session, free, running, wait_s),
                timeout=wait_s + REQUEST_TIMEOUT_S,
                expect=Assignments,
            )
        except WireError as error:
            log.warning("coordinator: %s", error)
            await asyncio.sleep(PAUSE_S[0])
            return
        for key in reply.revoked:
            if key in self._running:
                self._running[key].cancel()
        for assignment in reply.assignments:
            self._start(assignment)
        if not self._free:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):
                    while not self._free:
                        self._changed.clear()
                        await self._changed.wait()
        elif not free:
            await asyncio.sleep(min(heartbeat_s, max(0.0, self._paused_until - time.monotonic())))

    @property
    def _free(self) -> int:
        """Slots that may begin an episode."""
        return max(0, min(len(self._lanes), 2 * self.config.browser.slots - len(self._running)))

    def _start(self, assignment: Assignment) -> None:
        """Run it, if a slot is free (else it is given again) and it does not run yet."""
        key = assignment.key
        if key not in self._running and self._free:
            slot = _Slot(self._lanes)
            self._running[key] = task = asyncio.create_task(self._attempt(assignment, slot))
            task.add_done_callback(lambda task: self._ended(key, slot, task))

    def _ended(self, key: Key, slot: _Slot, task: asyncio.Task[list[Assignment]]) -> None:
        """The slot is free, for what came with the acknowledgement first."""
        del self._running[key]
        slot.free()
        self._changed.set()
        if task.cancelled():
            return
        if error := task.exception():
            log.error("attempt %s failed", key, exc_info=error)
        elif not self._stopping.is_set():
            for assignment in task.result():
                self._start(assignment)

    async def _attempt(self, assignment: Assignment, slot: _Slot) -> list[Assignment]:
        """Run and deliver one attempt; returns what its slot is to do next."""

        def released() -> None:
            slot.free()
            self._changed.set()

        result = await run_episode(
            assignment,
            self._environment.episode(assignment.task),
            self._generation.generate,
            self._processor,
            self.config,
            judge=self._environment.judge,
            released=released,
            worker=self.name,
            trace=self._trace,
            lane=f"slot {slot.lane}",
        )
        if result.trajectory.outcome is Outcome.FAULT:  # while something is down, do not burn attempts
            self._paused_until = time.monotonic() + _pause(self._faults)
            self._faults += 1
        else:
            self._faults = 0
        return await self._deliver(result, slot)

    async def _deliver(self, result: EpisodeResult, slot: _Slot) -> list[Assignment]:
        """Screenshots into the store, then the trajectory to the coordinator, again until it is acknowledged.  Returns what
        the slot is to do next."""
        trajectory, images = result
        kept = trajectory.outcome in (Outcome.SUCCESS, Outcome.FAILURE)
        if trajectory.assignment.lane is Lane.EVAL or not kept:  # never trained: the envelope is enough
            trajectory.digests, trajectory.payload, images = [], encode_steps([]), {}
        key = trajectory.assignment.key
        deadline = time.monotonic() + DELIVERY_DEADLINE_S
        failures = 0
        while time.monotonic() < deadline:
            try:
                await upload(self._store, key, images)
                more = slot.held and time.monotonic() >= self._paused_until and not self._stopping.is_set()
                reply = await self._coordinator.request(
                    SubmitTrajectory(trajectory, self.name, self._session, more),
                    timeout=REQUEST_TIMEOUT_S,
                    expect=Submitted,
                )
                return reply.assignments
            except MessageTooLarge as error:
                log.error("%s given up: %s", key, error)
                return []
            except WireError as error:
                log.warning("%s not delivered yet: %s", key, error)
            await asyncio.sleep(_pause(failures))
            failures += 1
        log.error("%s given up: not delivered within %.0f s", key, DELIVERY_DEADLINE_S)
        return []


def _pause(failures: int) -> float:
    first, longest = PAUSE_S
    return float(min(first * 2 ** min(failures, 10), longest))
