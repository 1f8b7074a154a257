"""The coordinator: one asyncio process that hands out episodes, takes trajectories in and batches out.

It never decodes a payload.  The book (`replay.book`) and the queue (`replay.queue`) decide; this module is their sockets, clock
and housekeeping.  A reply that tells of a change waits until the change is on disk (`_durable`), one commit for all that came
meanwhile: a coordinator that was killed is started again, goes on from its records, and whoever did not hear its reply repeats
the question.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_webrl.config import ReplayConfig, RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.replay.batches import has_batch, remove_batches
from megatron_webrl.replay.book import Book
from megatron_webrl.replay.engines import EngineRegistry
from megatron_webrl.replay.keeper import ScreenshotKeeper
from megatron_webrl.replay.memory import keep_memory
from megatron_webrl.replay.queue import Taken
from megatron_webrl.replay.recorder import BatchRecorder, record_group
from megatron_webrl.replay.records import Records
from megatron_webrl.replay.rows import batch_row, run_row
from megatron_webrl.replay.spool import SpoolDamaged
from megatron_webrl.run_directory import hold
from megatron_webrl.screenshots import fetch
from megatron_webrl.tasks import make_sampler
from megatron_webrl.trajectory import Assignment, AttemptKey, Group
from megatron_webrl.wire import Client, Keys, Message, Server, WireError
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
    GetStatus,
    Groups,
    ListEngines,
    ListUpcoming,
    Manifest,
    StartEvaluation,
    Status,
    StepTrained,
    Submitted,
    SubmitTrajectory,
    Take,
    TrainerStarted,
    TrainingFinished,
    Upcoming,
    Version,
)

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5
STUCK_S = 60.0
RECORD_TIMEOUT_S = 30.0
PREDECESSOR_S = 20.0
"""A coordinator whose driver was killed may live on for some seconds."""
LATE_S = 1.0
"""A turn of the housekeeping that comes later than this was held up: this process was stopped, or its machine."""

ROLLOUT_VERSION = 0
"""Of the weights that the driver has loaded from disk, when nothing trains."""

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

    run_id: of this start of the run; one that is made again for the same start goes on where the former stood.
    log_metrics: called once a train step with its metrics; must not block.  keep_evaluations: go on with those of the start
    before.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        address: str,
        store_address: str,
        log_metrics: MetricsSink,
        keys: Keys | None = None,
        keep_evaluations: bool = False,
    ) -> None:
        self.config = config
        self._run_dir = Path(config.run_dir)
        self._lock = hold(self._run_dir / "ledger.lock", "run_dir", wait_s=PREDECESSOR_S)
        self._records = Records(self._run_dir)
        self._ledger = self._records.ledger
        self._same_start = same_start = self._ledger.recall("run_id", None) == run_id
        self._sampler = make_sampler(config.tasks, config.seed, config.replay.group_size)
        slots = config.browser.workers * config.browser.slots
        self.book = Book(
            config.replay,
            self._records,
            self._sampler,
            temperature=config.sampling.temperature,
            deadline_s=config.agent.episode_deadline_s,
            seed=config.seed,
            now=time.monotonic(),
            record_every=config.observe.record_every,
            successes_only=config.algorithm.objective == "raft++",
            same_start=same_start,
            beside=max(1, int(config.evaluation.share * min(slots, config.replay.max_concurrent_episodes))),
            share=config.evaluation.share,
            keep_evaluations=keep_evaluations,
        )
        self._store = Client(store_address, run_id, "coordinator", keys=keys)
        self._keeper = ScreenshotKeeper(self._store, self.book.owners)
        self._log_metrics = log_metrics
        self._engines = EngineRegistry()
        self.book.refreshing = lambda: self._engines.behind(self.book.policy)
        self._workers: dict[str, tuple[float, int]] = {}
        """When each was heard of, and its slots."""
        self._sessions: dict[str, str] = {}
        """The newest of each worker."""
        self._utilisation: list[float] = []
        """Share of slots in use, since the last train step."""
        self._changed = asyncio.Event()
        """For the trainer, which waits for a batch."""
        self._parked: deque[tuple[asyncio.Future[list[Assignment]], GetAssignments]] = deque()
        """Workers that wait for an assignment, first come, first served."""
        self._synced: asyncio.Future[None] | None = None
        """Of those that wait for the next commit."""
        self._flushing: asyncio.Task[None] | None = None
        self._broken: UserError | None = None
        """Why nothing can be written any more."""
        self._recorder: BatchRecorder | None = None
        if config.observe.record_batches or config.rollout_only:
            self._recorder = BatchRecorder(self._run_dir / "batches", self._store)
        self._recorded: tuple[int, list[AttemptKey]] | None = None
        """The batch that the recorder has, whose screenshots are held."""
        self._recordings: set[asyncio.Task[None]] = set()
        self._checked: set[int] = set()
        """Queued groups whose screenshots were found in the store."""
        self._collected_at = time.monotonic()
        self._stuck_since: float | None = None
        self._restore(run_id, same_start)
        handlers: dict[type[Message], Any] = {
            GetAssignments: self._get_assignments,
            SubmitTrajectory: self._submit,
            TrainerStarted: self._trainer_started,
            Take: self._take,
            FetchGroups: self._fetch_groups,
            ListUpcoming: self._list_upcoming,
            StepTrained: self._step_trained,
            TrainingFinished: self._training_finished,
            CheckpointDurable: self._checkpoint_durable,
            ClaimVersion: self._claim_version,
            ListEngines: self._list_engines,
            EngineStatus: self._engine_status,
            StartEvaluation: self._start_evaluation,
            EvaluationProgress: self._evaluation_progress,
            BeginTraining: self._begin_training,
            GetStatus: self._get_status,
            EndRun: self._end_run,
        }
        self._server = Server(address, run_id, handlers, keys=keys)

    def _restore(self, run_id: str, same_start: bool) -> None:
        """The phase that this start of the run is in; the step and its numbers, of whichever start."""
        recall = self._ledger.recall
        self._step: int = recall("step", 0)
        self._metrics: dict[str, float] = {}
        self._lag_sum, self._lag_tokens, self._lag_max = recall("lag", [0.0, 0, 0])
        if not same_start:
            self._ledger.remember(run_id=run_id, began_at=None, finished=False, stopping=False, trajectories=0)
        self._began_at: float | None = recall("began_at", None)
        self._finished: bool = recall("finished", False)
        self._stopping: bool = recall("stopping", False)
        self.book.trajectories = recall("trajectories", 0)
        self.book.policy = ROLLOUT_VERSION if self.config.rollout_only else recall("policy", -1) if same_start else -1
        self.book.training_allowed = self._began_at is not None and not self._finished and not self._stopping
        self._records.commit()

    async def run(self) -> None:
        """Serve until cancelled.  Raises AccountError if the account ever fails to balance, what `BatchRecorder.check`
        raises, UserError if the bounds leave no way on or the disk takes nothing more, and (rollout_only) BatchTimeout."""
        keep_memory()
        await self._server.start()
        try:
            if self._same_start:
                self._record_again()
            while True:
                if self._broken is not None:
                    raise self._broken
                slept = time.monotonic()
                await asyncio.sleep(HOUSEKEEPING_S)
                if (late := time.monotonic() - slept - HOUSEKEEPING_S) > LATE_S:
                    self.book.postpone(late)  # heartbeats may be waiting to be read
                self.book.expire(time.monotonic())
                await self._keeper.turn()
                self._watch_bounds()
                self._after_change()
                if self._recorder is not None:
                    self._recorder.check()
                    if self.config.rollout_only and not self._recorder.busy:
                        await self._collect(self._recorder)
                self._watch_slots()
                if warning := self.book.drops.warning(time.monotonic()):
                    log.warning("%s", warning)
                self.check_account()
                self._commit()
        finally:
            await self._server.close()
            if self._recorder is not None:
                await self._recorder.close()
            if self._flushing is not None:
                await asyncio.wait([self._flushing], timeout=RECORD_TIMEOUT_S)
            self._store.close()
            self._records.close(commit=self._broken is None)
            self._lock.close()

    def check_account(self) -> None:
        """Invariant 1: what the ledger calls in flight is what the state holds."""
        account, in_flight = self._ledger.account(), self.book.in_flight()
        if account.in_flight != in_flight:
            raise AccountError(f"ledger: {account.in_flight} attempts in flight, state: {in_flight}")

    # Workers --------------------------------------------------------------------------------------------------------

    async def _get_assignments(self, _: str, m: GetAssignments) -> Assignments:
        now = time.monotonic()
        heard = self._workers.get(m.worker, (-math.inf, 0))[0]
        if m.session < self._sessions.get(m.worker, "") and now - heard < self.config.replay.lease_s:
            return Assignments([], m.running)  # from before it was killed
        self._sessions[m.worker] = m.session
        self._workers[m.worker] = (now, len(m.running) + max(0, m.slots))
        revoked, assignments = self.book.renew(m.worker, m.session, m.running, now)
        wanted = m.slots - len(assignments)
        if wanted > 0 and not self._stopping:
            assignments += self.book.assign(m.worker, m.session, wanted, now)
        if m.slots > 0 and not assignments and not revoked and m.wait_s > 0:
            assignments = await self._park(m, min(m.wait_s, self.config.replay.lease_s / 2))
        if assignments or revoked:
            await self._durable()
        return Assignments(assignments, revoked)

    async def _park(self, m: GetAssignments, seconds: float) -> list[Assignment]:
        """The worker's turn among those that wait."""
        future: asyncio.Future[list[Assignment]] = asyncio.get_running_loop().create_future()
        self._parked.append((future, m))
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return []

    def _serve_parked(self) -> None:
        """Give to those who wait what there is now."""
        while self._parked and not self._stopping:
            future, m = self._parked[0]
            if not future.done():
                found = self.book.assign(m.worker, m.session, m.slots, time.monotonic())
                if not found:
                    return
                future.set_result(found)
            self._parked.popleft()

    async def _submit(self, _: str, m: SubmitTrajectory) -> Submitted:
        now = time.monotonic()
        with self._safe_or_over():
            reason = self.book.submit(m.trajectory, now)
        # After a repeat, whose first reply was lost, the slot's next attempt comes with the heartbeat: it may have one already.
        more = m.more and reason == "accepted" and not self._stopping and not self._parked
        assignments = self.book.assign(m.worker, m.session, 1, now) if more else []
        self._after_change()
        await self._durable()
        return Submitted(reason == "accepted", reason, assignments)

    # Durability -----------------------------------------------------------------------------------------------------

    async def _durable(self) -> None:
        """Returns when all that was changed so far is on disk."""
        if self._synced is None:
            self._synced = asyncio.get_running_loop().create_future()
        waiting = self._synced
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush())
        await waiting

    def _commit(self) -> None:
        with self._safe_or_over():
            self._ledger.remember(trajectories=self.book.trajectories)
            self._records.commit()

    @contextlib.contextmanager
    def _safe_or_over(self) -> Iterator[None]:
        """Around whatever writes to the disk: if that fails, what is in memory may be ahead of what is safe; so nothing is told
        any more, nothing further is written, and the run ends.  Raises UserError then, and ever after."""
        if self._broken is not None:
            raise self._broken
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            self._broken = UserError(
                f"run_dir={self._run_dir} cannot be written to ({error}): make room there, then go on with --resume"
            )
            raise self._broken from None

    def _sync(self) -> None:
        with self._safe_or_over():
            self._records.sync()

    async def _flush(self) -> None:
        """Commit for all who wait, again as long as somebody does; what comes during one commit waits for the next."""
        while (waiting := self._synced) is not None:
            self._synced = None
            try:
                self._commit()
                await asyncio.to_thread(self._sync)
            except UserError as error:  # nobody is told that it is safe
                log.error("%s", error)
                if not waiting.done():  # given up, with all the server's requests
                    waiting.set_exception(error)
            else:
                if not waiting.done():
                    waiting.set_result(None)
        self._flushing = None

    # Trainer --------------------------------------------------------------------------------------------------------

    async def _trainer_started(self, _: str, m: TrainerStarted) -> Version:
        version = self.book.trainer_started(m.step, m.version, time.monotonic())
        self._records.durable(m.step)  # it holds the checkpoint
        if m.step < self._step:
            remove_batches(self._run_dir / "batches", m.step)
        self._step, self._finished = m.step, False
        self._ledger.remember(step=m.step, policy=version, finished=False)
        self._after_change()
        await self._durable()
        return Version(version)

    async def _take(self, _: str, m: Take) -> Manifest:
        if m.version > self.book.policy:
            self.book.policy = m.version
        asked = time.monotonic()
        begun = self._began_at is not None
        lineage = tuple(self.book.lineage.segments)
        while True:
            if m.step < self._step:
                return Manifest(m.step, False, begun)  # an early question that was heard late
            if self._stopping:
                return Manifest(m.step, False, begun, stop=True)
            # The batch before is to be on disk first.  If it cannot be, `run` ends the run.
            go_on = self._recorder is None or self._recorder.whole or self._recorder.step > m.step
            if go_on and self._out_of_budget(m.step):
                self.book.training_allowed = False
                return Manifest(m.step, False, begun, finished=True)
            batch = await self._cut(m.step, m.version) if begun and go_on else None
            if batch is not None:
                self._record_batch(m.step, m.version, batch)
                self._after_change()
                await self._durable()
                costs = [group.tokens for group in batch.groups.values()]
                return Manifest(m.step, True, begun, list(batch.groups), costs, lineage)
            save = self.book.full and self._provisional()
            left = asked + m.wait_s - time.monotonic()
            if left <= 0 or save:
                return Manifest(m.step, False, begun, save=save)
            await self._wait_for_change(left)

    async def _cut(self, step: int, version: int) -> Taken | None:
        """The batch, once the store has all of its screenshots; a group that lost some is dropped by name."""
        queue = self.book.queue
        while queue.taken is None:
            groups = [g for g in queue.upcoming(version) if g.group_id not in self._checked]
            if not groups:
                break
            digests = list(dict.fromkeys(d for g in groups for d in g.digests))
            try:
                lost = await self._keeper.lacking(digests) if digests else set()
            except WireError as error:
                log.warning("screenshot store: %s; no batch until it answers", error)
                return None
            lacking = [g.group_id for g in groups if lost.intersection(g.digests) and g.group_id in queue.group_ids]
            if lacking:
                log.warning("groups %s are dropped: the store lost %d of their screenshots", lacking, len(lost))
                queue.drop(lacking, "images_lost")
            self._checked.update(g.group_id for g in groups)
        self._checked &= queue.group_ids
        if step < self._step:
            return None  # an early question that was heard late
        batch = queue.take(step, version, running=self.book.running(), now=time.monotonic())
        self.book.drop_abandoned()
        return batch

    def _provisional(self) -> bool:
        """Whether a checkpoint would make anything final."""
        return any(batch.state in ("trained", "skipped") for batch in self._ledger.batches())

    def _out_of_budget(self, step: int) -> bool:
        limit = self.config.trainer.max_minutes
        return step >= self.config.trainer.steps or (limit is not None and self._minutes() >= limit)

    def _minutes(self) -> float:
        return 0.0 if self._began_at is None else max(0.0, time.time() - self._began_at) / 60

    async def _fetch_groups(self, _: str, m: FetchGroups) -> Groups:
        return Groups(self.book.queue.fetch(m.group_ids))

    async def _list_upcoming(self, _: str, m: ListUpcoming) -> Upcoming:
        return Upcoming([(group.group_id, group.digests) for group in self.book.queue.upcoming(m.version)])

    async def _step_trained(self, _: str, m: StepTrained) -> Done:
        if m.step < self._step:
            await self._durable()
            return Done()  # a repeat
        self.book.queue.trained(m.step, m.applied_updates)
        self.book.policy = m.version
        tokens = int(m.metrics.get("rollout/response_tokens", 0))
        self._lag_sum += m.metrics.get("rollout/lag_mean", 0.0) * tokens
        self._lag_tokens += tokens
        self._lag_max = max(self._lag_max, int(m.metrics.get("rollout/lag_max", 0)))
        await self._end_step(m.step + 1, m.metrics)
        return Done()

    async def _end_step(self, step: int, metrics: dict[str, float]) -> None:
        """`step` steps are done, the last with these metrics."""
        self._step, self._metrics = step, dict(metrics)
        account = self._staleness_account()
        told = {**self.book.drops.row(), **self.book.judge_row(), **self.book.evaluations.row()}
        self._log_metrics(step, {**metrics, **run_row(self.status()), **account, **told})
        self.book.remember()
        lag = [self._lag_sum, self._lag_tokens, self._lag_max]
        self._ledger.remember(step=step, policy=self.book.policy, lag=lag)
        self._after_change()
        await self._durable()

    def _staleness_account(self) -> dict[str, float]:
        """Queue, slots and stores, for a row."""
        ages = self.book.queue.ages(time.monotonic())
        used, self._utilisation = self._utilisation, []
        return {
            "replay/queue_age_mean_s": sum(ages) / len(ages) if ages else 0.0,
            "replay/queue_age_max_s": max(ages, default=0.0),
            "replay/queue_bytes": float(self._records.spool.bytes),
            "screenshots/images": float(self._keeper.state.images),
            "screenshots/bytes": float(self._keeper.state.bytes),
            "rollout/slot_utilisation": sum(used) / len(used) if used else 0.0,
            "wire/malformed": float(self._server.malformed),
        }

    async def _training_finished(self, _: str, m: TrainingFinished) -> Done:
        self._finished = True
        self.book.policy = m.version
        self._ledger.remember(finished=True, policy=m.version)
        await self._durable()
        return Done()

    async def _checkpoint_durable(self, _: str, m: CheckpointDurable) -> Done:
        self._records.durable(m.step)
        self._after_change()
        await self._durable()
        return Done()

    async def _claim_version(self, _: str, m: ClaimVersion) -> Version:
        version = self.book.claim_version(m.after)
        self._ledger.remember(policy=version)
        await self._durable()
        return Version(version)

    # Engines --------------------------------------------------------------------------------------------------------

    async def _list_engines(self, _: str, m: ListEngines) -> Engines:
        if m.worker:
            return Engines(self._engines.given(m.worker, self.config.engine.hosts_per_worker))
        return Engines(self._engines.hosts())

    async def _engine_status(self, _: str, m: EngineStatus) -> Done:
        if self._engines.hear(m):
            self._changed.set()
        return Done()

    # Driver ---------------------------------------------------------------------------------------------------------

    async def _start_evaluation(self, _: str, m: StartEvaluation) -> Done:
        how: dict[str, Any] = {"top_p": m.top_p, "top_k": m.top_k, "seeds": m.seeds, "beside": m.beside}
        self.book.begin_evaluation(m.name, m.tasks, m.temperature, **how)
        self._after_change()
        await self._durable()
        return Done()

    async def _evaluation_progress(self, _: str, m: EvaluationProgress) -> EvaluationState:
        return self.book.evaluations.progress(m.name)

    async def _begin_training(self, _: str, m: BeginTraining) -> Done:
        if self._began_at is None:
            self._began_at, self._collected_at = time.time(), time.monotonic()
            self.book.training_allowed = True
            self._ledger.remember(began_at=self._began_at)
            self._after_change()
        await self._durable()
        return Done()

    async def _get_status(self, _: str, m: GetStatus) -> Status:
        return self.status()

    async def _end_run(self, _: str, m: EndRun) -> Status:
        if not self._stopping:
            self._stopping = True
            self.book.end()
            self._ledger.remember(stopping=True)
            self._after_change()
        await self._durable()
        return self.status()

    def status(self) -> Status:
        """What the live display shows."""
        now = time.monotonic()
        return Status(
            step=self._step,
            version=self.book.policy,
            finished=self._finished,
            minutes=self._minutes(),
            lag_mean=self._lag_sum / self._lag_tokens if self._lag_tokens else 0.0,
            lag_max=self._lag_max,
            workers=sum(now - heard < self.config.replay.lease_s for heard, _ in self._workers.values()),
            engines=self._engines.hosts(),
            metrics=self._metrics,
            store_bytes=self._keeper.state.bytes,
            **self.book.status(),
        )

    # Without a trainer ----------------------------------------------------------------------------------------------

    async def _collect(self, recorder: BatchRecorder) -> None:
        """rollout_only: take a batch as a trainer would; once it is recorded, let its groups go."""
        if self._began_at is None or self._finished or self._stopping:
            return
        now, step = time.monotonic(), self._step
        if step < recorder.step:
            batch = self.book.queue.take(step, ROLLOUT_VERSION)
            assert batch is not None  # the same again
            row = batch_row(self.book.queue.fetch(list(batch.groups))) | {"time/collect_s": now - self._collected_at}
            self._collected_at = now
            self.book.queue.discard(step, "rollout_only")
            await self._end_step(step + 1, row)
        elif self._out_of_budget(step):
            self.book.training_allowed = False
            self._finished = True
            self._ledger.remember(finished=True)
        elif (batch := await self._cut(step, ROLLOUT_VERSION)) is not None:
            self._record_batch(step, ROLLOUT_VERSION, batch)
            self._after_change()
        elif now - self._collected_at > self.config.replay.take_timeout_s:
            raise BatchTimeout(self.config.replay)

    # Housekeeping ---------------------------------------------------------------------------------------------------

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(min(seconds, 1.0)):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _after_change(self) -> None:
        """Record what completed, hand over what was freed, serve and wake those who wait."""
        completed, self.book.completed = self.book.completed, []
        for group in completed:
            task = asyncio.create_task(self._record(group))
            self._recordings.add(task)
            task.add_done_callback(self._recordings.discard)
        freed, self._records.freed = self._records.freed, []
        self._keeper.release(freed)
        self._serve_parked()
        self._changed.set()

    async def _record(self, group: Group) -> None:
        """Write one group's files, while its screenshots are held."""
        keys = [t.assignment.key for t in group.trajectories]
        self._keeper.hold(keys)
        try:
            images = await fetch(self._store, group.digests, timeout=RECORD_TIMEOUT_S)
            await asyncio.to_thread(record_group, self._run_dir / "trajectories", group, images)
        except (WireError, OSError) as error:
            log.warning("group %d could not be recorded: %s", group.group_id, error)
        finally:
            self._keeper.let_go(keys)

    def _record_batch(self, step: int, version: int, batch: Taken) -> None:
        """observe.record_batches: begin to record it, its screenshots held until it is on disk."""
        if self._recorder is None or step + 1 == self._recorder.step:
            return
        self._hold_recorded(step, [a.key for group in batch.groups.values() for a in group.attempts])
        groups, lineage = self.book.queue.fetch(list(batch.groups)), tuple(self.book.lineage.segments)
        self._recorder.begin(step + 1, version, groups, lineage)

    def _hold_recorded(self, step: int, keys: list[AttemptKey]) -> None:
        """Their screenshots stay until the next batch is recorded."""
        if self._recorded is not None:
            self._keeper.let_go(self._recorded[1])
        self._keeper.hold(keys)
        self._recorded = (step, keys)

    def _record_again(self) -> None:
        """What a coordinator that was killed was recording: the batch in training, or else the one that was trained last."""
        if self._recorder is None or not self.config.observe.record_batches:
            return
        taken = self.book.queue.taken
        batches = [b for b in self._ledger.batches() if b.state in ("in_training", "trained")]
        newest = max(batches, key=lambda b: b.step, default=None)
        if newest is None or has_batch(self._run_dir / "batches", newest.step + 1):
            return
        if taken is not None and taken.step == newest.step:
            self._record_batch(newest.step, newest.version, taken)
        else:
            try:
                groups = self.book.queue.provisional(newest)
            except SpoolDamaged as error:
                log.warning("the batch of step %d cannot be recorded any more: %s", newest.step + 1, error)
                return
            self._hold_recorded(newest.step, [t.assignment.key for group in groups for t in group.trajectories])
            self._recorder.begin(newest.step + 1, newest.version, groups, tuple(self.book.lineage.segments))

    def _watch_slots(self) -> None:
        now = time.monotonic()
        slots = sum(n for heard, n in self._workers.values() if now - heard < self.config.replay.lease_s)
        if slots and self.book.training_allowed:
            self._utilisation.append(min(1.0, self.book.leased / slots))

    def _watch_bounds(self) -> None:
        """Back-pressure of disk budgets: no new groups; then the youngest that is not complete gives way; then an error."""
        replay = self.config.replay
        spooled = self._records.spool.bytes > replay.queue_bytes
        self.book.full = self._keeper.full or spooled
        if self._keeper.must_drop() and (group := self.book.drop_youngest("screenshots_full")) is not None:
            log.warning("group %d is dropped: replay.screenshot_bytes=%d are in use", group, replay.screenshot_bytes)
        census = self.book.census()
        lacking = census.queued < self.book.queue.batch_units  # else the trainer, which may be saving, goes on
        going = census.running or census.in_training or self._provisional() or not self.book.training_allowed
        if going or not lacking or not (spooled or self._keeper.crowded):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.monotonic()
        elif time.monotonic() - self._stuck_since > STUCK_S:
            key, bound = (
                ("queue_bytes", replay.queue_bytes) if spooled else ("screenshot_bytes", replay.screenshot_bytes)
            )
            raise UserError(
                f"replay.{key}={bound} is full with {census.queued} queued groups, fewer than the replay.groups_per_step="
                f"{replay.groups_per_step} of a batch, so nothing can go on: raise it"
            )
