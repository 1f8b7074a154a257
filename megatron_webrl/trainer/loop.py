"""The trainer's life: take a batch, train, publish, again; until the coordinator says stop.

Rank 0 talks to the coordinator and decides; what it decides is broadcast, so that all ranks enter the same collectives.
Weights are copied out after a step and travel in the background: the next batch is taken, and trained, meanwhile.  Engines that
were refreshed by then answer one prompt, and before the next update their logprobs are compared with the trainer's on the
same tokens.
"""

from __future__ import annotations

import logging
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist

from megatron_webrl.config import RunConfig
from megatron_webrl.observe import Tracer
from megatron_webrl.replay import BatchTimeout, Lineage
from megatron_webrl.screenshots import fetch_images
from megatron_webrl.trainer.agreement import Agreement
from megatron_webrl.trainer.batch import Row
from megatron_webrl.trainer.checkpoint import Checkpoints
from megatron_webrl.trainer.policy import PolicyTrainer
from megatron_webrl.trainer.prefetch import Prefetcher
from megatron_webrl.trainer.publishing import Publishing
from megatron_webrl.trainer.refresh import COORDINATOR_AWAY_S, RefreshReport
from megatron_webrl.trajectory import FLOAT32, INT32, Group, ImageRef, decode_steps, pack, unpack
from megatron_webrl.wire import BlockingClient, Keys, Message, WireError
from megatron_webrl.wire.messages import (
    CheckpointDurable,
    ClaimVersion,
    Done,
    EngineStatus,
    FetchGroups,
    Generate,
    Generated,
    Groups,
    Manifest,
    NeedImages,
    StepTrained,
    Take,
    TrainerStarted,
    TrainingFinished,
    Version,
)

log = logging.getLogger(__name__)

TAKE_WAIT_S = 2.0
RPC_TIMEOUT_S = 10.0
GROUPS_A_MESSAGE = 8
"""Some tens of megabytes at most."""
RETRY_S = 0.5
PROBE_TIMEOUT_S = 30.0
PROBE_WAIT_S = 5.0
"""That a step waits for replies that are under way."""
PROBE_TOKENS = 64
"""Most tokens of such a reply."""


Reply = TypeVar("Reply", bound=Message)


class _Prompt(NamedTuple):
    """What an engine is asked after a refresh: a prompt that it was asked before."""

    prompt_ids: bytes
    refs: list[ImageRef]
    images: dict[str, bytes]


class TrainerLoop:
    """One rank of the trainer.  resume: checkpoint to start from, None for the model of the configuration."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        coordinator_address: str,
        store_address: str,
        keys: Keys | None,
        resume: Path | None,
        tracer: Tracer,
    ) -> None:
        self.config = config
        self.rank = rank
        self.step, self.version = 0, -1
        self._run_id, self._keys = run_id, keys
        self._tracer = tracer
        self._coordinator = BlockingClient(coordinator_address, run_id, f"trainer-{rank}", keys=keys)
        self._store = BlockingClient(store_address, run_id, f"trainer-{rank}", keys=keys)
        self._trainer = PolicyTrainer(
            config,
            rank=rank,
            world_size=world_size,
            master_address=master_address,
            master_port=master_port,
            total_steps=config.trainer.steps,
        )
        self._processor = self._trainer.processor
        self._agreement = Agreement(config.trainer)
        self._publishing = Publishing(
            self._trainer,
            run_id=run_id,
            coordinator_address=coordinator_address,
            master_address=master_address,
            keys=keys,
            refreshed=self._refreshed,
        )
        self._prefetcher = self._prefetch(run_id, coordinator_address, store_address)
        self._threads = ThreadPoolExecutor(1, "probe")
        self._probe: tuple[int, Future[list[tuple[str, Row]]]] | None = None
        """Version, and the replies to come; set by the thread that publishes."""
        self._prompt: _Prompt | None = None
        self._waiting_since = time.monotonic()
        self._waited_s = 0.0
        """For the next batch."""
        self._saving_s: float | None = None
        """That training stood still for a checkpoint since the step before."""
        self._checkpoints = Checkpoints(
            self._trainer, Path(config.run_dir), durable=lambda step: self._tell(CheckpointDurable(step))
        )
        self._saved = resume is not None
        """Whether what the trainer holds is in a checkpoint, written or being written."""
        if resume is not None:
            state = self._trainer.load(resume)
            self.step, self.version = int(state["step"]), int(state["version"])
            log.info("resumed from %s: %d steps done", resume, self.step)

    def run(self) -> None:
        """Train until the coordinator says stop.  Raises BatchTimeout, LogprobMismatch, and what the parts raise."""
        try:
            self._publish_new_version(TrainerStarted(self.step, self.version))
            finished = False
            while True:
                order, manifest = self._next_order()
                self._checkpoints.finish(block=order == "stop")
                if order == "stop":
                    return
                if order == "train":
                    self._train(manifest)
                    if self.step % self.config.trainer.checkpoint_every == 0:
                        self._save()
                    self._waiting_since = time.monotonic()
                elif order == "save" and not self._saved:
                    self._save()
                elif order == "finish" and not finished:
                    if not self._saved:
                        self._save()
                    self._checkpoints.finish()
                    self._publishing.wait()
                    self._trainer.save_hf(Path(self.config.run_dir) / "model_final", exported=self._publishing.exported)
                    finished = True
                    if self.rank == 0:
                        self._tell(TrainingFinished(self.step, self.version))
                elif order in ("finish", "save"):
                    time.sleep(RETRY_S)
        finally:
            if self._prefetcher is not None:
                self._prefetcher.close()
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._publishing.close()
            self._trainer.close()
            self._coordinator.close()
            self._store.close()

    def _prefetch(self, run_id: str, coordinator_address: str, store_address: str) -> Prefetcher | None:
        pixels, layout = self._trainer.pixels, self._trainer.layout
        if pixels is None:
            return None
        return Prefetcher(
            pixels,
            coordinator_address=coordinator_address,
            store_address=store_address,
            run_id=run_id,
            keys=self._keys,
            name=f"prefetch-{self.rank}",
            shard=layout.dp_rank,
            shards=layout.dp,
            version=lambda: self.version,
        )

    # Orders ---------------------------------------------------------------------------------------------------------

    def _next_order(self) -> tuple[str, Manifest]:
        """What all ranks do next: wait, train, save, finish or stop."""
        if self.rank != 0:
            return self._share(None)
        self._publishing.check()
        asked = time.monotonic()
        with self._tracer.span("wait for groups", lane="trainer"):
            manifest = self._ask(Take(self.step, self.version, TAKE_WAIT_S), Manifest)
        if manifest.begun:
            self._waited_s += time.monotonic() - asked
        if manifest.stop:
            order = "stop"
        elif manifest.finished:
            order = "finish"
        elif manifest.save:
            order = "save"
        else:
            order = "train" if manifest.ready else "wait"
        if order in ("train", "finish") or not manifest.begun:
            self._waiting_since = time.monotonic()
        elif time.monotonic() - self._waiting_since > self.config.replay.take_timeout_s:
            raise BatchTimeout(self.config.replay)
        return self._share((order, manifest))

    def _share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if dist.get_world_size() == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _ask(self, message: Message, expect: type[Reply]) -> Reply:
        """Ask the coordinator, again while it is away: it may have been killed, and is started again."""
        return self._coordinator.request(message, timeout=RPC_TIMEOUT_S, expect=expect, retry_s=COORDINATOR_AWAY_S)

    def _tell(self, message: Message) -> None:
        self._ask(message, Done)

    # A step ---------------------------------------------------------------------------------------------------------

    def _train(self, manifest: Manifest) -> None:
        probe = self._check_probe()
        started = time.time()
        report = self._trainer.train_step(
            manifest.group_ids,
            self._fetch_groups,
            self._fetch_images,
            version=self.version,
            costs=manifest.costs,
            lineage=Lineage(manifest.lineage),
        )
        metrics = dict(report.metrics) | probe
        self._trace_phases(started, metrics)
        over = self._agreement.check(
            metrics.get("engine/logprob_diff_max", 0.0),
            metrics.get("engine/logprob_diff_mean", 0.0),
            "tokens of the newest version in the batch",
        )
        metrics["engine/logprob_over_budget"] = max(float(over), probe.get("engine/logprob_over_budget", 0.0))
        self._prepare_probe(manifest.group_ids)
        step, self.step, self._saved = self.step, self.step + 1, False
        if report.applied_updates:
            metrics |= self._publish_new_version(ClaimVersion(self.version))
        if self.rank == 0:
            metrics["time/step_s"] = time.time() - started
            metrics["time/wait_s"], self._waited_s = self._waited_s, 0.0
            if self._saving_s is not None:
                metrics["time/checkpoint_s"], self._saving_s = self._saving_s, None
            self._tell(StepTrained(step, self.version, report.applied_updates, metrics))
            log.info("step %d: %s", self.step, {k: round(v, 5) for k, v in metrics.items()})

    def _trace_phases(self, started: float, metrics: dict[str, float]) -> None:
        """The phases of a step follow each other: spans from their durations."""
        for phase in ("data", "prox", "update"):
            seconds = metrics.get(f"time/{phase}_s", 0.0)
            self._tracer.record(phase, "trainer", started, started + seconds, step=self.step)
            started += seconds

    def _fetch_groups(self, group_ids: list[int]) -> list[Group]:
        groups: list[Group] = []
        for first in range(0, len(group_ids), GROUPS_A_MESSAGE):
            groups += self._ask(FetchGroups(group_ids[first : first + GROUPS_A_MESSAGE]), Groups).groups
        return groups

    def _fetch_images(self, digests: list[str]) -> dict[str, bytes]:
        images, missing = fetch_images(self._store, digests)
        if missing:
            raise RuntimeError(f"{len(missing)} screenshots of the batch are not in the store: {missing[:3]}")
        return images

    # Publishing -----------------------------------------------------------------------------------------------------

    def _publish_new_version(self, claim: TrainerStarted | ClaimVersion) -> dict[str, float]:
        """Claim a version for the weights, copy them out and begin to send them.  Returns what the refresh before took, which
        is over by then."""
        metrics = {}
        if (report := self._publishing.reserve()) is not None:
            metrics = {
                "time/refresh_s": report.pause_s,
                "refresh/engines": float(len(report.hosts)),
                "refresh/failed": float(len(report.failed)),
                "refresh/from_disk": float(len(report.from_disk)),
            }
            if report.verified:
                metrics["refresh/verified"] = float(report.verified)
        if self.rank == 0:
            self.version = self._ask(claim, Version).version
        self.version = self._share(self.version)
        with self._tracer.span("export", lane="trainer", version=self.version):
            self._publishing.publish(self.version)
        return metrics

    def _save(self) -> None:
        began = time.monotonic()
        with self._tracer.span("checkpoint", lane="trainer", step=self.step):
            self._checkpoints.save(self.step, {"step": self.step, "version": self.version})
        self._saved, self._saving_s = True, time.monotonic() - began

    # Engine = trainer? ----------------------------------------------------------------------------------------------

    def _prepare_probe(self, group_ids: list[int]) -> None:
        """Keep the first prompt of the batch to ask engines with, once."""
        if self.rank != 0 or self._prompt is not None:
            return
        for trajectory in self._fetch_groups(group_ids[:1])[0].trajectories:
            if steps := decode_steps(trajectory.payload):
                refs = steps[0].images
                self._prompt = _Prompt(steps[0].prompt_ids, refs, self._fetch_images([r.digest for r in refs]))
                return

    def _refreshed(self, report: RefreshReport) -> None:
        """In the thread that publishes: ask every refreshed engine for one reply, in the background."""
        now = time.time()
        self._tracer.record("publish", "publishing", now - report.seconds, now, version=report.version)
        if self._prompt is not None and report.engines:
            replies = self._threads.submit(self._ask_engines, self._prompt, report.engines, report.version)
            self._probe = report.version, replies

    def _ask_engines(self, prompt: _Prompt, engines: list[EngineStatus], version: int) -> list[tuple[str, Row]]:
        """One reply of each, asked at once."""

        def ask(engine: EngineStatus) -> tuple[str, Row] | None:
            client = BlockingClient(engine.address, self._run_id, "probe", keys=self._keys)
            request = Generate(
                request=uuid.uuid4().hex,
                prompt_ids=prompt.prompt_ids,
                digests=[r.digest for r in prompt.refs],
                images=prompt.images,
                max_new_tokens=min(PROBE_TOKENS, self.config.sampling.max_new_tokens),
                temperature=self.config.sampling.temperature,
                seed=version,
                banned_ids=pack(self._processor.banned_ids(), INT32),
                stop_ids=pack(self._processor.stop_ids(), INT32),
                deadline_s=PROBE_TIMEOUT_S,
                wait_s=PROBE_TIMEOUT_S,
            )
            try:
                reply = client.request(request, timeout=PROBE_TIMEOUT_S + 5, expect=(Generated, NeedImages))
            except WireError as error:  # it died since: the refresh of its successor is checked instead
                log.warning("probe of %s: %s", engine.name, error)
                return None
            finally:
                client.close()
            if isinstance(reply, Generated) and set(unpack(reply.versions, INT32)) == {version}:
                return engine.name, _row(prompt, reply)
            return None

        with ThreadPoolExecutor(len(engines), "probe") as threads:
            return [reply for reply in threads.map(ask, engines) if reply is not None]

    def _check_probe(self) -> dict[str, float]:
        """Largest |engine − trainer| logprob of the replies since the last refresh; collective."""
        replies: list[tuple[str, Row]] = []
        probe, self._probe = self._probe, None
        if probe is not None and probe[0] == self.version:
            try:
                replies = probe[1].result(timeout=PROBE_WAIT_S)
            except TimeoutError:
                log.warning("no engine answered its probe after the refresh to version %d in time", self.version)
        replies, images = self._share((replies, self._prompt.images if replies and self._prompt else {}))
        if not replies:
            return {}
        ours = self._trainer.logprobs([row for _, row in replies], lambda digests: {d: images[d] for d in digests})
        largest, over = 0.0, False
        for (name, row), logprobs in zip(replies, ours, strict=True):
            diff = np.abs(logprobs - row.behave_logprobs)
            where = f"reply of engine host {name} after the refresh to version {self.version}"
            over |= self._agreement.check(float(diff.max()), float(diff.mean()), where)
            largest = max(largest, float(diff.max()))
        return {
            "engine/refresh_logprob_diff_max": largest,
            "engine/refresh_probes": float(len(replies)),
            "engine/logprob_over_budget": float(over),
        }


def _row(prompt: _Prompt, reply: Generated) -> Row:
    return Row(
        prompt_ids=unpack(prompt.prompt_ids, INT32),
        images=prompt.refs,
        response_ids=unpack(reply.response_ids, INT32),
        behave_logprobs=unpack(reply.logprobs, FLOAT32),
        versions=unpack(reply.versions, INT32),
        advantage=0.0,
        name="the reply to a probe",
    )
