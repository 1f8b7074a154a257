"""Which evaluations the driver begins beside training, against a coordinator of the test."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.launch.run import Run
from megatron_webrl.wire.messages import (
    BeginTraining,
    Done,
    EvaluationProgress,
    EvaluationState,
    GetStatus,
    StartEvaluation,
    Tally,
)


class ScriptedRun(Run):
    """A run whose coordinator is at one step after another, finished at the last; over: from which step on an evaluation is."""

    def __init__(self, config: RunConfig, steps: list[int], over: dict[str, int], evaluated: int = 0) -> None:
        self.config = config
        self.cluster = self  # type: ignore[assignment]
        self.display = self  # type: ignore[assignment]
        self._beside, self._evaluated = None, evaluated
        self._steps, self._over, self._step = steps, over, 0
        self.begun: list[str] = []
        self.said: list[str] = []

    def check(self) -> None: ...

    def training(self, *_: Any) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)

    def request(self, message: Any, expect: Any) -> Any:
        match message:
            case BeginTraining():
                return Done()
            case StartEvaluation(name=name, beside=True, tasks=[_, _]):
                self.begun.append(name)
                return Done()
            case EvaluationProgress(name=name):
                over = self._step >= self._over.get(name, 99)
                return EvaluationState(name, 2, 1, beside=True, all=Tally(1, 2, 2) if over else Tally())
            case GetStatus():
                self._step = self._steps.pop(0)
                return SimpleNamespace(step=self._step, finished=not self._steps)
        raise AssertionError(message)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr("megatron_webrl.launch.run.POLL_S", 0.0)
    return validate(
        {
            "run_dir": tmp_path,
            "model": {"path": tmp_path},
            "tasks": {"names": ["click-test"]},
            "trainer": {"steps": 10},
            "evaluation": {"every": 2, "episodes": 2},
        },
        "test",
    )


def files(config: RunConfig) -> list[str]:
    return sorted(file.name for file in Path(config.run_dir).glob("evaluation_*.json"))


def test_one_at_a_time_and_a_due_one_is_left_out(config: RunConfig) -> None:
    """Steps may go by between two looks; the last step has none: the evaluation after training is of the same weights."""
    run = ScriptedRun(config, [0, 1, 2, 3, 4, 5, 7, 9, 10, 10], {"step-2": 5, "step-7": 10})
    run.train()
    assert run.begun == ["step-2", "step-7"]
    assert [text for text in run.said if "left out" in text] == [
        "The evaluation of step 4 is left out: that of step-2 still runs",
        "The evaluation of step 9 is left out: that of step-7 still runs",
    ]
    assert files(config) == ["evaluation_step-2.json", "evaluation_step-7.json"]
    found = json.loads((Path(config.run_dir) / "evaluation_step-2.json").read_text())
    assert (found["success"]["rate"], found["success"]["episodes"]) == (0.5, 2)


@pytest.mark.parametrize(("over", "written"), [(10, ["evaluation_step-8.json"]), (11, [])])
def test_the_end_writes_what_is_over_and_says_what_is_dropped(config: RunConfig, over: int, written: list[str]) -> None:
    """Also what ended between the last look and the end."""
    config.evaluation.every = 8
    run = ScriptedRun(config, [7, 8, 9, 10], {"step-8": over})
    run.train()
    assert run.begun == ["step-8"]
    assert files(config) == written
    assert ("The evaluation of step-8 is dropped: training is over" in run.said) == (not written)


def test_a_resumed_run_goes_on_with_what_is_due_next(config: RunConfig) -> None:
    run = ScriptedRun(config, [5, 5, 6, 9, 9], {"step-6": 7}, evaluated=5)
    run.train()
    assert run.begun == ["step-6", "step-9"]


def test_nothing_is_evaluated_beside_a_policy_that_stays_as_it_is(config: RunConfig) -> None:
    config.rollout_only = True
    run = ScriptedRun(config, [2, 4, 6, 6], {})
    run.train()
    assert run.begun == []
