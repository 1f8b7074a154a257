import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_webrl.browser import BrowserFault, SiteBlocked
from megatron_webrl.config import RunConfig, validate
from megatron_webrl.errors import UserError
from megatron_webrl.tasks import Evidence, Ruling, check_environment, held_out_tasks, make_environment, make_sampler
from megatron_webrl.tasks.webgym import TaskFile, WebGym, row_of

ROW = {
    "task_id": "a1",
    "task_name": "What does the red one cost?",
    "website": "shop.org",
    "domain": "Shopping",
    "subdomain": "Toys",
    "difficulty": 4,
    "evaluator_reference": [{"description": "finds the price", "facts": ["3 €"]}],
    "reference_answer": "3 €",
}
RULES = {"rules": [{"type": "answer", "one_of": ["3"]}]}


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run_config(folder: Path, train: list[dict[str, Any]], held_out: list[dict[str, Any]], **more: Any) -> RunConfig:
    tasks = {
        "environment": "webgym",
        "train_file": write(folder / "train.jsonl", train),
        "held_out_file": write(folder / "test.jsonl", held_out),
    }
    sections = {
        "model": {"path": "unused"},
        "evaluation": {"episodes": 1},
        "judge": {"url": "http://j/v1", "model": "m"},
    }
    return validate({**sections, **more, "tasks": {**tasks, **more.get("tasks", {})}}, "test")


def rows(n: int, prefix: str = "t", **changes: Any) -> list[dict[str, Any]]:
    return [{**ROW, "task_id": f"{prefix}{i}", "difficulty": 1 + i % 15, **changes} for i in range(n)]


def test_a_row_becomes_a_task_with_its_horizon(tmp_path: Path) -> None:
    """By the table of levels; the row travels with the task, so that a worker needs no file."""
    config = run_config(tmp_path, rows(15), rows(3, "h"), tasks={"horizons": {1: 20, 4: 40, 7: 60}})
    file = TaskFile(config.tasks.train_file, "tasks.train_file", config.tasks)  # type: ignore[arg-type]
    tasks = [file.task(i, 0) for i in range(15)]
    assert [t.horizon for t in tasks] == [20] * 3 + [40] * 3 + [60] * 9
    assert [t.difficulty for t in tasks] == list(range(1, 16))
    assert tasks[3].task_id == "webgym/t3"
    assert row_of(tasks[3]).url == "https://shop.org"
    assert row_of(tasks[3]).criteria[0].facts == ["3 €"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"difficulty": 16}, "difficulty=16"),
        ({"difficulty": "hard"}, "difficulty"),
        ({"task_name": " "}, "must not be empty"),
        ({"website": "file:///etc/passwd"}, "website"),
        ({"website": "javascript:alert(1)"}, "website"),
        ({"website": None}, "website"),
        ({"evaluator_reference": [{"facts": []}]}, "description"),
        ({"evaluator_reference": None, "reference_answer": None}, "nothing to judge by"),
        ({"rules": [{"type": "url"}]}, "exactly one|one of"),
        ({"rules": [{"type": "colour"}]}, "colour"),
        ({"task_id": "t1"}, "occurs twice"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    good = rows(3)
    file = write(tmp_path / "train.jsonl", [*good, {**ROW, "task_id": "x", **change}])
    config = run_config(tmp_path, good, rows(1, "h"))
    write(file, [*good, {**ROW, "task_id": "x", **change}])
    with pytest.raises(UserError, match=r"tasks\.train_file=.*train\.jsonl, line 4: .*: mend the row") as caught:
        check_environment(config)
    assert any(part in str(caught.value) for part in reason.split("|"))


@pytest.mark.parametrize("content", ["", "\n\n", "not json\n", '{"task_id": 1\n', "\xff\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    config = run_config(tmp_path, rows(1), rows(1, "h"))
    (tmp_path / "train.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"tasks\.train_file="):
        check_environment(config)


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    check_environment(run_config(tmp_path, rows(5), rows(5, "h")))
    with pytest.raises(UserError, match=r"shares 2 task_ids"):
        check_environment(run_config(tmp_path, rows(5), rows(2)))
    with pytest.raises(UserError, match=r"evaluation\.episodes=9 exceeds the 5 rows"):
        check_environment(run_config(tmp_path, rows(5), rows(5, "h"), evaluation={"episodes": 9}))
    with pytest.raises(UserError, match=r"'t0'.*judge\.url=null"):
        check_environment(run_config(tmp_path, rows(5), rows(5, "h"), judge={}))
    check_environment(run_config(tmp_path, rows(5, **RULES), rows(5, "h", **RULES), judge={}))
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"tasks\.train_file=.*cannot be read"):
        make_sampler(run_config(tmp_path, [], []).tasks.model_copy(update={"train_file": tmp_path / "no"}), 0, 8)


def test_every_row_is_drawn_once_a_round(tmp_path: Path) -> None:
    """And a sampler that is made again goes on as if it had never been away."""
    config = run_config(tmp_path, rows(20), rows(1, "h")).tasks
    sampler = make_sampler(config, 7, 8)
    drawn = [sampler.draw(n).name for n in range(40)]
    assert Counter(drawn[:20]) == Counter(drawn[20:]) == Counter(f"t{i}" for i in range(20))
    assert drawn[:20] != drawn[20:]
    assert [make_sampler(config, 7, 8).draw(n).name for n in range(30, 40)] == drawn[30:]
    assert sampler.practises(sampler.draw(3))
    assert not sampler.practises(held_out_tasks(config, 1)[0])


def test_levels_are_drawn_by_their_weights(tmp_path: Path) -> None:
    tasks = {"sampler": "difficulty", "difficulty_weights": {level: 0 for level in range(1, 16) if level not in (3, 9)}}
    config = run_config(tmp_path, rows(30), rows(1, "h"), tasks=tasks).tasks
    sampler = make_sampler(config, 0, 8)
    assert {sampler.draw(n).difficulty for n in range(100)} == {3, 9}


def test_held_out_rows_are_spread_over_the_file(tmp_path: Path) -> None:
    config = run_config(tmp_path, rows(1), rows(10, "h")).tasks
    assert [t.name for t in held_out_tasks(config, 5)] == ["h0", "h2", "h4", "h6", "h8"]
    with pytest.raises(ValueError, match="exceed the 10 rows"):
        held_out_tasks(config, 11)


async def test_an_episode_on_a_site_and_its_judge(tmp_path: Path) -> None:
    """From the row's address to the verdict of its rules, on a server of this machine."""

    async def page(request: web.Request) -> web.Response:
        if request.path == "/forbidden":
            raise web.HTTPForbidden
        return web.Response(text="<title>shop</title><b id=price>3 €</b>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/{tail:.*}", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://localhost:{runner.addresses[0][1]}"
    rules = {"rules": [{"type": "element", "selector": "#price", "contains": "3"}, *RULES["rules"]]}
    train = [{**ROW, **rules, "task_id": path, "website": url + path} for path in ("/shop", "/forbidden")]
    browser = {"slots": 1, "viewport": [300, 200], "private_hosts": ["localhost"]}
    config = run_config(tmp_path, train, rows(1, "h", **RULES), browser=browser, judge={})
    environment = make_environment(config)
    assert isinstance(environment, WebGym)
    file = TaskFile(config.tasks.train_file, "tasks.train_file", config.tasks)  # type: ignore[arg-type]
    try:
        episode = environment.episode(file.task(0, 0))
        seen = await episode.reset()
        assert (seen.utterance, seen.title, seen.url) == (ROW["task_name"], "shop", f"{url}/shop")
        acted = await episode.act({"action": "navigate", "url": "http://169.254.169.254/"})
        assert "not allowed" in acted.error
        end = await episode.conclude()
        await episode.close()
        assert end.found == {"#price": "3 €"}
        for answer, ruling in (("€ 3.00", Ruling.SUCCESS), ("4", Ruling.FAILURE)):
            evidence = Evidence(file.task(0, 0), seen.utterance, answer, end, [], [])
            assert (await environment.judge(evidence)).ruling is ruling  # type: ignore[misc]
        blocked = environment.episode(file.task(1, 0))
        with pytest.raises(SiteBlocked, match="403"):
            await blocked.reset()
        await blocked.close()
        with pytest.raises(BrowserFault):
            _ = blocked.page
    finally:
        await environment.close()
        await runner.cleanup()
