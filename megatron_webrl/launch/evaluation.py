"""What `megatron-webrl eval` goes on from, and how an evaluation is told: as a table, and as JSON.

Two success rates, each with its denominator: of all episodes that were asked for, where an episode without a result (its site
blocked it, retries were exhausted) is no success; and of those with a result.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.observe import clustered, wilson
from megatron_webrl.run_directory import replace_file
from megatron_webrl.wire.messages import EvaluationState

BUCKETS = {"easy": range(1, 4), "medium": range(4, 7), "hard": range(7, 16)}
"""The paper's, by difficulty."""
SECTIONS = ("tasks", "agent", "browser", "sampling", "judge", "evaluation", "seed")
"""Of the configuration: what an evaluation that goes on must have as it began."""
FINGERPRINT_FILE = "evaluation_of.json"


def fingerprint(config: RunConfig) -> dict[str, str]:
    """What is measured, and how: digest by part of the configuration."""
    dumped = config.model_dump(mode="json", include={*SECTIONS})
    dumped["browser"] = {
        k: dumped["browser"][k] for k in ("viewport", "screenshot", "screenshot_format", "jpeg_quality")
    }
    dumped["judge"] = {k: dumped["judge"][k] for k in ("url", "model", "images")}
    files = sorted(Path(config.model.path).glob("*"))
    dumped["model.path"] = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    for key in ("train_file", "held_out_file"):
        if (file := getattr(config.tasks, key)) is not None:
            dumped[f"tasks.{key}"] = [file.stat().st_size, file.stat().st_mtime_ns]
    return {key: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest() for key, part in dumped.items()}


def begin(config: RunConfig, *, resume: bool) -> None:
    """Note in run_dir what is measured.  resume: it must be what was noted.  Raises UserError if it is not."""
    run_dir = Path(config.run_dir)
    file, found = run_dir / FINGERPRINT_FILE, fingerprint(config)
    if resume:
        try:
            noted = json.loads(file.read_text())
        except (OSError, ValueError):
            raise UserError(
                f"--resume: run_dir={run_dir} holds no evaluation: give the run_dir of the one to go on with, or leave "
                "--resume out"
            ) from None
        if changed := [key for key in found if noted.get(key) != found[key]]:
            raise UserError(
                f"--resume: {changed[0]} is not as it was when the evaluation in run_dir={run_dir} began: give what it "
                "began with, or begin anew without --resume"
            )
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(found, indent=1) + "\n")


def summary(state: EvaluationState) -> dict[str, Any]:
    """All figures of an evaluation.  A rate is {successes, episodes, rate, low, high}: 95% Wilson intervals, with several
    seeds those of `clustered`."""
    asked = _rate(state.all[0], state.total)
    if state.seeds > 1 and state.means[0]:
        asked["low"], asked["high"] = clustered(*state.means, episodes=state.total)
    buckets = {
        name: _sum(tally for level, tally in state.by_level.items() if level in levels)
        for name, levels in BUCKETS.items()
    }
    return {
        "name": state.name,
        "success": asked,
        "success_of_results": _rate(state.all[0], state.all[1]),
        "denominators": {
            "success": "all episodes asked for: those without a result are no success",
            "success_of_results": "episodes with a result: blocked and faulty ones are left out",
        },
        "by_level": {level: _rate(t[0], t[2]) for level, t in sorted(state.by_level.items())},
        "by_bucket": {name: _rate(t[0], t[2]) for name, t in buckets.items() if t[2]},
        "by_task": {name: _rate(t[0], t[2]) for name, t in sorted(state.by_task.items())},
        "by_seed": [_rate(t[0], t[2]) for t in state.by_seed],
        "episodes": {
            "asked_for": state.total,
            "ended": state.all[2],
            "with_result": state.all[1],
            "blocked": state.blocked,
            "faults": state.faults,
        },
        "reasons": dict(sorted(state.reasons.items())),
        "mean_steps": {_word(won): n[1] / n[0] for won, n in state.steps.items()},
        "mean_response_tokens": {_word(won): n[2] / n[0] for won, n in state.steps.items()},
        "versions": [state.min_version, state.max_version],
    }


def report(state: EvaluationState) -> list[str]:
    """Lines for people."""
    found = summary(state)
    lines = [
        f"Success {_percent(found['success'])} of all {state.total} episodes asked for",
        f"        {_percent(found['success_of_results'])} of the {state.all[1]} with a result (without one: "
        f"{state.blocked} blocked, {state.faults} faults)",
    ]
    groups = {**found["by_bucket"], **{f"level {level}": rate for level, rate in found["by_level"].items()}}
    if len(found["by_level"]) == 1:
        groups = {}
    lines += [f"  {name:<9} {_percent(rate)} of {rate['episodes']}" for name, rate in groups.items()]
    if state.seeds > 1:
        rates = [rate["rate"] for rate in found["by_seed"]]
        mean = sum(rates) / len(rates)
        spread = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1))
        lines.append(f"  over {state.seeds} seeds: mean {mean:.1%}, standard deviation {spread:.1%}")
    for won, steps in found["mean_steps"].items():
        lines.append(f"  {won}: {steps:.1f} steps, {found['mean_response_tokens'][won]:.0f} response tokens on average")
    lines.append("  ended by: " + ", ".join(f"{reason} {n}" for reason, n in found["reasons"].items()))
    return lines


def write(run_dir: Path, state: EvaluationState) -> None:
    """run_dir/evaluation_NAME.json."""
    replace_file(run_dir / f"evaluation_{state.name}.json", json.dumps(summary(state), indent=1) + "\n")


def _rate(successes: int, episodes: int) -> dict[str, Any]:
    low, high = wilson(successes, episodes)
    rate = successes / episodes if episodes else math.nan
    return {"successes": successes, "episodes": episodes, "rate": rate, "low": low, "high": high}


def _sum(tallies: Iterable[list[int]]) -> list[int]:
    return [sum(column) for column in zip([0, 0, 0], *tallies, strict=True)]


def _word(won: bool) -> str:
    return "success" if won else "failure"


def _percent(rate: dict[str, Any]) -> str:
    return f"{rate['rate']:.1%} (95%: {rate['low']:.1%}–{rate['high']:.1%})"
