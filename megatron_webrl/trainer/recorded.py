"""Training on recorded batches, without rollouts: `megatron-webrl train` with `train_only`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_webrl.config import RunConfig
from megatron_webrl.observe import MetricsLogger, MetricsSink
from megatron_webrl.replay import Lineage, RecordedBatch, choose_batches
from megatron_webrl.trainer.checkpoint import Checkpoints
from megatron_webrl.trainer.policy import PolicyTrainer

log = logging.getLogger(__name__)


def run_recorded(
    config: RunConfig,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    resume: Path | None,
    sinks: Sequence[MetricsSink],
) -> None:
    """Train on the batches of config.train_only, in order, each for the policy version that it was taken for: from the model
    of the configuration, or on those after the steps of the checkpoint `resume`.  Ends when they are used up, or with
    trainer.steps or trainer.max_minutes; saves checkpoints and `model_final` as a run with rollouts does.

    sinks: where metrics go, on rank 0.  Raises UserError for batches that cannot be read or do not fit.
    """
    began = time.monotonic()
    trainer = PolicyTrainer(
        config,
        rank=rank,
        world_size=world_size,
        master_address=master_address,
        master_port=master_port,
        total_steps=config.trainer.steps,
    )
    metrics = MetricsLogger(sinks if rank == 0 else [])
    run_dir = Path(config.run_dir)
    settings = config.trainer
    try:
        saves = Checkpoints(trainer, run_dir, durable=lambda step: log.info("checkpoint of step %d", step))
        step = 0
        if resume is not None:
            step = int(trainer.load(resume)["step"])
            log.info("resumed from %s: %d steps done", resume, step)
        saved = resume is not None
        for batch in choose_batches(config, after_step=step):
            saves.finish(block=False)
            minutes = (time.monotonic() - began) / 60
            if settings.max_minutes is not None and _longest(trainer, minutes) >= settings.max_minutes:
                log.info("trainer.max_minutes=%g are used up", settings.max_minutes)
                break
            step, saved = batch.step, False
            metrics.log(step, {**_train(trainer, batch), "run/version": batch.version, "run/minutes": minutes})
            if step % settings.checkpoint_every == 0:
                saves.save(step, {"step": step, "version": batch.version})
                saved = True
        if not saved:
            saves.save(step, {"step": step, "version": batch.version})
        saves.finish()
        trainer.save_hf(run_dir / "model_final")
    finally:
        metrics.close()
        trainer.close()


def _train(trainer: PolicyTrainer, batch: RecordedBatch) -> dict[str, float]:
    started = time.perf_counter()
    report = trainer.train_step(
        batch.group_ids,
        batch.groups,
        batch.images,
        version=batch.version,
        costs=batch.costs,
        lineage=Lineage(batch.lineage),
    )
    return {**report.metrics, "time/step_s": time.perf_counter() - started}


def _longest(trainer: PolicyTrainer, minutes: float) -> float:
    """The ranks' largest value, the same on every rank: they stop together."""
    return max(trainer.layout.gather(minutes))
