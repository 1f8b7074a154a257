"""Checkpoints of a trainer: weights, optimizer, learning-rate position, order of minibatches, and the caller's state.

A checkpoint can be read by another layout (TP, PP, DP) with the same kind of optimizer.  It appears whole or not at all,
and what it holds is hashed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import dist_checkpointing, parallel_state

from megatron_webrl.errors import UserError
from megatron_webrl.trainer.weights import replace_directory

if TYPE_CHECKING:
    from megatron_webrl.trainer.policy import PolicyTrainer

STATE_FILE = "state.json"
"""In a checkpoint's directory: {"trainer": {...}, "state": the caller's}."""


def save(trainer: PolicyTrainer, directory: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint to `directory`, in place of one that is there.  state: what JSON can hold, rank 0's counts."""
    layout = trainer.layout
    partial = directory.with_name(f".{directory.name}.partial")
    if layout.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        own = {
            "lr_step": trainer.lr_step,
            "generator": trainer.generator.bit_generator.state,
            "distributed_optimizer": trainer.config.trainer.parallel.distributed_optimizer,
        }
        (partial / STATE_FILE).write_text(json.dumps({"trainer": own, "state": state}, indent=2) + "\n")
    layout.barrier()
    dist_checkpointing.save(_sharded_state(trainer, loading=False), str(partial), verify_integrity=True)
    layout.barrier()
    if layout.rank == 0:
        for file in partial.rglob("*"):
            if file.is_file():
                _sync(file)
        replace_directory(partial, directory)
        _sync(directory.parent)
    layout.barrier()


def load(trainer: PolicyTrainer, directory: Path) -> dict[str, Any]:
    """Set the trainer to where `directory` was saved and return the caller's state.

    Raises UserError naming the file if the checkpoint is missing, incomplete or altered, and if it was saved with
    another kind of optimizer.
    """
    saved = _read_state(directory)
    distributed = saved["trainer"]["distributed_optimizer"]
    if distributed != trainer.config.trainer.parallel.distributed_optimizer:
        raise UserError(
            f"checkpoint {directory} was saved with trainer.parallel.distributed_optimizer={str(distributed).lower()}, "
            "which Megatron cannot convert: set it the same"
        )
    try:
        loaded = dist_checkpointing.load(_sharded_state(trainer, loading=True), str(directory), verify_integrity=True)
    except (OSError, ValueError, KeyError, dist_checkpointing.core.CheckpointingException) as error:
        raise _broken(directory, str(error)) from None
    trainer.model.load_state_dict(loaded["model"])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    trainer.lr_step = saved["trainer"]["lr_step"]
    trainer.generator.bit_generator.state = saved["trainer"]["generator"]
    return saved["state"]


def _read_state(directory: Path) -> dict[str, Any]:
    try:
        saved = json.loads((directory / STATE_FILE).read_text())
        if saved.keys() == {"trainer", "state"}:
            return saved
        problem = f"it holds {sorted(saved)}"
    except (OSError, ValueError, AttributeError) as error:
        problem = str(error)
    raise _broken(directory, f"{STATE_FILE}: {problem}")


def _broken(directory: Path, problem: str) -> UserError:
    return UserError(
        f"checkpoint {directory}: {' '.join(problem.split())}: move it away, and --resume goes on from the one before"
    )


def _sharded_state(trainer: PolicyTrainer, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = trainer.model.sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
