"""Which tasks are practised, demonstrated and held out."""

from __future__ import annotations

import random
from typing import Any

from megatron_webrl.config import TasksConfig
from megatron_webrl.trajectory import Task

ENVIRONMENT = "miniwob"


def make_task(config: TasksConfig, name: str, seed: int) -> Task:
    """The task `name` with the page of `seed`."""
    return Task(f"{ENVIRONMENT}/{name}/{seed}", ENVIRONMENT, name, seed, config.horizon)


class UniformSampler:
    """Draws train tasks for ever: each round goes once through all names in a fresh shuffle, seeds are uniform."""

    def __init__(self, config: TasksConfig, seed: int) -> None:
        self._config = config
        self._random = random.Random(seed)
        self._round: list[str] = []

    def draw(self) -> Task:
        """The next task."""
        if not self._round:
            self._round = list(self._config.names)
            self._random.shuffle(self._round)
        return make_task(self._config, self._round.pop(), self._random.randrange(*self._config.train_seeds))

    def state(self) -> dict[str, Any]:
        """Everything that the next draws depend on, JSON."""
        version, words, gauss = self._random.getstate()
        return {"random": [version, list(words), gauss], "round": list(self._round)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; names that are practised no more are left out.  Raises KeyError, TypeError or
        ValueError if it is malformed."""
        version, words, gauss = state["random"]
        self._random.setstate((version, tuple(words), gauss))
        self._round = [name for name in state["round"] if name in self._config.names]


def held_out_tasks(config: TasksConfig, n: int) -> list[Task]:
    """n tasks on held-out pages, the same ones for the same configuration: names in turn, seeds spread evenly over the
    range.  Raises ValueError if there are fewer pages."""
    first, end = config.held_out_seeds
    names = config.names
    a_name = -(-n // len(names))
    if a_name > end - first:
        raise ValueError(f"{n} held-out tasks exceed the {(end - first) * len(names)} pages of tasks.held_out_seeds")
    seeds = [first + i * (end - first) // a_name for i in range(a_name)]
    return [make_task(config, names[i % len(names)], seeds[i // len(names)]) for i in range(n)]


def demonstration_tasks(config: TasksConfig) -> list[Task]:
    """Every name with every demonstration seed, names in turn."""
    return [make_task(config, name, seed) for seed in range(*config.demonstration_seeds) for name in config.names]
