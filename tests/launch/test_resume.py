"""What a run goes on from, and that the account of an earlier start stays whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.errors import UserError
from megatron_webrl.launch import Display, alone, run
from megatron_webrl.launch.resume import Resume, check_run_dir, earlier_start
from megatron_webrl.launch.run import identify
from megatron_webrl.run_directory import _lock_file, checkpoint_path, partial_path, remove_partial, replaced_path


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    data = {"model": {"path": "m"}, "tasks": {"names": ["click-test"]}, "run_dir": str(tmp_path / "run")}
    return validate(data, "test")


def save(config: RunConfig, *steps: int) -> list[Path]:
    folders = [checkpoint_path(Path(config.run_dir), step) for step in steps]
    for folder in folders:
        folder.mkdir(parents=True)
    return folders


def test_the_newest_whole_checkpoint_is_taken(config: RunConfig) -> None:
    """By step, not by name; never one that is half-written or half-deleted, nor what the user renamed."""
    assert check_run_dir(config, None) is None
    assert check_run_dir(config, "auto") is None
    with pytest.raises(UserError, match=r"--resume: run_dir=.* holds no checkpoint.*--resume auto"):
        check_run_dir(config, "newest")
    half = partial_path(checkpoint_path(Path(config.run_dir), 30))
    half.mkdir(parents=True)
    save(config, 4)[0].rename(half.with_name("step-000004-old"))
    assert check_run_dir(config, "auto") is None
    _, million = save(config, 999_999, 1_000_000)
    for resume in ("newest", "auto", million):
        assert check_run_dir(config, resume) == million


def test_a_chosen_checkpoint_is_the_newest_of_this_run(config: RunConfig, tmp_path: Path) -> None:
    """Of another run, or older than others: refused, and the message says what to do; then it works."""
    twenty, forty = save(config, 20, 40)
    other = tmp_path / "elsewhere" / "step-000020"
    other.mkdir(parents=True)
    with pytest.raises(UserError, match=r"elsewhere.*no checkpoint of run_dir=.*step-000020, step-000040"):
        check_run_dir(config, other)
    with pytest.raises(UserError, match=r"older than step-000040.*move the later ones"):
        check_run_dir(config, twenty)
    forty.rename(tmp_path / "forty")
    assert check_run_dir(config, twenty.parent / "." / twenty.name) == twenty


KINDS = {"eval": "an evaluation", "rollout_only": "the batches of a rollout_only run"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resume", [None, "newest", "auto"])
def test_nothing_is_trained_over_a_run_without_training(config: RunConfig, kind: str, resume: Resume) -> None:
    """Whatever is asked for, by the same words; --resume would roll its batches back.  Nor is it evaluated over one of
    another kind."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir()
    identify(run_dir, kind, again=False)
    (run_dir / "ledger.sqlite").touch()
    with pytest.raises(UserError, match=f"run_dir=.* holds {KINDS[kind]}: .* run_dir"):
        check_run_dir(config, resume)
    if kind != "eval":
        with pytest.raises(UserError, match="holds a rollout_only run"):
            identify(run_dir, "eval", again=False)


def test_a_run_that_cannot_be_resumed_is_not_told_to_be(config: RunConfig) -> None:
    """What the refusal says of a run that saved nothing is what another start accepts."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir()
    (run_dir / "ledger.sqlite").touch()
    with pytest.raises(UserError, match="begin it again with --resume auto"):
        check_run_dir(config, None)
    assert check_run_dir(config, "auto") is None
    identify(run_dir, "rollout_only", again=False)
    rollouts = config.model_copy(update={"rollout_only": True})
    with pytest.raises(UserError, match="move it away, or give another run_dir") as refusal:
        check_run_dir(rollouts, None)
    assert "--resume" not in str(refusal.value)
    with pytest.raises(UserError, match="rollout_only=true saves no checkpoint"):
        check_run_dir(rollouts, "auto")


@pytest.mark.parametrize("content", ["", '{"run_id": "x", "sta', "[]", '{"run_id": "x", "starts": "1"}'])
def test_a_run_json_that_says_nothing_is_named(config: RunConfig, content: str) -> None:
    run_dir = Path(config.run_dir)
    run_dir.mkdir()
    (run_dir / "run.json").write_text(content)
    for resume in (None, "auto"):
        with pytest.raises(UserError, match=r"run\.json does not say .*remove it"):
            check_run_dir(config, resume)


def test_a_kill_leaves_the_run_json_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = identify(tmp_path, "train", again=False)
    monkeypatch.setattr("megatron_webrl.run_directory.os.replace", lambda *paths: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        identify(tmp_path, "train", again=True)
    assert earlier_start(tmp_path) == first


def test_a_checkpoint_whose_successor_never_came_is_put_back(config: RunConfig) -> None:
    """Killed between the two renames; where the successor is there, the old one goes."""
    four, eight = save(config, 4, 8)
    (four / "state.json").touch()
    four.rename(replaced_path(four))
    replaced_path(eight).mkdir()
    partial_path(four).mkdir()
    remove_partial(four.parent)
    assert sorted(path.name for path in four.parent.iterdir()) == [four.name, eight.name]
    assert (four / "state.json").exists()


def test_the_checkpoint_is_chosen_while_nobody_else_can_write_one(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends meanwhile may have saved another: the run directory's lock is held."""
    run_dir = Path(config.run_dir)
    half = partial_path(checkpoint_path(run_dir, 1))

    def choose(*_: object) -> None:
        with ThreadPoolExecutor() as pool, pytest.raises(UserError, match="used by a run"):
            pool.submit(_lock_file, run_dir).result()
        assert not half.exists(), "and what an earlier one left was seen to"
        raise Chosen

    class Chosen(Exception):
        pass

    for module in (run, alone):
        monkeypatch.setattr(module, "check_run_dir", choose)
    monkeypatch.setattr(run, "check", lambda *_, **__: None)
    monkeypatch.setattr(alone, "check_recorded", lambda *_: ([], []))
    display = Display("test")
    for start in (run.train, run.collect, alone.train_recorded):
        half.mkdir(parents=True)
        with pytest.raises(Chosen):
            start(config, display, resume="newest")
