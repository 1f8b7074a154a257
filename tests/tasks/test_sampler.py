import json
from collections import Counter

import pytest

from megatron_webrl.config import TasksConfig
from megatron_webrl.errors import UserError
from megatron_webrl.tasks import UniformSampler, check_task_names, demonstration_tasks, held_out_tasks, task_names

CONFIG = TasksConfig(names=["click-test", "focus-text", "enter-text"], train_seeds=(0, 50), demonstration_seeds=(3, 6))


def test_draws_are_balanced_over_names_and_inside_the_seeds() -> None:
    """Every round of draws has each name once, in an order that changes."""
    sampler = UniformSampler(CONFIG, 0)
    rounds = [[sampler.draw() for _ in CONFIG.names] for _ in range(40)]
    assert all({t.name for t in round_} == set(CONFIG.names) for round_ in rounds)
    assert len({tuple(t.name for t in round_) for round_ in rounds}) > 3
    assert all(0 <= t.seed < 50 and t.horizon == CONFIG.horizon for round_ in rounds for t in round_)


def test_draws_are_repeatable_and_restorable() -> None:
    """The same seed draws the same; a restored sampler goes on where the state was taken, through JSON."""
    one, other = UniformSampler(CONFIG, 7), UniformSampler(CONFIG, 7)
    assert [one.draw() for _ in range(10)] == [other.draw() for _ in range(10)]
    state = json.loads(json.dumps(one.state()))
    expected = [one.draw() for _ in range(10)]
    late = UniformSampler(CONFIG, 99)
    late.restore(state)
    assert [late.draw() for _ in range(10)] == expected
    assert [UniformSampler(CONFIG, 8).draw() for _ in range(3)] != [UniformSampler(CONFIG, 7).draw() for _ in range(3)]


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


def test_an_unknown_task_is_named_with_the_nearest_known_one() -> None:
    assert len(task_names()) > 100
    check_task_names(["click-test", "enter-text"])
    with pytest.raises(UserError, match=r"'click-tset'.*did you mean click-test\?"):
        check_task_names(["click-test", "click-tset"])
