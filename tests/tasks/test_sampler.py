import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config import RunConfig, TasksConfig, dump, load_config, validate
from megatron_webrl.errors import UserError
from megatron_webrl.replay import Ledger
from megatron_webrl.tasks import (
    AdaptiveSampler,
    DifficultySampler,
    Sampler,
    UniformSampler,
    check_environment,
    demonstration_tasks,
    held_out_tasks,
    make_sampler,
    task_names,
    train_source,
)
from megatron_webrl.tasks.sampler import DECAY, EXPLORATION
from megatron_webrl.trajectory import Task

NAMES = ["click-test", "focus-text", "enter-text"]
CONFIG = TasksConfig(names=NAMES, train_seeds=(0, 50), demonstration_seeds=(3, 6))
LEVELLED = CONFIG.model_copy(
    update=dict(sampler="difficulty", difficulty={"enter-text": 4}, difficulty_weights={1: 1.0, 4: 3.0})
)
ADAPTIVE = CONFIG.model_copy(update=dict(sampler="adaptive"))
G = 8


def test_the_uniform_sampler_draws_every_name_once_a_round_in_an_order_that_changes() -> None:
    sampler = UniformSampler(train_source(CONFIG), 0)
    rounds = [[sampler.draw(3 * i + j) for j in range(3)] for i in range(40)]
    assert all({t.name for t in round_} == set(NAMES) for round_ in rounds)
    assert len({tuple(t.name for t in round_) for round_ in rounds}) > 3


@pytest.mark.parametrize("config", [CONFIG, LEVELLED, ADAPTIVE], ids=lambda config: config.sampler)
def test_a_draw_depends_on_seed_number_and_rates_alone(config: TasksConfig) -> None:
    """Whatever was drawn before, in any order, by a sampler that lives on or was restored; every page seed comes up."""
    tasks = [make_sampler(config, 7, G).draw(n) for n in range(400)]
    again = make_sampler(config, 7, G)
    assert [again.draw(n) for n in reversed(range(400))] == tasks[::-1]
    assert {t.seed for t in tasks} == set(range(50))
    assert all(t.horizon == CONFIG.horizon(t.difficulty) and again.practises(t) for t in tasks)
    assert [make_sampler(config, 8, G).draw(n) for n in range(20)] != tasks[:20]


def test_tasks_have_the_difficulty_of_their_name() -> None:
    for tasks in ([UniformSampler(train_source(LEVELLED), 0).draw(n) for n in range(3)], held_out_tasks(LEVELLED, 3)):
        assert {t.name: t.difficulty for t in tasks} == {"click-test": 1, "focus-text": 1, "enter-text": 4}


def test_a_task_is_practised_on_train_pages_only() -> None:
    """A configuration that changed between two starts of a run must not train on pages that are held out now."""
    sampler = UniformSampler(train_source(CONFIG), 0)
    assert sampler.practises(Task("", "miniwob", "click-test", 49, 10))
    assert not sampler.practises(Task("", "miniwob", "click-test", 50, 10))
    assert not sampler.practises(Task("", "miniwob", "click-link", 0, 10))
    assert not sampler.practises(Task("", "other", "click-test", 0, 10))


def frequencies(sampler: Sampler, draws: int) -> dict[str, float]:
    counts = Counter(sampler.draw(n).name for n in range(draws))
    return {name: counts[name] / draws for name in NAMES}


def assert_near(found: dict[str, float], expected: dict[str, float], draws: int) -> None:
    """Within four standard deviations of a binomial."""
    for name, p in expected.items():
        assert abs(found[name] - p) <= 4 * math.sqrt(p * (1 - p) / draws), (name, found, expected)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [({1: 1.0, 4: 3.0}, (1 / 8, 1 / 8, 3 / 4)), ({4: 0.0}, (1 / 2, 1 / 2, 0)), ({}, (1 / 4, 1 / 4, 1 / 2))],
)
def test_levels_are_drawn_in_proportion_to_their_weights_and_names_of_a_level_alike(
    weights: dict[int, float], expected: tuple[float, ...]
) -> None:
    """A level without a weight has 1."""
    config = LEVELLED.model_copy(update=dict(difficulty_weights=weights))
    assert_near(
        frequencies(DifficultySampler(train_source(config), 3, config.difficulty_weights), 4000),
        dict(zip(NAMES, expected, strict=True)),
        4000,
    )


def test_the_adaptive_sampler_draws_by_the_probability_of_mixed_rewards() -> None:
    """P = EXPLORATION / names + (1 − EXPLORATION) w / Σ w, w = 1 − p^G − (1 − p)^G, p = (s + ½) / (e + 1); s, e decayed."""
    sampler = AdaptiveSampler(ADAPTIVE, 3, G)
    assert sampler.rate("click-test") == (0.0, 0.0)
    assert sampler.probabilities() == pytest.approx([1 / 3] * 3)
    task = Task("", "miniwob", "click-test", 0, 10)
    sampler.observe(task, [1.0] * 6 + [0.0, -1.0])
    sampler.observe(task, [1.0] * 8)
    s, e = sampler.rate("click-test")
    assert (s, e) == pytest.approx((DECAY * 6 + 8, DECAY * 8 + 8))
    p = (s + 0.5) / (e + 1)
    known, unknown = 1 - p**G - (1 - p) ** G, 1 - 2 * 0.5**G
    total = known + 2 * unknown
    expected = [EXPLORATION / 3 + (1 - EXPLORATION) * w / total for w in (known, unknown, unknown)]
    assert sampler.probabilities() == pytest.approx(expected)
    assert_near(frequencies(sampler, 4000), dict(zip(NAMES, expected, strict=True)), 4000)


def practise(sampler: Sampler, success: dict[str, float], draws: int, first: int = 0) -> list[tuple[str, bool]]:
    """Groups of a policy that solves each name with a fixed probability: (name, whether its rewards differ)."""
    groups = []
    for n in range(first, first + draws):
        task = sampler.draw(n)
        dice = random.Random(f"{n}/{task.name}")
        rewards = [float(dice.random() < success[task.name]) for _ in range(G)]
        sampler.observe(task, rewards)
        groups.append((task.name, len(set(rewards)) > 1))
    return groups


def test_the_adaptive_sampler_wastes_fewer_groups_starves_none_and_follows_the_policy() -> None:
    """Names at p = 0, ½, 1: a third of uniform's groups teach.  When the policy learns the first, it is practised again."""
    success = {"click-test": 0.0, "focus-text": 0.5, "enter-text": 1.0}
    uniform = practise(UniformSampler(train_source(CONFIG), 0), success, 1000)
    sampler = AdaptiveSampler(ADAPTIVE, 0, G)
    adaptive = practise(sampler, success, 1000)
    wasted = [sum(not mixed for _, mixed in groups) / len(groups) for groups in (uniform, adaptive)]
    assert wasted[0] == pytest.approx(2 / 3, abs=0.02) and wasted[1] < 0.25
    counts = Counter(name for name, _ in adaptive)
    assert min(counts.values()) >= 1000 * EXPLORATION / 3
    success |= {"click-test": 0.5, "focus-text": 1.0}
    practise(sampler, success, 500, 1000)
    later = Counter(name for name, _ in practise(sampler, success, 500, 1500))
    assert later["click-test"] > 0.7 * 500 > 500 - later["click-test"] > 2 * 500 * EXPLORATION / 3


def test_a_sampler_restored_from_its_rates_goes_on_exactly(tmp_path: Path) -> None:
    """Through the ledger; rates of names that are practised no more do no harm."""
    success = {"click-test": 0.1, "focus-text": 0.5, "enter-text": 0.9}
    unbroken, killed = AdaptiveSampler(ADAPTIVE, 5, G), AdaptiveSampler(ADAPTIVE, 5, G)
    for sampler in (unbroken, killed):
        practise(sampler, success, 60)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for name in NAMES:
        ledger.remember_rate(name, killed.rate(name))
    ledger.remember_rate("click-link", (3.0, 9.0))
    ledger.commit()
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    rates = ledger.rates()
    ledger.close()
    restored = make_sampler(ADAPTIVE, 5, G)
    restored.restore(rates)
    assert practise(restored, success, 200, 60) == practise(unbroken, success, 200, 60)
    fixed = make_sampler(CONFIG, 5, G)
    fixed.restore(rates)
    practise(fixed, success, 10)
    assert fixed.rate("click-test") == (0.0, 0.0), "nothing to be kept"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"difficulty": {"click-link": 2}}, "tasks.difficulty.click-link=2 is of no task in tasks.names"),
        ({"difficulty": {"click-test": 16}}, "less than or equal to 15"),
        (
            {"difficulty_weights": {1: 2.0}},
            "tasks.difficulty_weights={1: 2.0} has no meaning with tasks.sampler=uniform",
        ),
        ({"sampler": "difficulty"}, "all of tasks.names have level 1: give tasks.difficulty"),
        (
            {"sampler": "difficulty", "difficulty": {"click-test": 2}, "difficulty_weights": {2: -1.0}},
            "greater than or equal to 0",
        ),
        (
            {"sampler": "difficulty", "difficulty": {"click-test": 2}, "difficulty_weights": {3: 1.0}},
            "tasks.difficulty_weights.3=1 is of a level that no task has",
        ),
        (
            {"sampler": "difficulty", "difficulty": {"click-test": 2}, "difficulty_weights": {1: 0.0, 2: 0.0}},
            "tasks.difficulty_weights={1: 0.0, 2: 0.0} leaves no task to draw",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - pydantic's own
        TasksConfig.model_validate({"names": NAMES, **options})
    assert words in str(refused.value)


def test_levels_and_weights_are_given_on_the_command_line_and_dumped(tmp_path: Path) -> None:
    """Keys that are numbers or have hyphens, through YAML, overrides and what --dry-run prints."""
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ntasks: {names: [click-test, focus-text], sampler: difficulty}\n")
    options = ["tasks.difficulty={focus-text: 3}", "tasks.difficulty_weights={1: 0.5, 3: 2}"]
    config = load_config(file, options)
    assert config.tasks.difficulty == {"focus-text": 3}
    assert config.tasks.difficulty_weights == {1: 0.5, 3: 2.0}
    file.write_text(dump(config))
    assert load_config(file) == config
    with pytest.raises(UserError, match=r"tasks\.difficulty_weights=\{1: 0\.5, 3: 2\.0\} has no meaning"):
        load_config(file, ["tasks.sampler=uniform"])
    with pytest.raises(UserError, match=r"tasks\.difficulty\.focus-text=0: input should be greater than or equal to 1"):
        load_config(file, ["tasks.difficulty.focus-text=0"])


def test_held_out_tasks_are_fixed_distinct_and_evenly_spread() -> None:
    tasks = held_out_tasks(CONFIG, 100)
    assert tasks == held_out_tasks(CONFIG, 100)
    assert len({t.task_id for t in tasks}) == 100
    assert set(Counter(t.name for t in tasks).values()) == {33, 34}
    first, end = CONFIG.held_out_seeds
    seeds = sorted({t.seed for t in tasks})
    assert first <= seeds[0] < seeds[-1] < end
    assert seeds[-1] - seeds[0] > 0.9 * (end - first)
    with pytest.raises(ValueError, match="exceed"):
        held_out_tasks(CONFIG.model_copy(update={"held_out_seeds": (100, 101)}), 4)


def test_every_name_is_demonstrated_on_every_seed() -> None:
    tasks = demonstration_tasks(CONFIG)
    assert len(tasks) == 9
    assert {(t.name, t.seed) for t in tasks} == {(n, s) for n in CONFIG.names for s in (3, 4, 5)}


def _run(names: list[str]) -> RunConfig:
    return validate({"model": {"path": "unused"}, "tasks": {"names": names}}, "test")


def test_an_unknown_task_is_named_with_the_nearest_known_one() -> None:
    assert len(task_names()) > 100
    check_environment(_run(["click-test", "enter-text"]))
    with pytest.raises(UserError, match=r"'click-tset'.*did you mean click-test\?"):
        check_environment(_run(["click-test", "click-tset"]))
