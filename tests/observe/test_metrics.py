"""Metrics: every row reaches a healthy sink in order, and no sink can stop or hold up the run."""

import json
import threading
import time
from pathlib import Path

import pytest
import wandb

from megatron_webrl.config import validate
from megatron_webrl.observe import JsonlSink, MetricsLogger, WandbSink, read_jsonl


class Broken:
    def open(self):
        raise OSError("no disk")

    def write(self, row):
        raise AssertionError("never opened")

    def close(self):
        raise AssertionError("never opened")


class Stuck:
    def __init__(self):
        self.released = threading.Event()

    def open(self):
        pass

    def write(self, row):
        self.released.wait(30)

    def close(self):
        pass


def test_rows_are_written_in_order(tmp_path: Path):
    """A healthy sink gets every row, and close returns nothing lost."""
    log = MetricsLogger([JsonlSink(tmp_path / "deep" / "metrics.jsonl")])
    for step in range(100):
        log.log(step, {"loss": step / 2})
    assert log.close() == []
    rows = read_jsonl(tmp_path / "deep" / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(step, step / 2) for step in range(100)]


def test_broken_sink_stops_nothing(tmp_path: Path):
    """A sink that raises is named at close with its error; the others get every row."""
    log = MetricsLogger([Broken(), JsonlSink(tmp_path / "metrics.jsonl")])
    for step in range(5):
        log.log(step, {"loss": 1.0})
    lost = log.close()
    assert len(lost) == 1
    assert "Broken" in lost[0]
    assert "5 calls failed" in lost[0]
    assert "no disk" in lost[0]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 5


def test_slow_sink_drops_and_says_so():
    """log returns at once however slow a sink is; what exceeds its queue is dropped and counted."""
    sink = Stuck()
    log = MetricsLogger([sink], capacity=4)
    began = time.monotonic()
    for step in range(50):
        log.log(step, {"loss": 1.0})
    assert time.monotonic() - began < 1
    lost = log.close(timeout=0.2)
    sink.released.set()
    dropped = int(lost[0].split(": ")[1].split()[0])
    assert dropped in (45, 46)  # 4 wait, and perhaps one is being written
    assert "not finished after 0.2 s" in lost[0]


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path):
    """JSON has no nan: such values are left out, and counted under `nonfinite`."""
    log = MetricsLogger([JsonlSink(tmp_path / "metrics.jsonl")])
    log.log(1, {"a": float("nan"), "b": float("inf"), "c": 3})
    log.close()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {name: value for name, value in row.items() if name != "time"} == {"step": 1, "c": 3.0, "nonfinite": 2.0}


def test_resumed_rows_replace_those_rolled_back(tmp_path: Path):
    """After a kill in mid-line and a resume from step 1: steps 2 and 3 are those of the second time."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n{"step": 3, "x": 3}\n{"step": 4, "x"')
    log = MetricsLogger([JsonlSink(path)])
    log.log(2, {"x": 20.0})
    log.log(2, {"y": 5.0})
    log.log(3, {"x": 30.0})
    log.close()
    assert [(row["step"], row["x"]) for row in read_jsonl(path)] == [(1, 1), (2, 20), (3, 30)]
    assert read_jsonl(path)[1]["y"] == 5


@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_wandb(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch):
    """`disabled` writes nothing; `offline` writes the run, and the same id goes on with it after a resume."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = validate(
        {"model": {"path": "m"}, "tasks": {"names": ["click-test"]}, "observe": {"wandb": mode}, "name": "seen"}, "test"
    )
    for steps in (range(3), range(2, 5)):
        log = MetricsLogger([WandbSink(config, tmp_path, "abc123")])
        for step in steps:
            log.log(step, {"loss": 1.0 / (step + 1)})
        assert log.close(timeout=60) == []
    wandb.teardown()  # its service would live as long as this process, which other tests look for leftovers of
    runs = list(tmp_path.glob("wandb/offline-run-*-abc123/run-abc123.wandb"))
    assert len(runs) == (2 if mode == "offline" else 0)
