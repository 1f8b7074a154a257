"""Training on recorded batches is the training that was recorded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics_page import names_in, names_of
from on_ranks import free_port, on_ranks
from ranks import Recorded, run_config
from safetensors.torch import load_file

from megatron_webrl.config import RunConfig
from megatron_webrl.observe import JsonlSink, read_jsonl
from megatron_webrl.processor import Processor
from megatron_webrl.replay import BatchWriter, batch_row, read_batches
from megatron_webrl.run_directory import checkpoints, newest_checkpoint
from megatron_webrl.trainer import PolicyTrainer, checkpoint
from megatron_webrl.trainer import recorded as training
from megatron_webrl.trainer.recorded import run_recorded

VERSIONS = (3, 4, 4)
"""Policy version of each batch; its tokens are of version 3."""
ALONE = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1"}


def record(model: Path, directory: Path) -> list[Recorded]:
    """Three batches of two groups each, as a coordinator records them, of steps 1 to 3."""
    processor = Processor.load(model)
    batches = [Recorded(processor, groups=2, size=2, seed=seed) for seed in range(len(VERSIONS))]
    for step, (batch, version) in enumerate(zip(batches, VERSIONS, strict=True), 1):
        writer = BatchWriter(directory, step)
        writer.add_images(batch.images)
        writer.finish(version, list(batch.groups.values()))
    return batches


def configure(model: Path, batches: Path, run_dir: Path, **trainer: Any) -> RunConfig:
    settings = {"steps": 3, "checkpoint_every": 2, **trainer}
    return run_config(model, train_only=str(batches), run_dir=str(run_dir), trainer=settings)


def train_again(config: RunConfig, resume: Path | None = None) -> list[dict[str, float]]:
    """Rows of metrics.jsonl after `run_recorded`."""
    file = Path(config.run_dir) / "metrics.jsonl"
    run_recorded(config, **ALONE, master_port=free_port(), resume=resume, sinks=[JsonlSink(file)])
    return read_jsonl(file) if file.exists() else []


def timeless(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith(("time", "run/")) and name != "step"}


@pytest.fixture(scope="module")
def recorded(deep_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Recorded]]:
    directory = tmp_path_factory.mktemp("recorded") / "batches"
    return directory, record(deep_model_dir, directory)


@pytest.fixture(scope="module")
def unbroken(
    recorded: tuple[Path, list[Recorded]], deep_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, float]]]:
    """A whole run on the batches: its directory and its rows."""
    run_dir = tmp_path_factory.mktemp("recorded") / "unbroken"
    return run_dir, train_again(configure(deep_model_dir, recorded[0], run_dir))


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_file(run_dir / "model_final" / "model.safetensors") for run_dir in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_metrics_and_weights_are_those_of_training_on_the_groups_directly(
    recorded: tuple[Path, list[Recorded]], unbroken: tuple[Path, list[dict[str, float]]], deep_model_dir: Path
) -> None:
    """Bit by bit, step for step; the version is the recorded one, so lag is, too."""
    run_dir, rows = unbroken
    trainer = PolicyTrainer(
        configure(deep_model_dir, recorded[0], run_dir), **ALONE, master_port=free_port(), total_steps=3
    )
    try:
        direct = [
            trainer.train_step(list(batch.groups), batch.fetch_groups, batch.fetch_images, version=version).metrics
            for batch, version in zip(recorded[1], VERSIONS, strict=True)
        ]
        trainer.save_hf(run_dir.parent / "direct" / "model_final")
    finally:
        trainer.close()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["run/version"] for row in rows] == list(VERSIONS)
    assert [row["rollout/lag_max"] for row in rows] == [0, 1, 1]
    assert [timeless(row) for row in rows] == [timeless(step) for step in direct]
    assert all(row["ppo_actor/grad_norm"] > 0 for row in rows)
    assert same_weights(run_dir, run_dir.parent / "direct")
    assert [c.name for c in checkpoints(run_dir)] == ["step-000002", "step-000003"]


def test_a_resumed_run_goes_on_with_the_batches_after_its_checkpoint(
    recorded: tuple[Path, list[Recorded]],
    unbroken: tuple[Path, list[dict[str, float]]],
    deep_model_dir: Path,
    tmp_path: Path,
) -> None:
    """trainer.steps ends it earlier; then --resume: the rows and weights of the unbroken run.  Resumed once more, with all
    batches used up, it changes nothing."""
    rows = train_again(configure(deep_model_dir, recorded[0], tmp_path, steps=2))
    assert [row["step"] for row in rows] == [1, 2]
    for _ in range(2):
        rows = train_again(configure(deep_model_dir, recorded[0], tmp_path), resume=newest_checkpoint(tmp_path))
        assert [timeless(row) for row in rows] == [timeless(row) for row in unbroken[1]]
        assert same_weights(tmp_path, unbroken[0])


def test_minutes_end_it_too(recorded: tuple[Path, list[Recorded]], deep_model_dir: Path, tmp_path: Path) -> None:
    """Here before the first step: the model is the one that it began with."""
    assert train_again(configure(deep_model_dir, recorded[0], tmp_path, max_minutes=1e-9)) == []
    final, first = (load_file(d / "model.safetensors") for d in (tmp_path / "model_final", deep_model_dir))
    assert all(torch.equal(final[name], first[name]) for name in final)


def test_a_checkpoint_that_is_written_is_whole_before_the_next_save(
    recorded: tuple[Path, list[Recorded]], deep_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun after step 2, it is there when step 3 begins (its writer is done at once here)."""

    def at_once(work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work())
        return future

    found: list[list[str]] = []
    train = training._train

    def spy(*args: Any) -> dict[str, float]:
        found.append([c.name for c in checkpoints(tmp_path)])
        return train(*args)

    monkeypatch.setattr(checkpoint, "_in_thread", at_once)
    monkeypatch.setattr(training, "_train", spy)
    train_again(configure(deep_model_dir, recorded[0], tmp_path))
    assert found == [[], [], ["step-000002"]]


def on_rank(rank: int, ranks: int, config: RunConfig, port: int) -> None:
    place = {"rank": rank, "world_size": ranks, "master_address": "127.0.0.1", "master_port": port}
    run_recorded(config, **place, resume=None, sinks=[JsonlSink(Path(config.run_dir) / "metrics.jsonl")])


def test_shards_read_their_own_groups(
    recorded: tuple[Path, list[Recorded]],
    unbroken: tuple[Path, list[dict[str, float]]],
    deep_model_dir: Path,
    tmp_path: Path,
) -> None:
    """Two data-parallel ranks give the metrics of one, and one row a step."""
    config = configure(deep_model_dir, recorded[0], tmp_path, parallel={"dp": 2})
    on_ranks(on_rank, 2, config, free_port(), preload="megatron_webrl.trainer")
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    for row, expected in zip(rows, unbroken[1], strict=True):
        assert timeless(row) == pytest.approx(timeless(expected), rel=1e-4, abs=2e-6)


def test_every_metric_is_on_its_page_and_no_other(unbroken: tuple[Path, list[dict[str, float]]]) -> None:
    """docs/metrics.md names what the rows of a train step hold."""
    expected = names_of("Train step") | {"time/step_s", "run/version", "run/minutes"}
    for row in unbroken[1]:
        assert names_in(row) == expected


def test_the_coordinator_and_the_trainer_mean_the_same_by_a_name(
    recorded: tuple[Path, list[Recorded]], unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    """What rollout_only says of a batch from envelopes alone is what a train step says of it."""
    own = {"rollout/batch_success", "rollout/batch_mixed_share"}
    for batch, row in zip(read_batches(recorded[0]), unbroken[1], strict=True):
        found = batch_row(batch.groups(batch.group_ids))
        assert {name: row[name] for name in found.keys() - own} == pytest.approx(
            {name: value for name, value in found.items() if name not in own}
        )
