"""Checkpoints: what is loaded is what was held when the save began; whole or not at all; readable by other layouts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from exported import exported, load_weights
from megatron.core import dist_checkpointing
from on_ranks import free_port, on_ranks
from ranks import Recorded, run_config

from megatron_webrl.errors import UserError
from megatron_webrl.run_directory import checkpoint_path, checkpoints, newest_checkpoint, partial_path
from megatron_webrl.trainer import PolicyTrainer, checkpoint
from megatron_webrl.trainer.checkpoint import Checkpoints, SaveFailed

Make = Callable[..., PolicyTrainer]
GROUPS = [10, 11, 12]
ALONE = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1"}


def step(trainer: PolicyTrainer, recorded: Recorded) -> dict[str, float]:
    """Metrics of one train step, times apart."""
    report = trainer.train_step(GROUPS, recorded.fetch_groups, recorded.fetch_images, version=3)
    return {name: value for name, value in report.metrics.items() if not name.startswith("time/")}


class HeldWriter:
    """A fake disk: holds every writer at its first byte until released."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self._write_shards = checkpoint._write_shards

    def __call__(self, writer: Any, buckets: list[Any]) -> list[Any]:
        assert self.may_write.wait(60)
        return self._write_shards(writer, buckets)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWriter]:
    writer = HeldWriter()
    monkeypatch.setattr(checkpoint, "_write_shards", writer)
    yield writer
    writer.may_write.set()


@pytest.mark.parametrize("layout", [{}, {"distributed_optimizer": True}], ids=["plain", "distributed_optimizer"])
def test_resumed_equals_unbroken(
    layout: dict[str, Any], deep_model_dir: Path, make: Make, tmp_path: Path, held: HeldWriter
) -> None:
    """Begin a save after a step and train on before a byte is written: another trainer that loads it takes the next step
    with the same metrics, to the same weights, and gives back the counts."""
    settings = {
        "parallel": layout,
        "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
    }
    trainer = make(deep_model_dir, trainer=settings)
    recorded = Recorded(trainer.processor, groups=3)
    step(trainer, recorded)
    save = checkpoint.begin(trainer, tmp_path / "checkpoint", {"step": 1, "version": 5})
    unbroken, weights = step(trainer, recorded), exported(trainer)
    assert not save.finish(block=False)
    assert not (tmp_path / "checkpoint").exists()
    held.may_write.set()
    assert save.finish()

    trainer = make(deep_model_dir, trainer=settings)
    assert trainer.load(tmp_path / "checkpoint") == {"step": 1, "version": 5}
    assert step(trainer, recorded) == unbroken
    assert all(torch.equal(weights[name], tensor) for name, tensor in exported(trainer).items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]
    trainer.save(tmp_path / "checkpoint", {"step": 2})
    assert trainer.load(tmp_path / "checkpoint") == {"step": 2}
    beside = {p.name for p in deep_model_dir.iterdir()} - {"model.safetensors"}
    assert {p.name for p in (tmp_path / "checkpoint" / "hf").iterdir()} == beside >= {"config.json", "tokenizer.json"}


def test_what_megatron_gathered_for_the_save_is_not_copied_again(
    deep_model_dir: Path, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the distributed optimizer the moments are fresh tensors when they come to be written; the weights are not."""
    trainer = make(deep_model_dir, trainer={"parallel": {"distributed_optimizer": True}})
    take, same = checkpoint._Plan.take, {}

    def tensors(buckets: list[Any]) -> dict[str, torch.Tensor]:
        return {item.index.fqn: tensor for _, _, (_, held) in buckets for item, tensor in held}

    def spy(plan: Any, training: set[int]) -> list[Any]:
        before = tensors(plan.writer.write_buckets)
        taken = take(plan, training)
        same.update({name: before[name] is tensor for name, tensor in tensors(taken).items()})
        return taken

    monkeypatch.setattr(checkpoint._Plan, "take", spy)
    checkpoint.begin(trainer, tmp_path / "checkpoint", {}).finish()
    moments = [name for name in same if ".exp_avg" in name]
    assert moments and all(same[name] for name in moments)


def test_one_save_at_a_time_and_the_last_ones_are_kept(
    deep_model_dir: Path, make: Make, tmp_path: Path, held: HeldWriter
) -> None:
    """A save waits for the one before; an older checkpoint goes only when a newer one is durable and said to be."""
    trainer = make(deep_model_dir, trainer={"keep_checkpoints": 1})
    told: list[tuple[int, list[str]]] = []
    saves = Checkpoints(trainer, tmp_path, lambda done: told.append((done, [p.name for p in checkpoints(tmp_path)])))
    saves.finish()
    saves.save(1, {})
    saves.finish(block=False)
    assert told == []
    threading.Timer(0.3, held.may_write.set).start()
    saves.save(2, {})
    assert told == [(1, ["step-000001"])]
    saves.finish()
    assert told[1:] == [(2, ["step-000001", "step-000002"])]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]

    trainer.config.trainer.async_checkpoints = False
    saves.save(1_000_000, {})
    assert newest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 1_000_000)
    assert [done for done, _ in told] == [1, 2, 1_000_000]


def fails_to_write(rank: int, ranks: int, model: Path, port: int, run_dir: Path) -> list[str]:
    """Three saves with fake disks: full on rank 1, full when rank 0 writes the index, and never done on rank 1.  Then each
    shard of the save before them altered: whoever hashes it, all ranks refuse it."""
    config = run_config(model, trainer={"parallel": {"dp": 2, "distributed_optimizer": True}})
    trainer = PolicyTrainer(config, rank=rank, world_size=ranks, **place(port), total_steps=10)
    checkpoint.save(trainer, checkpoint_path(run_dir, 1), {"step": 1})
    write_shards, complete = checkpoint._write_shards, checkpoint.Save._complete
    release = threading.Event()

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def never(*args: Any) -> Any:
        release.wait(60)
        return write_shards(*args)

    found = []
    for shards, index in [(full if rank == 1 else write_shards, complete), (write_shards, full), (never, complete)]:
        checkpoint._write_shards, checkpoint.Save._complete = shards, index  # type: ignore[method-assign]
        try:
            save = checkpoint.begin(trainer, checkpoint_path(run_dir, 2), {"step": 2})
            if shards is never:
                save._layout.timeout /= 60
            save.finish()
        except SaveFailed as error:
            found.append(str(error))
    release.set()
    trainer.layout.barrier()
    saved = checkpoint_path(run_dir, 1)
    found.append(str(trainer.load(saved)))
    for shard in sorted(saved.glob("*.distcp")):
        whole = shard.read_bytes()
        trainer.layout.barrier()
        if rank == 0:
            shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        trainer.layout.barrier()
        with pytest.raises(UserError, match=rf"{shard.name} was altered.*move it away"):
            trainer.load(saved)
        trainer.layout.barrier()
        if rank == 0:
            shard.write_bytes(whole)
    trainer.close()
    return found


def place(port: int) -> dict[str, Any]:
    return {"master_address": "127.0.0.1", "master_port": port}


def test_what_one_rank_cannot_write_fails_on_all(deep_model_dir: Path, tmp_path: Path) -> None:
    """Every rank raises, naming directory, rank and cause; nothing half-written is left, and the one before is whole."""
    results = on_ranks(fails_to_write, 2, deep_model_dir, free_port(), tmp_path, preload="megatron_webrl.trainer")
    assert results[0] == results[1]
    full, index, never, before = results[0]
    for text in (full, index, never):
        assert str(checkpoint_path(tmp_path, 2)) in text and "--resume" in text
    assert "rank 1: OSError" in full and "No space left" in full and "rank 0" not in full
    assert "rank 0: OSError" in index and "No space left" in index
    assert "rank 0: TimeoutError" in never and "trainer.collective_timeout_s" in never
    assert before == "{'step': 1}"
    assert os.listdir(tmp_path / "checkpoints") == ["step-000001"]


def is_killed(when: str, model: Path, port: int, run_dir: Path, ready: Any) -> None:
    """A trainer whose second save stands still: a fake disk that stops half-way in a shard, or before the last rename."""
    trainer = PolicyTrainer(run_config(model), **ALONE, master_port=port, total_steps=10)
    saves = Checkpoints(trainer, run_dir, lambda done: None)
    saves.save(1, {"step": 1})
    saves.finish()

    def stops(*args: Any) -> Any:
        if when == "shard":
            path, _, _ = args[1][0]
            Path(path).write_bytes(bytes(1000))
        ready.set()
        time.sleep(120)

    if when == "shard":
        checkpoint._write_shards = stops
    else:
        checkpoint.replace_directory = stops
    saves.save(2, {"step": 2})
    saves.finish()


@pytest.mark.parametrize("when", ["shard", "rename"])
def test_a_killed_save_is_never_taken_for_whole(when: str, deep_model_dir: Path, make: Make, tmp_path: Path) -> None:
    """kill -9 in mid-save: the checkpoint before it loads; the next save removes what is left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_webrl.trainer"])
    ready = context.Event()
    process = context.Process(target=is_killed, args=(when, deep_model_dir, free_port(), tmp_path, ready), daemon=True)
    process.start()
    try:
        assert ready.wait(120)
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
    left = partial_path(checkpoint_path(tmp_path, 2))
    assert left.is_dir()
    newest = newest_checkpoint(tmp_path)
    assert newest == checkpoint_path(tmp_path, 1)
    trainer = make(deep_model_dir)
    assert trainer.load(newest) == {"step": 1}
    trainer.save(checkpoint_path(tmp_path, 3), {"step": 3})
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-000001", "step-000003"]


LAYOUTS: list[tuple[str, list[int], dict[str, int]]] = [
    ("pp2", [0, 1], {"pp": 2}),
    ("tp1", [2], {}),
    ("tp2-dp2", [0, 1, 2, 3], {"tp": 2, "dp": 2}),
]
"""Name, ranks that make it up, sizes."""


def goes_on_elsewhere(rank: int, ranks: int, model: Path, ports: list[int], out: Path) -> dict[str, dict[str, float]]:
    """Step and save at TP2 × PP2; then load, save again and step there and in each layout -> metrics of that step."""
    distributed = {"distributed_optimizer": True}

    def build(layout: dict[str, int], own_rank: int, port: int) -> PolicyTrainer:
        config = run_config(model, trainer={"parallel": {**layout, **distributed}})
        size = config.trainer.parallel.world_size
        return PolicyTrainer(config, rank=own_rank, world_size=size, **place(port), total_steps=10)

    trainer = build({"tp": 2, "pp": 2}, rank, ports[0])
    recorded = Recorded(trainer.processor, groups=3, size=2)
    step(trainer, recorded)
    trainer.save(out / "saved", {"step": 1})
    metrics = {"unbroken": step(trainer, recorded)}
    trainer.save_hf(out / "unbroken-hf")
    trainer.close()
    for (name, members, layout), port in zip(LAYOUTS, ports[1:], strict=True):
        if rank not in members:
            continue
        trainer = build(layout, members.index(rank), port)
        trainer.load(out / "saved")
        trainer.save(out / name, {"step": 1})
        metrics[name] = step(trainer, recorded)
        trainer.save_hf(out / f"{name}-hf")
        trainer.close()
    return metrics


def tensors_of(saved: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    found = dist_checkpointing.load_plain_tensors(str(saved))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.e2e
def test_other_layouts_go_on(deep_model_dir: Path, make: Make, tmp_path: Path) -> None:
    """Saved at TP2 × PP2: every layout holds each tensor of it bit by bit, the moments among them (it saves the same
    again), and its next step has the metrics and gives the weights of the unbroken one."""

    ports = [free_port() for _ in range(len(LAYOUTS) + 1)]
    results = on_ranks(goes_on_elsewhere, 4, deep_model_dir, ports, tmp_path, preload="megatron_webrl.trainer")
    unbroken, weights = results[0]["unbroken"], load_weights(tmp_path / "unbroken-hf")
    make(deep_model_dir)  # reading a checkpoint needs a process group
    saved = tensors_of(tmp_path / "saved")
    moments = [name for name in saved if ".exp_avg" in name]
    assert {name.split(".", 3)[3] for name in moments} == {n for n in saved if not n.startswith("optimizer.")}
    assert all(saved[name].any() for name in moments)
    for name, members, _ in LAYOUTS:
        again = tensors_of(tmp_path / name)
        assert again.keys() == saved.keys()
        assert all(torch.equal(again[key], tensor) for key, tensor in saved.items()), name
        for rank in members:
            for key, value in unbroken.items():
                assert results[rank][name][key] == pytest.approx(value, rel=1e-4, abs=2e-6), (name, key)
        for key, tensor in load_weights(tmp_path / f"{name}-hf").items():
            torch.testing.assert_close(tensor, weights[key], rtol=0, atol=2e-4, msg=lambda text, k=key: f"{k}: {text}")


def test_broken_checkpoints_are_named(deep_model_dir: Path, make: Make, tmp_path: Path) -> None:
    """Missing, cut short, one bit changed, state altered: a UserError that names the file, and nothing is loaded."""
    trainer = make(deep_model_dir)
    whole = tmp_path / "whole"
    trainer.save(whole, {"step": 1})
    files = {str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file()}
    assert json.loads((whole / "integrity.json").read_text())["files"].keys() == files - {"integrity.json"}
    before = exported(trainer)
    with pytest.raises(UserError, match="nowhere"):
        trainer.load(tmp_path / "nowhere")
    shard = next(whole.glob("*.distcp")).name

    def damage(name: str, change: Callable[[bytes], bytes | None]) -> Path:
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(whole, broken)
        data = change((broken / name).read_bytes())
        (broken / name).unlink() if data is None else (broken / name).write_bytes(data)
        return broken

    def flip(data: bytes) -> bytes:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    for name, change in [
        (shard, lambda data: data[: len(data) // 2]),
        (shard, flip),
        (shard, lambda data: None),
        (".metadata", flip),
        ("state.json", lambda data: data.replace(b'"step": 1', b'"step": 2')),
        ("state.json", lambda data: b"{"),
        ("state.json", lambda data: None),
    ]:
        with pytest.raises(UserError, match=r"broken.*" + name.replace(".", r"\.")):
            trainer.load(damage(name, change))
    for name in ("metadata.json", "integrity.json"):
        with pytest.raises(UserError, match="broken"):
            trainer.load(damage(name, lambda data: None))
    assert all(torch.equal(before[name], tensor) for name, tensor in exported(trainer).items())
