"""Checkpoints of a trainer: weights, optimizer, learning-rate position, order of minibatches, and what the caller hands in.

A checkpoint can be read by another layout (TP, PP, DP) with the same kind of optimizer.  It appears whole or not at all,
and what it holds is hashed:

    state.json                      counts; the generator's state
    __R_0.distcp, .metadata, …      Megatron's distributed checkpoint: what rank R wrote, and where each tensor lies
    integrity.json                  SHA-256 of all of these
    hf/                             the model directory without its weights, so that a checkpoint can be converted alone

A save has three parts.  `begin` (collective) plans and takes the state as it is now, as a copy in host memory.  A thread of
each rank writes the rank's files and hashes them; it enters no collective.  `Save.finish` (collective) asks whether all are
done, and then rank 0 adds the index and renames the directory.  Not a forked process, as in Megatron: a fork of a process
with threads (gloo, NCCL, ZeroMQ) can hang.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_webrl.errors import UserError
from megatron_webrl.run_directory import checkpoint_path, delete_old, partial_path, remove_partial
from megatron_webrl.trainer.weights import copy_all_but_weights, replace_directory

if TYPE_CHECKING:
    from megatron_webrl.trainer.layout import Layout
    from megatron_webrl.trainer.policy import PolicyTrainer

STATE_FILE = "state.json"
"""In a checkpoint's directory: {"trainer": {...}, "state": the caller's}."""
HF_FOLDER = "hf"
_INTEGRITY_FILE = "integrity.json"
_POLL_S = 0.2


class SaveFailed(Exception):
    """A checkpoint could not be written; the one before it is untouched."""


@dataclass(frozen=True)
class _Part:
    """What one rank wrote."""

    shards: list[Any]
    """torch's WriteResult of every tensor and object."""
    hashes: dict[str, str]


class Save:
    """A checkpoint on its way to disk.  Made by `begin`; all ranks call its methods together."""

    def __init__(self, layout: Layout, directory: Path, plan: _Plan, part: Future[_Part]) -> None:
        self.directory = directory
        self._layout, self._plan, self._part = layout, plan, part

    def finish(self, *, block: bool = True) -> bool:
        """Whether the checkpoint is whole on disk.

        block: wait for the writers of all ranks, up to `trainer.collective_timeout_s`; else ask once.
        Raises SaveFailed on every rank if one of them could not write, or not in time; what was written is removed.
        """
        limit = self._layout.timeout.total_seconds()
        deadline = time.monotonic() + limit
        while True:
            if block:
                wait([self._part], _POLL_S)
            problem = None
            if self._part.done():
                problem = self._part.exception()
            elif block and time.monotonic() > deadline:
                problem = TimeoutError(f"not written within trainer.collective_timeout_s={limit:g} s")
            states = torch.tensor([not self._part.done(), problem is not None], dtype=torch.float64)
            running, failed = self._layout.sum(states).tolist()
            if failed:
                _agree(self._layout, self.directory, problem)
            if not running:
                break
            if not block:
                return False
        parts = self._layout.gather(self._part.result())
        with _Agreed(self._layout, self.directory):
            if self._layout.rank == 0:
                self._complete(parts)
        return True

    def _complete(self, parts: list[_Part]) -> None:
        """The index over all parts, and the final name."""
        partial = partial_path(self.directory)
        assert self._plan.writer is not None
        self._plan.writer.finish(self._plan.index, [part.shards for part in parts])
        save_config(CheckpointingConfig(self._plan.backend, self._plan.version), str(partial))
        hashes = {name: digest for part in parts for name, digest in part.hashes.items()}
        for file in partial.iterdir():
            if file.is_file() and file.name not in hashes:
                hashes[file.name] = _sync_and_hash(file)
        (partial / _INTEGRITY_FILE).write_text(json.dumps({"algorithm": "sha256", "files": hashes}, indent=2))
        _sync(partial / _INTEGRITY_FILE)
        _sync(partial)
        replace_directory(partial, self.directory)
        _sync(self.directory.parent)


class _Plan(TorchDistSaveShardedStrategy):
    """Megatron's strategy, stopped where it would write: keeps the writer, with its tensors, and the index."""

    writer: Any = None
    index: Any = None
    """On rank 0."""

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, async_strategy: str) -> Any:
        self.writer, self.index = writer, planned[1]
        return super()._get_save_and_finalize_callbacks(writer, planned, async_strategy)

    def take(self, training: set[int]) -> list[Any]:
        """The buckets to write, in host memory.  What lies in one of the storages `training` is copied; the rest is fresh:
        Megatron gathers the distributed optimizer's state, and cuts views, into tensors of their own.  Nothing on the
        device is kept any longer."""
        taken = []
        for i, (path, name, (objects, tensors)) in enumerate(self.writer.write_buckets):
            # blocking: a copy that does not block goes to pinned memory, which torch would keep
            held = [(item, tensor.to("cpu", copy=_storage(tensor) in training)) for item, tensor in tensors]
            taken.append((path, name, (objects, held)))
            self.writer.write_buckets[i] = (path, name, ([], []))
        return taken


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _training_storages(trainer: PolicyTrainer) -> set[int]:
    """Storages of what a train step changes: weights, and the optimizer's own weights and moments."""
    tensors = [t for chunk in trainer.chunks for t in (*chunk.parameters(), *chunk.buffers())]
    for optimizer in trainer.optimizer.chained_optimizers:
        inner = optimizer.optimizer
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        tensors += [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return {_storage(tensor) for tensor in tensors}


def begin(trainer: PolicyTrainer, directory: Path, state: dict[str, Any], *, copy: bool = True) -> Save:
    """Begin to write a checkpoint to `directory`, in place of one that is there; call `finish` on what is returned.

    state: what JSON can hold; that of rank 0 counts.  copy: training may go on at once, for the price
    of this rank's part in host memory until it is written.  Removes what earlier saves left half-written: one save at a
    time.  Raises SaveFailed on every rank if the directory cannot be made.
    """
    layout, partial = trainer.layout, partial_path(directory)
    with _Agreed(layout, directory):
        if layout.rank == 0:
            remove_partial(directory.parent)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    own = {
        "lr_step": trainer.lr_step,
        "generator": trainer.generator.bit_generator.state,
        "distributed_optimizer": trainer.config.trainer.parallel.distributed_optimizer,
    }
    content = json.dumps({"trainer": own, "state": state}, indent=2) + "\n"
    for optimizer in trainer.optimizer.chained_optimizers:  # the moments of what was never updated: zero
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    plan = _Plan()
    dist_checkpointing.save(
        _sharded_state(trainer, loading=False), str(partial), plan, async_sharded_save=True, async_strategy="mcore"
    )
    with _Agreed(layout, directory):
        buckets = plan.take(_training_storages(trainer) if copy else set())

    def write() -> _Part:
        shards = _write_shards(plan.writer, buckets)
        files = [Path(path) for path, _, _ in buckets]
        if layout.rank == 0:
            (partial / STATE_FILE).write_text(content)
            files.append(partial / STATE_FILE)
            copy_all_but_weights(trainer.config.model.path, partial / HF_FOLDER)
            files += (partial / HF_FOLDER).iterdir()
            _sync(partial / HF_FOLDER)
        return _Part(shards, {str(file.relative_to(partial)): _sync_and_hash(file) for file in files})

    return Save(layout, directory, plan, _in_thread(write))


def save(trainer: PolicyTrainer, directory: Path, state: dict[str, Any]) -> None:
    """`begin` and `finish` at once, without the copy."""
    begin(trainer, directory, state, copy=False).finish()


class Checkpoints:
    """The saves of a run: one at a time, in the background if `trainer.async_checkpoints` says so, and the oldest deleted.

    durable: called on rank 0 with the step of a checkpoint once that is whole on disk, before older ones are deleted.
    All ranks call each method together; each raises SaveFailed as `Save.finish` does.
    """

    def __init__(self, trainer: PolicyTrainer, run_dir: Path, durable: Callable[[int], None]) -> None:
        self._trainer, self._run_dir, self._durable = trainer, run_dir, durable
        self._settings = trainer.config.trainer
        self._saving: tuple[int, Save] | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save what the trainer holds after `step` steps; waits for the save before."""
        self.finish()
        background = self._settings.async_checkpoints
        directory = checkpoint_path(self._run_dir, step)
        self._saving = step, begin(self._trainer, directory, state, copy=background)
        if not background:
            self.finish()

    def finish(self, *, block: bool = True) -> None:
        """See to the save in flight, if there is one: complete it if it is written, or (block) when it is."""
        if self._saving is None:
            return
        step, save = self._saving
        if not save.finish(block=block):
            return
        self._saving = None
        if self._trainer.layout.rank == 0:
            self._durable(step)
            delete_old(self._run_dir, self._settings.keep_checkpoints)


def load(trainer: PolicyTrainer, directory: Path) -> dict[str, Any]:
    """Set the trainer to where `directory` was saved and return what the caller had saved with it.

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
    _check_integrity(trainer.layout, directory)
    try:
        loaded = dist_checkpointing.load(_sharded_state(trainer, loading=True), str(directory))
    except (OSError, ValueError, KeyError, dist_checkpointing.core.CheckpointingException) as error:
        raise _broken(directory, str(error)) from None
    for i, chunk in enumerate(trainer.chunks):
        chunk.load_state_dict(loaded[f"model{i}"])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    trainer.lr_step = saved["trainer"]["lr_step"]
    trainer.generator.bit_generator.state = saved["trainer"]["generator"]
    loaded_state: dict[str, Any] = saved["state"]
    return loaded_state


def _read_state(directory: Path) -> dict[str, Any]:
    try:
        saved = json.loads((directory / STATE_FILE).read_text())
        if saved.keys() == {"trainer", "state"}:
            return saved
        problem = f"it holds {sorted(saved)}"
    except (OSError, ValueError, AttributeError) as error:
        problem = str(error)
    raise _broken(directory, f"{STATE_FILE}: {problem}")


def _check_integrity(layout: Layout, directory: Path) -> None:
    """Each rank hashes a share of the files, the large ones dealt out first.  Raises UserError, on every rank, naming what is
    missing or altered."""
    wrong = []
    try:
        expected = json.loads((directory / _INTEGRITY_FILE).read_text())["files"]
        dealt = sorted(expected, key=lambda name: (-(directory / name).stat().st_size, name))
        for name in dealt[layout.rank :: layout.world_size]:
            if _hash(directory / name) != expected[name]:
                wrong.append(f"{name} was altered: its SHA-256 is not that of {_INTEGRITY_FILE}")
    except OSError as error:
        wrong.append(str(error))
    except (ValueError, KeyError, TypeError) as error:
        wrong.append(f"{_INTEGRITY_FILE} is malformed: {error!r}")
    if problems := [problem for part in layout.gather(wrong) for problem in part]:
        raise _broken(directory, "; ".join(dict.fromkeys(problems)))


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
    model = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(trainer.chunks)}
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return {**model, "optimizer": optimizer}


def _write_shards(writer: Any, buckets: list[Any]) -> list[Any]:
    """Write each bucket's file, down to the disk -> where in it everything lies."""
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    found: list[Any] = []
    for bucket in buckets:
        _, outcome = writer.write_preloaded_data(transforms, 0, bucket, None, None, use_fsync=True)
        if isinstance(outcome, Exception):
            raise outcome
        found += outcome
    return found


def _in_thread(work: Callable[[], _Part]) -> Future[_Part]:
    """Run in a thread that never keeps the process from ending."""
    future: Future[_Part] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


class _Agreed:
    """What one rank does on behalf of all: an error in it raises SaveFailed on every rank, and none waits for it."""

    def __init__(self, layout: Layout, directory: Path) -> None:
        self._layout, self._directory = layout, directory

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None or isinstance(error, Exception):
            _agree(self._layout, self._directory, error)


def _agree(layout: Layout, directory: Path, problem: BaseException | None) -> None:
    """Raises SaveFailed on every rank if any rank has a problem."""
    told = layout.gather(None if problem is None else f"{type(problem).__name__}: {problem}")
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if not problems:
        return
    if layout.rank == 0:
        shutil.rmtree(partial_path(directory), ignore_errors=True)
    raise SaveFailed(
        f"checkpoint {directory} could not be written ({'; '.join(problems[:3])}): the one before it is untouched; make room "
        "or mend the disk, and go on with --resume"
    ) from problem


def _sync_and_hash(file: Path) -> str:
    _sync(file)
    return _hash(file)


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
