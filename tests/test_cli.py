"""The command line: wrong input is one line, exit code 2, and nothing is started."""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml

from megatron_webrl.cli import main
from megatron_webrl.replay import BatchWriter
from megatron_webrl.run_directory import locked
from megatron_webrl.trajectory import Group, Task

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path: Path, tiny_model_dir: Path) -> Path:
    file = tmp_path / "config.yaml"
    demo = yaml.safe_load((REPOSITORY / "examples" / "demo.yaml").read_text())
    demo["model"] = {"path": str(tiny_model_dir)}
    demo["run_dir"] = str(tmp_path / "run")
    file.write_text(yaml.safe_dump(demo))
    return file


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`command` runs in this process, which keeps its signal handlers."""
    monkeypatch.chdir(REPOSITORY)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line, in this process: starting Python anew takes two seconds each time."""
    words = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(words)
    code = ended.value.code
    return subprocess.CompletedProcess(words, code if isinstance(code, int) else 1, out.getvalue(), err.getvalue())


def command_apart(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    line = [sys.executable, "-W", "ignore", "-m", "megatron_webrl", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def train(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command("train", config, *arguments)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and lines[0].startswith("megatron-webrl: "), lines
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("replay.etta=1", ("replay.etta", "did you mean replay.eta?")),
        ("model.path=/nowhere", ("model.path=/nowhere", "does not exist")),
        ("browser.executable=/nowhere/chromium", ("browser.executable", "/nowhere/chromium")),
        ("trainer.parallel.tp=3", ("trainer.parallel.tp=3", "4 attention heads", "[1, 2]")),
        ("tasks.names=[]", ("tasks.names=[]", "name the tasks")),
        ("tasks.names=[click-tset]", ("click-tset", "click-test")),
        ("sampling.stop=[no token]", ("sampling.stop", "'no token'", "one token")),
        ("sampling.stop=['\"']", ("sampling.stop", "part of every tool call")),
        ("device=cuda", ("device=cuda", "GPU")),
        ("train_only=/nowhere", ("train_only=/nowhere", "no recorded batch", "observe.record_batches=true")),
    ],
)
def test_wrong_input_is_one_line_that_names_key_value_and_remedy(
    config: Path, override: str, words: tuple[str, ...]
) -> None:
    refused(train(config, override), *words)
    assert not (config.parent / "run").exists(), "nothing was begun"


def test_a_taken_port_is_refused(config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(train(config, f"engine.port={port}"), "engine.port", str(port))


def test_resume_needs_a_checkpoint_and_a_fresh_run_an_empty_directory(config: Path) -> None:
    refused(train(config, "--resume"), "--resume", "no checkpoint")
    (config.parent / "run").mkdir(exist_ok=True)
    (config.parent / "run" / "ledger.sqlite").touch()
    refused(train(config), "run_dir", "saved no checkpoint", "remove it")
    (config.parent / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    refused(train(config), "run_dir", "--resume")
    refused(train(config, "--dry-run"), "run_dir", "--resume")
    for words in (["--resume", "replay.eta=0"], ["--resume", "auto", "replay.eta=0"], ["replay.eta=0", "--resume"]):
        done = train(config, "--dry-run", *words)
        assert done.returncode == 0 and "eta: 0" in done.stdout, done.stderr
    refused(train(config, "--dry-run", "--resume", "step-000002"), "--resume step-000002", "step-000001", "checkpoints")


def test_a_run_dir_that_cannot_be_used_is_refused(config: Path, tmp_path: Path) -> None:
    """A file, one that another process holds, and that of a training run for an evaluation."""
    (tmp_path / "file").write_text("")
    refused(train(config, f"run_dir={tmp_path / 'file'}"), "run_dir", "is a file")
    with locked(tmp_path / "held"):
        refused(command_apart("train", config, f"run_dir={tmp_path / 'held'}"), "run_dir", "goes on")
    run = tmp_path / "trained"
    run.mkdir()
    (run / "run.json").write_text('{"run_id": "x", "starts": 1, "kind": "train"}')
    refused(command("eval", config, f"run_dir={run}"), "run_dir", "holds a train run", "of its own")


def test_an_evaluation_that_could_not_be_begun_or_written_is_refused(config: Path, tmp_path: Path) -> None:
    """A checkpoint instead of a model: the error says how to convert it.  A folder for a file.  Nothing to evaluate."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").touch()
    convert = f"megatron-webrl convert megatron-to-hf {checkpoint} DST"
    refused(command("eval", config, f"model.path={checkpoint}"), f"model.path={checkpoint}", convert)
    refused(command("eval", config, "--json", tmp_path), f"--json {tmp_path}", "give a file")
    (tmp_path / "file").write_text("")
    refused(command("eval", config, "--json", tmp_path / "file" / "x.json"), "--json", "is no directory")
    refused(train(config, "evaluation.every=2", "evaluation.episodes=0"), "evaluation.every=2", "every=null")


def test_files_that_are_not_what_they_should_be(config: Path, tmp_path: Path) -> None:
    """A picture for a configuration, a text for a ledger."""
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\xff\xfe")
    refused(train(tmp_path / "picture.yaml"), "picture.yaml", "UTF-8")
    (tmp_path / "ledger.sqlite").write_text("no database, but long enough to look at" * 10)
    refused(command("ledger", tmp_path), "ledger.sqlite", "run_dir")


def test_the_demo_says_first_what_would_stop_it_later(tmp_path: Path) -> None:
    """A model directory that is there, a layout that cannot fit, a task without a script, run_dir=.: nothing is renamed."""
    run = tmp_path / "run"
    run.mkdir()
    for override, words in (
        (f"model.path={tmp_path}", ("model.path", "exists")),
        ("trainer.parallel.tp=3", ("trainer.parallel.tp=3",)),
        ("tasks.names=[tic-tac-toe]", ("tic-tac-toe", "no script")),
        ("device=cuda", ("device=cuda",)),
        ("sampling.stop=[</tool_call>]", ("sampling.stop", "'</tool_call>'")),
        ("run_dir=.", ("run_dir=.",)),
    ):
        refused(command("demo", f"run_dir={run}", override), *words)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_dry_run_prints_a_configuration_that_reads_back_and_the_placement(config: Path, tmp_path: Path) -> None:
    done = train(config, "--dry-run", "replay.eta=0")
    assert done.returncode == 0, done.stderr
    text, _, placement = done.stdout.partition("placement")
    (tmp_path / "again.yaml").write_text(text)
    assert yaml.safe_load(text)["replay"]["eta"] == 0
    assert all(role in placement for role in ("coordinator", "store", "engine-0", "trainer-0", "worker-0"))
    assert "stage 0: 1.6 M parameters; GB: weights" in placement
    assert not (config.parent / "run").exists()


def test_half_a_run_places_half_the_roles_and_is_refused_what_it_cannot_do(config: Path, tmp_path: Path) -> None:
    """rollout_only has no trainer and saves nothing to resume from; train_only has nothing but a trainer, and leaves the
    directory of a run with rollouts alone; both together are refused, and either by the demo."""
    BatchWriter(tmp_path / "batches", 3).finish(0, [group(n) for n in range(2)])
    recorded = f"train_only={tmp_path / 'batches'}"
    placed = train(config, "--dry-run", "rollout_only=true").stdout.partition("placement")[2]
    assert "engine-0" in placed and "worker-0" in placed and "trainer" not in placed
    placed = train(config, "--dry-run", recorded).stdout.partition("placement")[2]
    roles, _, needs = placed.partition("a trainer rank, estimated")
    assert [line.split()[0] for line in roles.splitlines()[1:]] == ["trainer-0"] and "stage 0: 1.6 M" in needs
    refused(train(config, recorded, "rollout_only=true"), "rollout_only=true", "train_only=")
    refused(train(config, "rollout_only=true", "--resume"), "--resume", "rollout_only=true")
    refused(command("demo", "--config", config, "rollout_only=true"), "rollout_only", "train")
    refused(train(config, recorded, "trainer.steps=2"), "trainer.steps=2", "step 3")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.sqlite").touch()
    refused(train(config, recorded), "run_dir", "run with rollouts", "of its own")
    (tmp_path / "run" / "ledger.sqlite").rename(tmp_path / "run" / "metrics.jsonl")
    refused(train(config, recorded), "run_dir", "holds a run already")


def group(group_id: int) -> Group:
    return Group(group_id, Task("miniwob/click-test/1", "miniwob", "click-test", 1, 10), [])


def test_help_teaches_every_command() -> None:
    done = command_apart("--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("train", "sft", "eval", "demo", "ledger", "docs/configuration.md"))
