"""The coordinator: one asyncio process that hands out episodes, takes trajectories in and batches out.

It never decodes a payload.  The book (`replay.book`) decides; this module is its sockets, clock and housekeeping.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_webrl.config import ReplayConfig, RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.replay.batches import remove_batches
from megatron_webrl.replay.book import Book
from megatron_webrl.replay.ledger import Ledger
from megatron_webrl.replay.recorder import BatchRecorder, record_group
from megatron_webrl.replay.rows import batch_row, run_row
from megatron_webrl.replay.state import SavedReplay, broken_state, decode_state, encode_state
from megatron_webrl.run_directory import checkpoint_path
from megatron_webrl.tasks import UniformSampler
from megatron_webrl.trajectory import AttemptKey, Group, Outcome
from megatron_webrl.wire import Client, Message, Server, WireError
from megatron_webrl.wire.messages import (
    Assignments,
    BeginTraining,
    CheckpointDurable,
    ClaimVersion,
    Done,
    EndRun,
    Engines,
    EngineStatus,
    EvaluationProgress,
    EvaluationState,
    FetchGroups,
    GetAssignments,
    GetImages,
    GetReplayState,
    GetStatus,
    Groups,
    Images,
    Lacking,
    ListEngines,
    ListUpcoming,
    Manifest,
    ReleaseImages,
    ReplayState,
    RetainImages,
    StartEvaluation,
    Status,
    StepTrained,
    StoreState,
    StoreStatus,
    Submitted,
    SubmitTrajectory,
    Take,
    TrainingFinished,
    Upcoming,
    Version,
)

log = logging.getLogger(__name__)

ENGINE_SILENT_S = 5.0
HOUSEKEEPING_S = 0.5
STORE_TIMEOUT_S = 10.0
STUCK_S = 180.0
"""Longer than the store keeps what nobody claims."""
STORE_HIGH_WATER = 0.8
"""Share of the screenshot store in use above which no new group begins."""

ROLLOUT_VERSION = 0
"""Of the weights that the driver has loaded from disk, when nothing trains."""

TRAINS = (Outcome.SUCCESS, Outcome.FAILURE)

MetricsSink = Callable[[int, dict[str, float]], None]


class AccountError(Exception):
    """The ledger and the coordinator's state disagree: an attempt was lost or counted twice."""


class BatchTimeout(Exception):
    """No batch came within replay.take_timeout_s."""

    def __init__(self, config: ReplayConfig) -> None:
        super().__init__(
            f"no batch of {config.groups_per_step} groups in replay.take_timeout_s={config.take_timeout_s:.0f} s: see the "
            "logs of workers, engines and coordinator"
        )


class Coordinator:
    """Coordinator of a run.

    resume_step: step of the checkpoint that the trainer resumes from; None for a fresh run.  resume_replay: the
    `ReplayState` that was saved with it; None if there is none: the task order then goes on after all that was ever drawn.
    log_metrics: called once a train step with its metrics; must not block.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        address: str,
        store_address: str,
        log_metrics: MetricsSink,
        resume_step: int | None = None,
        resume_replay: bytes | None = None,
    ) -> None:
        self.config = config
        self._run_dir = Path(config.run_dir)
        self._ledger = Ledger(self._run_dir / "ledger.sqlite")
        self._ledger.end_in_flight("lost_at_restart")
        if resume_step is not None:
            self._ledger.roll_back(resume_step)
            remove_batches(self._run_dir / "batches", resume_step)
        self._ledger.commit()
        self._sampler = UniformSampler(config.tasks, config.seed)
        self.book = Book(
            config.replay,
            self._ledger,
            self._sampler,
            temperature=config.sampling.temperature,
            deadline_s=config.agent.episode_deadline_s,
            seed=config.seed,
        )
        self._store = Client(store_address, run_id, "coordinator")
        self._log_metrics = log_metrics
        self._engines: dict[str, tuple[EngineStatus, float]] = {}
        self._workers: dict[str, float] = {}
        self._changed = asyncio.Condition()
        self._recorder: BatchRecorder | None = None
        if config.observe.record_batches or config.rollout_only:
            self._recorder = BatchRecorder(self._run_dir / "batches", self._store)
        self._recordings: set[asyncio.Task[None]] = set()
        self._step = resume_step or 0
        self._version = ROLLOUT_VERSION if config.rollout_only else -1
        self._metrics: dict[str, float] = {}
        self._lag_sum, self._lag_tokens, self._lag_max = 0.0, 0, 0
        self._restore(resume_replay)
        self._began: float | None = None
        self._collected_at = 0.0
        self._finished = self._stopping = False
        self._stuck_since: float | None = None
        handlers: dict[type[Message], Any] = {
            GetAssignments: self._get_assignments,
            SubmitTrajectory: self._submit,
            Take: self._take,
            FetchGroups: self._fetch_groups,
            ListUpcoming: self._list_upcoming,
            StepTrained: self._step_trained,
            TrainingFinished: self._training_finished,
            CheckpointDurable: self._checkpoint_durable,
            GetReplayState: self._get_replay_state,
            ClaimVersion: self._claim_version,
            ListEngines: self._list_engines,
            EngineStatus: self._engine_status,
            StartEvaluation: self._start_evaluation,
            EvaluationProgress: self._evaluation_progress,
            BeginTraining: self._begin_training,
            GetStatus: self._get_status,
            EndRun: self._end_run,
        }
        self._server = Server(address, run_id, handlers)

    async def run(self) -> None:
        """Serve until cancelled.  Raises AccountError if the account ever fails to balance, what `BatchRecorder.check`
        raises, and (rollout_only) BatchTimeout."""
        await self._server.start()
        try:
            while True:
                await asyncio.sleep(HOUSEKEEPING_S)
                self.book.expire(time.monotonic())
                await self._after_change()
                await self._watch_store()
                if self._recorder is not None:
                    self._recorder.check()
                    if self.config.rollout_only and not self._recorder.busy:
                        await self._collect(self._recorder)
                self.check_account()
                self._ledger.commit()
        finally:
            await self._server.close()
            if self._recorder is not None:
                await self._recorder.close()
            self._store.close()
            self._ledger.close()

    def check_account(self) -> None:
        """Invariant 1: what the ledger calls in flight is what the state holds."""
        account, in_flight = self._ledger.account(), self.book.in_flight()
        if account.in_flight != in_flight:
            raise AccountError(f"ledger: {account.in_flight} attempts in flight, state: {in_flight}")

    # Workers --------------------------------------------------------------------------------------------------------

    async def _get_assignments(self, _: str, m: GetAssignments) -> Assignments:
        deadline = time.monotonic() + min(m.wait_s, self.config.replay.lease_s / 2)
        revoked = self.book.renew(m.worker, m.session, m.running, time.monotonic())
        while True:
            self._workers[m.worker] = time.monotonic()
            assignments = self.book.assign(m.worker, m.session, m.slots, time.monotonic()) if not self._stopping else []
            left = deadline - time.monotonic()
            if assignments or revoked or left <= 0 or m.slots <= 0:
                return Assignments(assignments, revoked)
            await self._wait_for_change(left)

    async def _submit(self, _: str, m: SubmitTrajectory) -> Submitted:
        trajectory = m.trajectory
        key = trajectory.assignment.key
        if trajectory.digests and trajectory.outcome in TRAINS and self.book.wants(key):
            lacking = await self._store.request(
                RetainImages(key, trajectory.digests), timeout=STORE_TIMEOUT_S, expect=Lacking
            )
            if lacking.digests:
                return Submitted(False, "images_missing")
            reason = self.book.submit(trajectory)
            if reason == "superseded":  # it was lost while the store was asked (a repeat retained nothing more)
                self.book.freed.append(key)
        else:
            reason = self.book.submit(trajectory)
        await self._after_change()
        return Submitted(reason == "accepted", reason)

    # Trainer --------------------------------------------------------------------------------------------------------

    async def _take(self, _: str, m: Take) -> Manifest:
        self._version = m.version
        asked = time.monotonic()
        begun = self._began is not None
        while True:
            waiting = self._want_weights(m.version, asked)
            if self._stopping or waiting:
                return Manifest(m.step, False, begun, engines_waiting=waiting, stop=self._stopping)
            # The batch before is to be on disk first.  If it cannot be, `run` ends the run.
            go_on = self._recorder is None or self._recorder.whole or self._recorder.step > m.step
            if go_on and self._out_of_budget(m.step):
                self.book.training_allowed = False
                return Manifest(m.step, False, begun, finished=True)
            batch = self.book.take(m.step, m.version) if begun and go_on else None
            if batch is not None:
                group_ids, lag_max = batch
                groups = self.book.fetch(group_ids)
                if self._recorder is not None:
                    self._recorder.begin(m.step + 1, m.version, groups)
                await self._after_change()
                return Manifest(m.step, True, begun, group_ids, [group.tokens for group in groups], lag_max)
            left = asked + m.wait_s - time.monotonic()
            if left <= 0:
                return Manifest(m.step, False, begun)
            await self._wait_for_change(left)

    def _want_weights(self, version: int, asked: float) -> list[str]:
        """Engine hosts that serve nothing until they get weights, and those that say, later than the trainer's question,
        that they serve older ones than it published: they were silent during the refresh."""
        self._engine_list()
        return [
            status.name
            for status, heard in self._engines.values()
            if status.state == "waiting_weights"
            or (status.state == "serving" and status.version < version and heard > asked)
        ]

    def _out_of_budget(self, step: int) -> bool:
        limit = self.config.trainer.max_minutes
        return step >= self.config.trainer.steps or (limit is not None and self._minutes() >= limit)

    def _minutes(self) -> float:
        return 0.0 if self._began is None else (time.monotonic() - self._began) / 60

    async def _fetch_groups(self, _: str, m: FetchGroups) -> Groups:
        return Groups(self.book.fetch(m.group_ids))

    async def _list_upcoming(self, _: str, m: ListUpcoming) -> Upcoming:
        return Upcoming([(group.group_id, group.digests) for group in self.book.upcoming(m.version)])

    async def _step_trained(self, _: str, m: StepTrained) -> Done:
        if m.step < self._step:
            return Done()  # a repeat
        self.book.trained(m.step, m.applied_updates)
        self._version = m.version
        tokens = int(m.metrics.get("rollout/response_tokens", 0))
        self._lag_sum += m.metrics.get("rollout/lag_mean", 0.0) * tokens
        self._lag_tokens += tokens
        self._lag_max = max(self._lag_max, int(m.metrics.get("rollout/lag_max", 0)))
        await self._end_step(m.step + 1, m.metrics)
        return Done()

    async def _end_step(self, step: int, metrics: dict[str, float]) -> None:
        """`step` steps are done, the last with these metrics."""
        self._step, self._metrics = step, dict(metrics)
        self._log_metrics(step, {**metrics, **run_row(self.status())})
        await self._after_change()
        self._ledger.commit()

    async def _training_finished(self, _: str, m: TrainingFinished) -> Done:
        self._finished = True
        self._version = m.version
        return Done()

    async def _checkpoint_durable(self, _: str, m: CheckpointDurable) -> Done:
        self._ledger.commit()
        return Done()

    async def _get_replay_state(self, _: str, m: GetReplayState) -> ReplayState:
        book = self.book
        state = SavedReplay(
            sampler=self._sampler.state(),
            begun=book.begun_tasks(),
            recent=list(book.recent),
            recent_mixed=list(book.recent_mixed),
            lag_sum=self._lag_sum,
            lag_tokens=self._lag_tokens,
            lag_max=self._lag_max,
        )
        return ReplayState(encode_state(state))

    def _restore(self, data: bytes | None) -> None:
        """Go on from a saved `ReplayState`.  Raises UserError naming the checkpoint if it is malformed."""
        if data is None:
            for _ in range(self._ledger.train_groups()):
                self._sampler.draw()
            return
        where = str(checkpoint_path(self._run_dir, self._step))
        saved = decode_state(data, where)
        try:
            self._sampler.restore(saved.sampler)
        except (KeyError, TypeError, ValueError) as error:
            raise broken_state(where, repr(error)) from None
        first, end = self.config.tasks.train_seeds
        names = self.config.tasks.names
        self.book.again.extend(t for t in saved.begun if t.name in names and first <= t.seed < end)
        self.book.recent.extend(saved.recent)
        self.book.recent_mixed.extend(saved.recent_mixed)
        self._lag_sum, self._lag_tokens, self._lag_max = saved.lag_sum, saved.lag_tokens, saved.lag_max

    async def _claim_version(self, _: str, m: ClaimVersion) -> Version:
        return Version(self._ledger.claim_version())

    # Engines --------------------------------------------------------------------------------------------------------

    def _engine_list(self) -> list[EngineStatus]:
        now = time.monotonic()
        for name, (status, heard) in self._engines.items():
            if now - heard > ENGINE_SILENT_S and status.state != "dead":
                status.state = "dead"
                log.warning("engine host %s is silent for %.0f s", name, now - heard)
        return [status for status, _ in self._engines.values()]

    async def _list_engines(self, _: str, m: ListEngines) -> Engines:
        return Engines(self._engine_list())

    async def _engine_status(self, _: str, m: EngineStatus) -> Done:
        old = self._engines.get(m.name)
        self._engines[m.name] = (m, time.monotonic())
        if old is None or old[0].state != m.state:
            log.info("engine host %s: %s, version %d", m.name, m.state, m.version)
            await self._notify()
        return Done()

    # Driver ---------------------------------------------------------------------------------------------------------

    async def _start_evaluation(self, _: str, m: StartEvaluation) -> Done:
        self.book.begin_evaluation(m.name, m.tasks, m.temperature)
        await self._notify()
        return Done()

    async def _evaluation_progress(self, _: str, m: EvaluationProgress) -> EvaluationState:
        return self.book.evaluation(m.name)

    async def _begin_training(self, _: str, m: BeginTraining) -> Done:
        if self._began is None:
            self._began = self._collected_at = time.monotonic()
            self.book.training_allowed = True
            await self._notify()
        return Done()

    async def _get_status(self, _: str, m: GetStatus) -> Status:
        return self.status()

    async def _end_run(self, _: str, m: EndRun) -> Status:
        self._stopping = True
        self.book.end()
        self._ledger.commit()
        await self._notify()
        return self.status()

    def status(self) -> Status:
        """What the live display shows."""
        now = time.monotonic()
        return Status(
            step=self._step,
            version=self._version,
            finished=self._finished,
            minutes=self._minutes(),
            lag_mean=self._lag_sum / self._lag_tokens if self._lag_tokens else 0.0,
            lag_max=self._lag_max,
            workers=sum(now - heard < self.config.replay.lease_s for heard in self._workers.values()),
            engines=self._engine_list(),
            metrics=self._metrics,
            **self.book.status(),
        )

    # Without a trainer ----------------------------------------------------------------------------------------------

    async def _collect(self, recorder: BatchRecorder) -> None:
        """rollout_only: take a batch as a trainer would; once it is recorded, let its groups go."""
        if self._began is None or self._finished or self._stopping:
            return
        now, step = time.monotonic(), self._step
        if step < recorder.step:
            batch = self.book.take(step, ROLLOUT_VERSION)
            assert batch is not None  # the same again
            row = batch_row(self.book.fetch(batch[0])) | {"time/collect_s": now - self._collected_at}
            self._collected_at = now
            self.book.discard(step, "rollout_only")
            await self._end_step(step + 1, row)
        elif self._out_of_budget(step):
            self.book.training_allowed = False
            self._finished = True
        elif (batch := self.book.take(step, ROLLOUT_VERSION)) is not None:
            recorder.begin(step + 1, ROLLOUT_VERSION, self.book.fetch(batch[0]))
            await self._after_change()
        elif now - self._collected_at > self.config.replay.take_timeout_s:
            raise BatchTimeout(self.config.replay)

    # Housekeeping ---------------------------------------------------------------------------------------------------

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(min(seconds, 1.0)), self._changed:
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _after_change(self) -> None:
        """Record what completed, give back what was freed, wake those who wait."""
        completed, self.book.completed = self.book.completed, []
        freed, self.book.freed = self.book.freed, []
        for group in completed:
            if group.group_id % self.config.observe.record_every == 0:
                task = asyncio.create_task(self._record(group, freed))
                freed = []
                self._recordings.add(task)
                task.add_done_callback(self._recordings.discard)
        await self._release(freed)
        await self._notify()

    async def _record(self, group: Group, freed: list[AttemptKey]) -> None:
        """Write one group's files, then release what was freed with it."""
        digests = sorted({d for t in group.trajectories for d in t.digests})
        try:
            images = await self._store.request(GetImages(digests), timeout=STORE_TIMEOUT_S, expect=Images)
            await asyncio.to_thread(record_group, self._run_dir / "trajectories", group, images.images)
        except (WireError, OSError) as error:
            log.warning("group %d could not be recorded: %s", group.group_id, error)
        await self._release(freed)

    async def _release(self, owners: list[AttemptKey]) -> None:
        if not owners:
            return
        if self._recorder is not None and self._recorder.busy:  # it may still need them
            self.book.freed.extend(owners)
            return
        try:
            await self._store.request(ReleaseImages(owners), timeout=STORE_TIMEOUT_S, expect=Done)
        except WireError as error:  # kept for the next turn
            self.book.freed.extend(owners)
            log.warning("screenshots not released yet: %s", error)

    async def _watch_store(self) -> None:
        try:
            state = await self._store.request(StoreStatus(), timeout=STORE_TIMEOUT_S, expect=StoreState)
        except WireError as error:
            self.book.full = True
            log.warning("screenshot store: %s; no new groups until it answers", error)
            return
        full = state.bytes > STORE_HIGH_WATER * state.limit_bytes
        if full != self.book.full:
            log.warning(
                "screenshot store: %d of %d bytes: new groups %s",
                state.bytes,
                state.limit_bytes,
                "wait" if full else "begin",
            )
        self.book.full = full
        census = self.book.census()
        lacking = census.queued < self.config.replay.groups_per_step  # else the trainer, which may be saving, goes on
        idle = full and lacking and self.book.training_allowed and not census.running and not census.in_training
        if not idle:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.monotonic()
        elif time.monotonic() - self._stuck_since > STUCK_S:
            raise UserError(
                f"replay.screenshot_bytes={state.limit_bytes} is full with {census.queued} queued groups, fewer than the "
                f"replay.groups_per_step={self.config.replay.groups_per_step} of a batch, so nothing can go on: raise it"
            )
