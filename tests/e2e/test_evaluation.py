"""Evaluation as a user runs it: killed and resumed, beside training, of a model behind an endpoint on one's own tasks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from command_line import REPOSITORY, command, nothing_left, run, wait_for

from megatron_webrl.agent import format_call
from megatron_webrl.processes import marked, reap

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
Demo = tuple[subprocess.CompletedProcess[str], Path]


def evaluated(run_dir: Path) -> dict[tuple[int, int], float]:
    """Episodes that ended with a result, as the ledger has them: their rewards."""
    with contextlib.suppress(sqlite3.Error):
        ledger = sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)
        rows = ledger.execute("SELECT group_id, sample_index, reward FROM attempts WHERE state='evaluated'").fetchall()
        ledger.close()
        return {(group, sample): reward for group, sample, reward in rows}
    return {}


def test_an_evaluation_is_killed_and_resumed(demo_run: Demo, small: Path) -> None:
    """SIGKILL to everything: episodes with a result are kept, the rest is run, and no other model may go on with it."""
    run_dir = small.parent / "eval_resumed"
    line = ["eval", small, f"run_dir={run_dir}", "evaluation.episodes=60", "evaluation.seeds=2"]
    driver = subprocess.Popen(command(*line), cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: driver.poll() is not None or len(evaluated(run_dir)) >= 20, 240, "evaluated episodes")
    identity = json.loads((run_dir / "run.json").read_text())
    assert driver.poll() is None
    driver.kill()
    driver.wait()
    reap(identity["run_id"])
    assert not marked(identity["run_id"])
    kept = evaluated(run_dir)
    assert 20 <= len(kept) < 120

    refused = run(*line, "--resume", f"model.path={small.parent / 'demo' / 'model_final'}")
    assert refused.returncode == 2 and "--resume: model.path: the files are not those" in refused.stderr
    figures = run_dir / "figures.json"
    done = run(*line, "--resume", "--json", figures)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of all 120 episodes asked for" in done.stdout and "over 2 seeds" in done.stdout
    ended = evaluated(run_dir)
    assert len(ended) == 120
    assert {key: ended[key] for key in kept} == kept
    found = json.loads(figures.read_text())
    assert found["success"]["successes"] == sum(reward > 0 for reward in ended.values())
    assert [rate["episodes"] for rate in found["by_seed"]] == [60, 60]
    assert nothing_left(run_dir)


def test_an_evaluation_runs_beside_training(demo_run: Demo, small: Path) -> None:
    """Train steps go on while it runs, its weights are those of several versions, and the end does not wait for it."""
    run_dir = small.parent / "beside"
    settings = ["evaluation.every=1", "evaluation.episodes=12", "trainer.steps=8"]
    done = run("train", small, f"run_dir={run_dir}", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted(run_dir.glob("evaluation_step-*.json"))
    assert files, done.stdout
    for file in files:
        found = json.loads(file.read_text())
        assert found["success"]["episodes"] == found["episodes"]["ended"] == 12
        assert 0 <= found["versions"][0] <= found["versions"][1]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rows if "ppo_actor/entropy" in row]) == 8
    told = [row for row in rows if "evaluation/success" in row]
    assert all(row["evaluation/max_version"] <= row["run/version"] for row in told)
    first = json.loads(files[0].read_text())["versions"]
    assert first[1] > first[0], "training did not stand still"
    assert json.loads((run_dir / "evaluation_after.json").read_text())["episodes"]["with_result"] == 12
    assert nothing_left(run_dir)


class ScriptedModel:
    """An OpenAI-compatible server in a thread that clicks the plus of the counter."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        said = format_call({"action": "left_click", "coordinate": [75, 210]})
        return web.json_response({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        async def start() -> web.AppRunner:
            app = web.Application(client_max_size=64 << 20)
            app.router.add_post("/v1/chat/completions", self._complete)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return runner

        runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)


def test_a_model_behind_an_endpoint_is_measured_on_one_s_own_tasks(demo_run: Demo, small: Path) -> None:
    """No engine is started; `up` is always solved by a policy that only clicks plus, `down` never."""
    run_dir = small.parent / "endpoint"
    model = ScriptedModel()
    with model.serving() as url:
        done = subprocess.run(
            command(
                "eval", small, f"run_dir={run_dir}", f"evaluation.endpoint={url}", "evaluation.endpoint_model=scripted",
                "tasks.environment=counter:Counter", "tasks.names=[up,down]", "tasks.difficulty={down: 5}",
                "tasks.horizons={1: 5}", "evaluation.episodes=8", "browser.settle_quiet_s=0", "browser.viewport=[640,400]",
                "browser.screenshot=null", "agent.max_prompt_tokens=4000",
            ),
            cwd=REPOSITORY, capture_output=True, text=True, timeout=240,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "examples" / "environment")},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((run_dir / "evaluation_eval.json").read_text())
    assert {name: rate["rate"] for name, rate in found["by_task"].items()} == {"down": 0, "up": 1}
    assert {name: rate["rate"] for name, rate in found["by_bucket"].items()} == {"easy": 1, "medium": 0}
    assert found["reasons"] == {"horizon": 4, "solved": 4}
    assert not list((run_dir / "logs").glob("engine*"))
    assert len(model.asked) == 4 * 5 + sum(1 + seed % 3 for seed in held_out_seeds())
    assert nothing_left(run_dir)


def held_out_seeds() -> list[int]:
    return [500_000 + i * 1000 // 4 for i in range(4)]
