"""What `megatron-webrl eval` goes on from, and how an evaluation is told: as a table, and as JSON.

Two success rates, each with its denominator: of all episodes that were asked for, where an episode without a result (its site
blocked it, retries were exhausted) is no success; and of those with a result.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import astuple

from megatron_webrl.config import RunConfig
from megatron_webrl.errors import UserError
from megatron_webrl.observe import clustered, wilson
from megatron_webrl.run_directory import replace_file
from megatron_webrl.wire.messages import EvaluationState, Tally

BUCKETS = {"easy": range(1, 4), "medium": range(4, 7), "hard": range(7, 16)}
"""The paper's, by difficulty."""
MEASURED: dict[str, Any] = {
    "tasks": True,
    "agent": True,
    "sampling": True,
    "seed": True,
    "browser": {"viewport", "screenshot", "screenshot_format", "jpeg_quality"},
    "judge": {"url", "model", "images"},
    "evaluation": {"episodes", "seeds", "temperature", "top_p", "top_k", "endpoint", "endpoint_model"},
}
"""Of the configuration: what an evaluation that goes on must have as it began."""
NAMES_SHOWN = 40
"""Most rows by task in a report; the file has all."""
MEASURED_FILE = "evaluation_of.json"


def measured(config: RunConfig) -> dict[str, dict[str, Any]]:
    """What is measured, and how: the values by key, and the names, sizes and times of the files of those keys that name some."""
    values: dict[str, Any] = {}
    for section, found in config.model_dump(mode="json", include=MEASURED).items():
        values |= {f"{section}.{k}": v for k, v in found.items()} if isinstance(found, dict) else {section: found}
    files = {"model.path": _stamps(Path(config.model.path).glob("*"))}
    for key in ("train_file", "held_out_file"):
        if (file := getattr(config.tasks, key)) is not None:
            files[f"tasks.{key}"] = _stamps([file])
    return {"values": values, "files": files}


def _stamps(files: Iterable[Path]) -> list[list[Any]]:
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]


def begin(config: RunConfig, *, resume: bool) -> None:
    """Note in run_dir what is measured.  resume: it must be what was noted.  Raises UserError if it is not."""
    run_dir = Path(config.run_dir)
    file, found = run_dir / MEASURED_FILE, json.dumps(measured(config), indent=1)
    if resume:
        try:
            noted = json.loads(file.read_text())
            began, files = dict(noted["values"]), dict(noted["files"])
        except (OSError, ValueError, TypeError, KeyError):
            raise UserError(
                f"--resume: run_dir={run_dir} holds no evaluation: give the run_dir of the one to go on with, or leave "
                "--resume out"
            ) from None
        now = json.loads(found)
        remedy = "give what it began with, or begin anew without --resume"
        for key in now["values"] | began:
            if (value := now["values"].get(key)) != began.get(key):
                raise UserError(
                    f"--resume: {key}={value!r}, but the evaluation in run_dir={run_dir} began with {began.get(key)!r}: {remedy}"
                )
        for key in now["files"]:
            if now["files"][key] != files.get(key):
                raise UserError(
                    f"--resume: {key}: the files are not those that the evaluation in run_dir={run_dir} began with: {remedy}"
                )
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_file(file, found + "\n")


def summary(state: EvaluationState) -> dict[str, Any]:
    """All figures of an evaluation that is over.  A rate is {successes, episodes, rate, low, high}, with a 95%
    interval: Wilson's; with several seeds that of `clustered`.  Its rate is null where there are no episodes."""
    buckets = {
        name: _sum(tally for level, tally in state.by_level.items() if level in levels)
        for name, levels in BUCKETS.items()
    }
    by_seed = [_rate(tally.successes, tally.episodes, None) for tally in state.by_seed]
    rates = [rate["rate"] for rate in by_seed if rate["rate"] is not None]
    return {
        "name": state.name,
        "success": _asked(state.all, state.seeds),
        "success_of_results": _of_results(state.all, state.seeds),
        "denominators": {
            "success": "all episodes asked for: those without a result are no success",
            "success_of_results": "episodes with a result: blocked and faulty ones are left out",
        },
        "by_level": {level: _asked(tally, state.seeds) for level, tally in sorted(state.by_level.items())},
        "by_bucket": {name: _asked(tally, state.seeds) for name, tally in buckets.items() if tally.episodes},
        "by_task": {name: _asked(tally, state.seeds) for name, tally in sorted(state.by_task.items())},
        "by_seed": by_seed,
        "over_seeds": {
            "mean": statistics.mean(rates) if rates else None,
            "standard_deviation": statistics.stdev(rates) if len(rates) > 1 else None,
        },
        "episodes": {
            "asked_for": state.total,
            "ended": state.finished,
            "with_result": state.all.results,
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
        f"        {_percent(found['success_of_results'])} of the {state.all.results} with a result (without one: "
        f"{state.blocked} blocked, {state.faults} faults)",
    ]
    if len(found["by_level"]) > 1:
        groups = {**found["by_bucket"], **{f"level {level}": rate for level, rate in found["by_level"].items()}}
        lines += _table("by difficulty", groups)
    if 1 < len(found["by_task"]) <= NAMES_SHOWN:
        lines += _table("by task", found["by_task"])
    if state.seeds > 1:
        over = found["over_seeds"]
        lines.append(
            f"  over {state.seeds} seeds: mean {over['mean']:.1%}, standard deviation {over['standard_deviation']:.1%} ("
            + ", ".join(f"{rate['rate']:.1%}" for rate in found["by_seed"])
            + ")"
        )
    for won, steps in found["mean_steps"].items():
        lines.append(f"  {won}: {steps:.1f} steps, {found['mean_response_tokens'][won]:.0f} response tokens on average")
    lines.append("  ended by: " + ", ".join(f"{reason} {n}" for reason, n in found["reasons"].items()))
    return lines


def _table(title: str, rates: dict[str, dict[str, Any]]) -> list[str]:
    width = max(map(len, rates))
    return [f"  {title}"] + [
        f"    {name:<{width}}  {_percent(rate)} of {rate['episodes']}" for name, rate in rates.items()
    ]


def write(run_dir: Path, state: EvaluationState) -> None:
    """run_dir/evaluation_NAME.json."""
    replace_file(
        run_dir / f"evaluation_{state.name}.json", json.dumps(summary(state), indent=1, allow_nan=False) + "\n"
    )


def _asked(tally: Tally, seeds: int) -> dict[str, Any]:
    """Of all its episodes."""
    tasks, interval = tally.episodes // seeds, None
    if seeds > 1 and tasks > 1:
        s, e = tally.successes, tally.episodes
        interval = clustered(s, e, tasks=tasks, ss=tally.ss, se=seeds * s, ee=seeds * e)
    return _rate(tally.successes, tally.episodes, interval)


def _of_results(tally: Tally, seeds: int) -> dict[str, Any]:
    interval = None
    if seeds > 1 and tally.tasks > 1:
        s, r = tally.successes, tally.results
        interval = clustered(s, r, tasks=tally.tasks, ss=tally.ss, se=tally.sr, ee=tally.rr)
    return _rate(tally.successes, tally.results, interval)


def _rate(successes: int, episodes: int, interval: tuple[float, float] | None) -> dict[str, Any]:
    """interval: None for Wilson's."""
    low, high = interval or wilson(successes, episodes)
    rate = successes / episodes if episodes else None
    return {"successes": successes, "episodes": episodes, "rate": rate, "low": low, "high": high}


def _sum(tallies: Iterable[Tally]) -> Tally:
    return Tally(*(sum(column) for column in zip(*[astuple(Tally()), *map(astuple, tallies)], strict=True)))


def _word(won: bool) -> str:
    return "success" if won else "failure"


def _percent(rate: dict[str, Any]) -> str:
    if rate["rate"] is None:
        return "–"
    return f"{rate['rate']:.1%} (95%: {rate['low']:.1%}–{rate['high']:.1%})"
