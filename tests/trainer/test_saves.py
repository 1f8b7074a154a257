"""The loop's saves, against a fake coordinator: when, what, and whom it tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from on_ranks import free_port
from ranks import Recorded, run_config

from megatron_webrl.observe import Tracer
from megatron_webrl.run_directory import checkpoint_path, checkpoints, newest_checkpoint
from megatron_webrl.trainer import PolicyTrainer, loop
from megatron_webrl.wire.messages import (
    CheckpointDurable,
    ClaimVersion,
    Done,
    FetchGroups,
    Groups,
    Manifest,
    StepTrained,
    Take,
    TrainerStarted,
    TrainingFinished,
    Version,
)


class FakeCoordinator:
    """Coordinator and store in one, in this process: gives the same batch `steps` times, then says finish, then stop.
    crowded: asks for a checkpoint before that step, once."""

    def __init__(self, steps: int, crowded: int | None) -> None:
        self.steps, self.crowded = steps, crowded
        self.recorded: Recorded | None = None
        self.said: list[Any] = []
        self.versions = 0

    def request(self, message: Any, *, timeout: float, expect: Any, retry_s: float = 0.0) -> Any:
        assert self.recorded is not None
        match message:
            case Take():
                if any(isinstance(said, TrainingFinished) for said in self.said):
                    return Manifest(message.step, False, stop=True)
                if message.step >= self.steps:
                    return Manifest(message.step, False, finished=True)
                if message.step == self.crowded:
                    self.crowded = None
                    return Manifest(message.step, False, save=True)
                return Manifest(message.step, True, group_ids=[10, 11], costs=[1, 1])
            case FetchGroups():
                return Groups(self.recorded.fetch_groups(message.group_ids))
            case TrainerStarted() | ClaimVersion():
                self.versions += 1
                return Version(self.versions)
        self.said.append(message)
        return Done()

    def close(self) -> None: ...


class FakeNoEngines:
    """Publishes to nobody."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def publish(self, version: int) -> None: ...
    def wait(self) -> None: ...
    def reserve(self) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...

    exported = None


@pytest.fixture
def run(deep_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def until(
        steps: int, *, resume: Path | None = None, background: bool = True, crowded: int | None = None
    ) -> list[Any]:
        config = run_config(
            deep_model_dir,
            run_dir=str(tmp_path),
            replay={"groups_per_step": 2},
            trainer={"steps": 9, "checkpoint_every": 2, "keep_checkpoints": 2, "async_checkpoints": background},
        )
        fake = FakeCoordinator(steps, crowded)
        monkeypatch.setattr(loop, "BlockingClient", lambda *args, **kwargs: fake)
        monkeypatch.setattr(loop, "fetch_images", lambda store, digests: (fake.recorded.fetch_images(digests), []))
        monkeypatch.setattr(loop, "Publishing", FakeNoEngines)
        monkeypatch.setattr(loop, "RETRY_S", 0.0)
        monkeypatch.setattr(loop.TrainerLoop, "_prefetch", lambda *args: None)
        monkeypatch.setattr(loop.Agreement, "check", lambda *args: False)  # the recorded ones are random
        trainer = loop.TrainerLoop(
            config,
            run_id="x",
            rank=0,
            world_size=1,
            master_address="127.0.0.1",
            master_port=free_port(),
            coordinator_address="",
            store_address="",
            keys=None,
            resume=resume,
            tracer=Tracer(None, "trainer-0"),
        )
        fake.recorded = Recorded(trainer._processor, groups=2, size=2, steps=1, version=0)
        trainer.run()
        return [said for said in fake.said if not isinstance(said, StepTrained)]

    return until


@pytest.mark.parametrize("background", [True, False])
def test_it_saves_every_so_often_and_at_the_end(
    background: bool, run: Any, deep_model_dir: Path, tmp_path: Path
) -> None:
    """Each checkpoint is told once it is durable and holds its step and version; the last two are kept, and the end is told
    after the last is durable.  Resumed with nothing left to do, it writes none again."""
    said = run(5, background=background)
    assert said == [*(CheckpointDurable(step) for step in (2, 4, 5)), TrainingFinished(5, 6)]
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000004", "step-000005"]
    place = {"rank": 0, "world_size": 1, "master_address": "127.0.0.1", "master_port": free_port()}
    trainer = PolicyTrainer(run_config(deep_model_dir), **place, total_steps=9)
    for step in (4, 5):
        loaded = trainer.load(checkpoint_path(tmp_path, step))
        assert loaded == {"step": step, "version": step + 1}
    trainer.close()
    written = newest_checkpoint(tmp_path)
    assert written is not None
    before = (written / "state.json").stat().st_mtime_ns
    assert run(5, resume=written, background=background) == [TrainingFinished(5, 1)]
    assert (written / "state.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(("crowded", "more"), [(3, [CheckpointDurable(3)]), (2, [])])
def test_a_full_store_gets_its_checkpoint_if_that_is_not_there_already(
    crowded: int, more: list[CheckpointDurable], run: Any
) -> None:
    said = run(4, crowded=crowded)
    assert said == [CheckpointDurable(2), *more, CheckpointDurable(4), TrainingFinished(4, 5)]
