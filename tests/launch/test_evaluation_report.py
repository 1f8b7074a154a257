import json
from pathlib import Path

import pytest

from megatron_webrl.config import RunConfig, validate
from megatron_webrl.errors import UserError
from megatron_webrl.launch import report, summary
from megatron_webrl.launch.evaluation import begin, write
from megatron_webrl.observe import wilson
from megatron_webrl.wire.messages import EvaluationState, Tally

STATE = EvaluationState(
    "eval",
    10,
    2,
    all=Tally(3, 7, 10, tasks=5, ss=5, sr=6, rr=11),
    by_level={2: Tally(2, 4, 4, 2, 4, 4, 8), 5: Tally(1, 2, 4, 2, 1, 1, 2), 9: Tally(0, 1, 2, 1, 0, 0, 1)},
    by_task={"a": Tally(3, 4, 4), "b": Tally(0, 3, 6)},
    by_seed=[Tally(2, 4, 5), Tally(1, 3, 5)],
    reasons={"solved": 3, "horizon": 4, "blocked": 2, "browser_crash": 1},
    blocked=2,
    faults=1,
    steps={True: [3, 15, 300], False: [4, 40, 1000]},
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
        "easy": (2, 4), "medium": (1, 4), "hard": (0, 2)
    }  # fmt: skip
    assert found["mean_steps"] == {"success": 5, "failure": 10}
    assert found["mean_response_tokens"] == {"success": 100, "failure": 250}


def test_the_report_says_it_in_lines() -> None:
    text = "\n".join(report(STATE))
    assert "Success 30.0%" in text
    assert "of all 10 episodes asked for" in text
    assert "of the 7 with a result (without one: 2 blocked, 1 faults)" in text
    assert "    hard     0.0%" in text
    assert "    a  75.0%" in text
    assert "over 2 seeds: mean 30.0%, standard deviation 14.1% (40.0%, 20.0%)" in text
    assert "ended by: " in text


def test_an_evaluation_without_any_result_can_be_told(tmp_path: Path) -> None:
    state = EvaluationState("x", 2, 1, all=Tally(0, 0, 2), by_seed=[Tally(0, 0, 2)], blocked=2, reasons={"blocked": 2})
    assert "– of the 0 with a result" in "\n".join(report(state))
    write(tmp_path, state)
    found = json.loads((tmp_path / "evaluation_x.json").read_text(), parse_constant=pytest.fail)
    assert found["success_of_results"]["rate"] is None
    assert found["over_seeds"] == {"mean": 0, "standard_deviation": None}


def test_tasks_are_the_unit_of_every_interval_where_there_are_seeds() -> None:
    """100 tasks, 4 episodes each that are all alike: as 100 episodes, in all, of results, and by difficulty.  With one seed, and
    for the episodes of one task or of one seed, Wilson's own."""
    alike = Tally(120, 400, 400, tasks=100, ss=30 * 16, sr=30 * 16, rr=100 * 16)
    one = Tally(2, 4, 4, tasks=1, ss=4, sr=8, rr=16)
    by_seed = [Tally(30, 100, 100)] * 4
    state = EvaluationState(
        "x", 400, 4, all=alike, by_level={2: alike}, by_task={"many": alike, "one": one}, by_seed=by_seed
    )
    found = summary(state)
    for rate in (found["success"], found["success_of_results"], found["by_level"][2], found["by_bucket"]["easy"]):
        assert (rate["low"], rate["high"]) == pytest.approx(wilson(30, 100), abs=2e-3)
        assert (rate["successes"], rate["episodes"]) == (120, 400)
    assert found["by_task"]["many"] == found["success"]
    assert (found["by_task"]["one"]["low"], found["by_task"]["one"]["high"]) == wilson(2, 4)
    assert (found["by_seed"][0]["low"], found["by_seed"][0]["high"]) == wilson(30, 100)
    alone = EvaluationState("x", 100, 1, all=Tally(30, 100, 100), by_seed=[Tally(30, 100, 100)])
    assert (summary(alone)["success"]["low"], summary(alone)["success"]["high"]) == wilson(30, 100)


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
    """Another model, task set or sampling is refused with key and values; what changes no episode is free, more time too."""
    with pytest.raises(UserError, match="holds no evaluation"):
        begin(run_config(tmp_path), resume=True)
    begin(run_config(tmp_path), resume=False)
    free = {"browser": {"slots": 3}, "engine": {"hosts": 2}, "evaluation": {"timeout_s": 99_999, "api_key_env": "KEY"}}
    begin(run_config(tmp_path, **free), resume=True)
    for changes, said in (
        (
            {"tasks": {"names": ["click-test-2"]}},
            r"tasks\.names=\['click-test-2'\], but .* began with \['click-test'\]",
        ),
        ({"tasks": {"names": ["click-test"], "horizons": {1: 20}}}, r"tasks\.horizons="),
        ({"evaluation": {"temperature": 0}}, r"evaluation\.temperature=0\.0, but .* began with 1\.0"),
        ({"evaluation": {"endpoint": "http://h/v1", "endpoint_model": "m"}}, r"evaluation\.endpoint='http://h/v1'"),
        ({"agent": {"prompt": "short"}}, r"agent\.prompt="),
        ({"seed": 5}, r"seed=5, but .* began with 0"),
        ({"browser": {"viewport": [500, 320]}}, r"browser\.viewport=\[500, 320\]"),
    ):
        with pytest.raises(UserError, match=f"--resume: {said}"):
            begin(run_config(tmp_path, **changes), resume=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"--resume: model\.path: the files are not those"):
        begin(run_config(tmp_path), resume=True)
