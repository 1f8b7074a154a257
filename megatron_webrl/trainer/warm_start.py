"""Supervised training on a folder of demonstrations: `megatron-webrl sft`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np

from megatron_webrl.agent import load_demonstrations
from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.trainer.batch import rows_of
from megatron_webrl.trainer.policy import PolicyTrainer

log = logging.getLogger(__name__)


def run_sft(
    config: RunConfig,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    demonstrations: Path,
    output: Path,
) -> None:
    """Train config.model.path for config.sft.steps on every step of every demonstration, reshuffled each epoch, and write
    the result to `output`.  Rank 0 appends {step, loss, lr} lines to run_dir/sft.jsonl.

    Raises UserError if the folder holds no usable demonstration.
    """
    trajectories, images = load_demonstrations(demonstrations)
    rows = [row for trajectory in trajectories for row in rows_of(trajectory, 0.0)]
    if not rows:
        raise UserError(f"demonstrations={demonstrations} holds no step with a reply: record them again")
    settings = config.sft
    trainer = PolicyTrainer(
        config,
        rank=rank,
        world_size=world_size,
        master_address=master_address,
        master_port=master_port,
        total_steps=settings.steps,
        optimizer=settings.optimizer,
    )
    order = np.random.default_rng(config.seed)
    left: list[int] = []
    try:
        with open(Path(config.run_dir) / "sft.jsonl", "a") as progress:
            for step in range(1, settings.steps + 1):
                while len(left) < settings.batch_size:
                    left += order.permutation(len(rows)).tolist()
                batch, left = left[: settings.batch_size], left[settings.batch_size :]
                metrics = trainer.sft_step([rows[i] for i in batch], lambda digests: {d: images[d] for d in digests})
                if rank == 0:
                    progress.write(
                        json.dumps({"step": step, "loss": metrics["sft/loss"], "lr": metrics["sft/lr"]}) + "\n"
                    )
                    progress.flush()
        trainer.save_hf(output)
        log.info("written: %s", output)
    finally:
        trainer.close()
