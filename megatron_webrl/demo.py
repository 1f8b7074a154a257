"""The demo: from nothing to a policy that learned, on real parts, with a picture at the end.

Demonstrations by a scripted oracle in real Chromium -> tokenizer and tiny Qwen3-VL -> supervised warm start -> held-out
success -> asynchronous GRPO -> held-out success.  Everything lands in `run_dir`.
"""

from __future__ import annotations

import asyncio
import json
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_webrl import launch
from megatron_webrl.config import ModelShape, RunConfig, check_layout, validate
from megatron_webrl.errors import UserError
from megatron_webrl.launch import Display, RunResult
from megatron_webrl.run_directory import locked
from megatron_webrl.tiny_model import DEEPSTACK, HEADS, KV_HEADS, LAYERS, MAX_VOCAB

PAGES_A_SAMPLE = 3
"""Every third page of the demonstrations gives the tokenizer words enough."""
VERSIONS = ("torch", "megatron-core", "sglang", "transformers", "ray", "playwright", "miniwob")


def run_demo(config: RunConfig, display: Display, *, setup_seconds: float = 0.0) -> Path:
    """Run everything; returns the path of summary.json.  setup_seconds: what `make setup` took, for the summary."""
    began = time.monotonic()
    _check_first(config)
    run_dir = Path(config.run_dir)
    with locked(run_dir):  # nobody writes to the earlier one
        _keep_earlier(run_dir, display)
    with locked(run_dir):
        return _run(config, run_dir, display, began, setup_seconds)


def _run(config: RunConfig, run_dir: Path, display: Display, began: float, setup_seconds: float) -> Path:
    (run_dir / "logs").mkdir()
    minutes = {"setup": setup_seconds / 60}

    phase = time.monotonic()
    demonstrations = _demonstrate(config, run_dir, display)
    minutes["demonstrations"] = (time.monotonic() - phase) / 60

    phase = time.monotonic()
    random_model = run_dir / "model_random"
    whole = config.model_dump()
    whole["trainer"]["threads"] = None  # all cores: nothing else runs meanwhile
    with_model = validate(whole | {"model": {"path": random_model}}, "demo")
    launch.sft(with_model, display, demonstrations, Path(config.model.path))
    minutes["warm_start"] = (time.monotonic() - phase) / 60

    result = launch.train(config, display)
    minutes |= {
        "start": result.minutes["start"],
        "rl": result.minutes["rl"],
        "evaluation": result.minutes["evaluation"],
    }
    minutes["total"] = minutes["setup"] + (time.monotonic() - began) / 60
    return _conclude(config, run_dir, result, minutes, display)


def _check_first(config: RunConfig) -> None:
    """What would stop the demo later: said now, before anything is renamed."""
    from megatron_webrl.agent import check_scripts
    from megatron_webrl.tasks import demonstration_tasks

    if config.rollout_only or config.train_only is not None:
        raise UserError("rollout_only and train_only leave out half of what the demo shows: use `megatron-webrl train`")
    if config.tasks.environment != "miniwob":
        raise UserError(
            f"tasks.environment={config.tasks.environment} has no scripts to demonstrate its tasks: the demo is of miniwob, use "
            "`megatron-webrl train`"
        )
    run_dir, model = Path(config.run_dir).resolve(), Path(config.model.path).resolve()
    if Path.cwd().is_relative_to(run_dir):
        raise UserError(f"run_dir={config.run_dir} holds the working directory: give a directory of its own")
    if model.exists() and not model.is_relative_to(run_dir):
        raise UserError(
            f"model.path={config.model.path} exists: the demo writes its warm model there, give another, or remove it"
        )
    if config.evaluation.episodes == 0:
        raise UserError("evaluation.episodes=0: the demo shows success before and after, give a number of episodes")
    launch.check_surroundings(config)
    check_scripts(demonstration_tasks(config.tasks))
    check_layout(config, ModelShape(HEADS, KV_HEADS, LAYERS, MAX_VOCAB, len(DEEPSTACK)))


def _keep_earlier(run_dir: Path, display: Display) -> None:
    """What an earlier demo wrote is kept under a numbered name."""
    if {file.name for file in run_dir.iterdir()} <= {"lock"}:
        return
    n = 1
    while (kept := run_dir.with_name(f"{run_dir.name}.{n}")).exists():
        n += 1
    run_dir.rename(kept)
    display.say(f"the earlier {run_dir} is kept as {kept}")


def _demonstrate(config: RunConfig, run_dir: Path, display: Display) -> Path:
    """Oracle demonstrations, and the tiny model whose tokenizer is trained on them."""
    from megatron_webrl.agent import collect_samples, demonstrate, save_demonstrations, tokenizer_texts
    from megatron_webrl.processor import Processor
    from megatron_webrl.tasks import demonstration_tasks
    from megatron_webrl.tiny_model import make_tiny_model

    tasks = demonstration_tasks(config.tasks)

    async def collect() -> Path:
        samples = await collect_samples(
            config, tasks[::PAGES_A_SAMPLE], lambda n, total: display.progress("oracle looks at pages", n, total)
        )
        model = make_tiny_model(run_dir / "model_random", tokenizer_texts(config, samples), seed=config.seed)
        processor = Processor.load(model, config.sampling.stop)
        trajectories, images = await demonstrate(
            config, processor, tasks, lambda n, total: display.progress("demonstrations", n, total)
        )
        folder = run_dir / "demonstrations"
        save_demonstrations(folder, trajectories, images)
        display.say(f"{len(trajectories)} demonstrations of {len(config.tasks.names)} tasks in {folder}")
        return folder

    return asyncio.run(collect())


def _conclude(config: RunConfig, run_dir: Path, result: RunResult, minutes: dict[str, float], display: Display) -> Path:
    """Summary, pictures, and the line that says what was learned and where to look."""
    from megatron_webrl.observe import export_chrome, read_jsonl, success_curve, timeline, wilson

    rows = read_jsonl(run_dir / "metrics.jsonl")
    account = result.status.account
    summary: dict[str, Any] = {}
    points = {}
    for when in ("before", "after"):
        state = result.evaluations[when]
        low, high = wilson(state.successes, state.total)
        points[when] = (state.successes / state.total, low, high)
        summary |= {f"success_{when}": points[when][0], f"success_{when}_low": low, f"success_{when}_high": high}
    probes = [r[k] for r in rows for k in ("engine/logprob_diff_max", "engine/refresh_logprob_diff_max") if k in r]
    summary |= {
        "episodes_evaluated": result.evaluations["after"].total,
        "episodes_without_result": {
            when: result.evaluations[when].faults + result.evaluations[when].blocked for when in ("before", "after")
        },
        "success_by_task": {
            when: {name: t.successes / t.episodes for name, t in sorted(result.evaluations[when].by_task.items())}
            for when in ("before", "after")
        },
        "trajectories_trained": account.trained,
        "trajectories_per_hour": result.status.trajectories / (minutes["rl"] / 60),
        "train_steps": result.status.step,
        "eta": config.replay.eta,
        "max_lag": result.status.lag_max,
        "mean_lag": result.status.lag_mean,
        "engine_trainer_logprob_max_diff": max(probes, default=None),
        "refreshes_probed": sum("engine/refresh_logprob_diff_max" in r for r in rows),
        "account": {
            "issued": account.issued,
            "trained": account.trained,
            "dropped": account.dropped,
            "in_flight": account.in_flight,
        },
        "minutes": {name: round(value, 3) for name, value in minutes.items()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in VERSIONS}},
        "seed": config.seed,
    }
    path = run_dir / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")
    success_curve(rows, points["before"], points["after"], run_dir / "success.png")
    if config.observe.trace:
        timeline(run_dir / "trace", run_dir / "timeline.png", seconds=120)
        export_chrome(run_dir / "trace", run_dir / "timeline.json")
    for line in _lines(summary, run_dir):
        display.say(line)
    return path


def _lines(summary: dict[str, Any], run_dir: Path) -> Sequence[str]:
    account = summary["account"]
    dropped = ", ".join(f"{reason} {n:,}" for reason, n in sorted(account["dropped"].items())) or "none"

    def interval(when: str) -> str:
        return (
            f"{summary[f'success_{when}']:.1%} (95%: {summary[f'success_{when}_low']:.1%}–"
            f"{summary[f'success_{when}_high']:.1%})"
        )

    balance = account["trained"] + sum(account["dropped"].values()) + account["in_flight"]
    return (
        "",
        f"Learned: held-out success {interval('before')} → {interval('after')} on {summary['episodes_evaluated']:,} pages "
        f"never practised, from {summary['trajectories_trained']:,} trained trajectories in {summary['minutes']['rl']:.1f} min.",
        f"Account: issued {account['issued']:,} = trained {account['trained']:,} + dropped ({dropped}) + in flight "
        f"{account['in_flight']:,}" + ("" if balance == account["issued"] else "  DOES NOT BALANCE"),
        f"Look at: {run_dir}/success.png, timeline.png (timeline.json opens in Perfetto), summary.json, metrics.jsonl, "
        "trajectories/, model_final/",
    )
