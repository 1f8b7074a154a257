import json
from pathlib import Path

import pytest

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.errors import UserError
from megatron_webrl.launch import report, summary
from megatron_webrl.launch.evaluation import begin, write
from megatron_webrl.wire.messages import EvaluationState

STATE = EvaluationState(
    "eval",
    10,
    2,
    all=[3, 7, 10],
    by_level={2: [2, 4, 4], 5: [1, 2, 3], 9: [0, 1, 3]},
    by_task={"a": [3, 4, 4], "b": [0, 3, 6]},
    by_seed=[[2, 4, 5], [1, 3, 5]],
    reasons={"solved": 3, "horizon": 4, "blocked": 2, "browser_crash": 1},
    blocked=2,
    faults=1,
    steps={True: [3, 15, 300], False: [4, 40, 1000]},
    means=[5, 1.5, 1.25],
    min_version=3,
    max_version=5,
)


def test_both_rates_have_their_denominator() -> None:
    """Of all that was asked for; of those with a result."""
    found = summary(STATE)
    assert (found["success"]["rate"], found["success"]["episodes"]) == (0.3, 10)
    assert (found["success_of_results"]["rate"], found["success_of_results"]["episodes"]) == (3 / 7, 7)
    assert set(found["denominators"]) == {"success", "success_of_results"}
    assert found["episodes"] == {"asked_for": 10, "ended": 10, "with_result": 7, "blocked": 2, "faults": 1}


def test_levels_fall_into_the_paper_s_buckets() -> None:
    found = summary(STATE)
    assert {name: (rate["successes"], rate["episodes"]) for name, rate in found["by_bucket"].items()} == {
        "easy": (2, 4), "medium": (1, 3), "hard": (0, 3)
    }  # fmt: skip
    assert found["mean_steps"] == {"success": 5, "failure": 10}
    assert found["mean_response_tokens"] == {"success": 100, "failure": 250}


def test_the_report_says_it_in_lines() -> None:
    text = "\n".join(report(STATE))
    assert "Success 30.0%" in text
    assert "of all 10 episodes asked for" in text
    assert "of the 7 with a result (without one: 2 blocked, 1 faults)" in text
    assert "hard      0.0%" in text
    assert "over 2 seeds: mean 30.0%, standard deviation 14.1%" in text
    assert "ended by: " in text


def test_an_evaluation_without_any_result_can_be_told() -> None:
    state = EvaluationState("x", 2, 1, all=[0, 0, 2], by_seed=[[0, 0, 2]], blocked=2, reasons={"blocked": 2})
    assert "of the 0 with a result" in "\n".join(report(state))


def test_what_is_written_is_the_summary(tmp_path: Path) -> None:
    write(tmp_path, STATE)
    assert json.loads((tmp_path / "evaluation_eval.json").read_text())["success"]["rate"] == 0.3


def run_config(folder: Path, **changes: object) -> RunConfig:
    if not (folder / "model").exists():
        (folder / "model").mkdir()
        (folder / "model" / "config.json").touch()
    base = {"run_dir": folder / "run", "model": {"path": folder / "model"}, "tasks": {"names": ["click-test"]}}
    return validate(base | changes, "test")


def test_a_resumed_evaluation_measures_the_same_thing(tmp_path: Path) -> None:
    """Another model, task set or sampling is refused by name; what changes no episode is free."""
    with pytest.raises(UserError, match="holds no evaluation"):
        begin(run_config(tmp_path), resume=True)
    begin(run_config(tmp_path), resume=False)
    begin(run_config(tmp_path, browser={"slots": 3}, engine={"hosts": 2}), resume=True)
    for changes, named in (
        ({"tasks": {"names": ["click-test-2"]}}, "tasks"),
        ({"evaluation": {"temperature": 0}}, "evaluation"),
        ({"agent": {"prompt": "short"}}, "agent"),
        ({"seed": 5}, "seed"),
        ({"browser": {"viewport": [500, 320]}}, "browser"),
    ):
        with pytest.raises(UserError, match=rf"--resume: {named} is not as it was"):
            begin(run_config(tmp_path, **changes), resume=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"--resume: model\.path is not as it was"):
        begin(run_config(tmp_path), resume=True)
