"""Which tasks are practised, demonstrated and held out."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_webrl.config import TasksConfig
from megatron_webrl.errors import UserError
from megatron_webrl.tasks.webgym import TaskFile
from megatron_webrl.trajectory import Task

EXPLORATION = 0.1
"""Share of the draws of `AdaptiveSampler` that go to all names alike."""
DECAY = 0.9
"""What a name's counts are multiplied with at each new group of it: they hold its newest 1/(1 − DECAY) = 10 groups."""


class TaskSource(Protocol):
    """Tasks to draw from, by number."""

    seeds: tuple[int, int]
    """Of their pages: first, end (exclusive)."""

    def __len__(self) -> int: ...

    def level(self, index: int) -> int:
        """Difficulty, 1 (easy) to 15."""

    def task(self, index: int, seed: int) -> Task:
        """The task of a number with the page of `seed`."""

    def practises(self, task: Task) -> bool:
        """Whether the task is one of these."""


class NamedTasks:
    """tasks.names, each with the pages of `seeds`."""

    def __init__(self, config: TasksConfig, seeds: tuple[int, int]) -> None:
        self._config = config
        self.seeds = seeds

    def __len__(self) -> int:
        return len(self._config.names)

    def level(self, index: int) -> int:
        """Difficulty of a name."""
        return self._config.level(self._config.names[index])

    def task(self, index: int, seed: int) -> Task:
        """The task of a name with the page of `seed`."""
        name, environment, level = self._config.names[index], self._config.environment, self.level(index)
        return Task(f"{environment}/{name}/{seed}", environment, name, seed, self._config.horizon(level), level)

    def practises(self, task: Task) -> bool:
        """Whether name and seed are among these."""
        first, end = self.seeds
        return (
            task.environment == self._config.environment
            and task.name in self._config.names
            and first <= task.seed < end
        )


def train_source(config: TasksConfig) -> TaskSource:
    """What is practised.  Raises UserError for a task file that cannot be read."""
    if config.train_file is not None:
        return TaskFile(config.train_file, "tasks.train_file", config)
    return NamedTasks(config, config.train_seeds)


class Sampler(Protocol):
    """Draws the tasks of train groups.  A draw depends on the run's seed, its number and the rates alone, so a sampler that is
    made again goes on with `restore`."""

    def draw(self, n: int) -> Task:
        """The n-th task of the run, from 0."""

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """A group of `task` is complete: rewards [G]."""

    def rate(self, name: str) -> tuple[float, float]:
        """What is remembered of a name: decayed (successes, episodes); (0, 0) if nothing is."""

    def restore(self, rates: Mapping[str, tuple[float, float]]) -> None:
        """Go on with those rates, by name."""

    def practises(self, task: Task) -> bool:
        """Whether the task may be drawn, as the configuration stands."""


class _Memoryless:
    """What the samplers share; remembers nothing.  Page seeds are uniform."""

    def __init__(self, source: TaskSource, seed: int) -> None:
        self._source = source
        self._seed = seed

    def draw(self, n: int) -> Task:
        dice = random.Random(f"{self._seed}/task/{n}")
        return self._source.task(self._index(n, dice), dice.randrange(*self._source.seeds))

    def _index(self, n: int, dice: random.Random) -> int:
        raise NotImplementedError

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        pass

    def rate(self, name: str) -> tuple[float, float]:
        return (0.0, 0.0)

    def restore(self, rates: Mapping[str, tuple[float, float]]) -> None:
        pass

    def practises(self, task: Task) -> bool:
        return self._source.practises(task)


class UniformSampler(_Memoryless):
    """Each round of draws goes once through all tasks, in a fresh shuffle."""

    _round = -1
    _order: array[int]

    def _index(self, n: int, dice: random.Random) -> int:
        round_, place = divmod(n, len(self._source))
        if round_ != self._round:
            self._round, self._order = round_, array("I", range(len(self._source)))
            random.Random(f"{self._seed}/round/{round_}").shuffle(self._order)
        return self._order[place]


class DifficultySampler(_Memoryless):
    """P(level) ∝ tasks.difficulty_weights (1 where none is given) among the levels that have tasks; tasks of a level alike.
    Raises UserError if the weights leave none."""

    def __init__(self, source: TaskSource, seed: int, weights: Mapping[int, float]) -> None:
        super().__init__(source, seed)
        self._levels: dict[int, array[int]] = {}
        for index in range(len(source)):
            self._levels.setdefault(source.level(index), array("I")).append(index)
        self._weights = [weights.get(level, 1.0) for level in self._levels]
        if not any(self._weights):
            raise UserError(
                f"tasks.difficulty_weights={dict(weights)} leaves no task to draw: give one of the levels {sorted(self._levels)} "
                "more than 0"
            )

    def _index(self, n: int, dice: random.Random) -> int:
        (indices,) = dice.choices(list(self._levels.values()), self._weights)
        return dice.choice(indices)


class AdaptiveSampler(_Memoryless):
    """P(name) = EXPLORATION / names + (1 − EXPLORATION) · w / Σ w, with w = 1 − p^G − (1 − p)^G: the probability that the
    rewards of a group of G differ, so that it teaches (DAPO drops the others, arXiv:2503.14476).

    p is the posterior mean of the name's success under Jeffreys' prior, (s + ½) / (e + 1), with s successes (reward > 0) in e
    episodes, both decayed by DECAY a group: what the policy could not do it may be able to do now.
    """

    def __init__(self, config: TasksConfig, seed: int, group_size: int) -> None:
        super().__init__(NamedTasks(config, config.train_seeds), seed)
        self._names = config.names
        self._group_size = group_size
        self._rates: dict[str, tuple[float, float]] = {}

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        successes, episodes = self.rate(task.name)
        won = sum(reward > 0 for reward in rewards)
        self._rates[task.name] = (DECAY * successes + won, DECAY * episodes + len(rewards))

    def rate(self, name: str) -> tuple[float, float]:
        return self._rates.get(name, (0.0, 0.0))

    def restore(self, rates: Mapping[str, tuple[float, float]]) -> None:
        self._rates = dict(rates)

    def probabilities(self) -> list[float]:
        """Of each of tasks.names, [names]; Σ = 1."""
        weights = [self._mixed(*self.rate(name)) for name in self._names]
        total = sum(weights)
        return [EXPLORATION / len(weights) + (1 - EXPLORATION) * weight / total for weight in weights]

    def _mixed(self, successes: float, episodes: float) -> float:
        p = (successes + 0.5) / (episodes + 1)
        return 1 - p**self._group_size - (1 - p) ** self._group_size

    def _index(self, n: int, dice: random.Random) -> int:
        return dice.choices(range(len(self._names)), self.probabilities())[0]


def make_sampler(config: TasksConfig, seed: int, group_size: int) -> Sampler:
    """The sampler that tasks.sampler names.  seed: of the run.  Raises UserError for a task file that cannot be read."""
    if config.sampler == "adaptive":
        return AdaptiveSampler(config, seed, group_size)
    source = train_source(config)
    if config.sampler == "difficulty":
        return DifficultySampler(source, seed, config.difficulty_weights)
    return UniformSampler(source, seed)


def held_out_tasks(config: TasksConfig, n: int) -> list[Task]:
    """n held-out tasks, the same ones for the same configuration: rows spread evenly over tasks.held_out_file, or names in
    turn with seeds spread evenly over tasks.held_out_seeds.  Raises ValueError if there are fewer."""
    if config.held_out_file is not None:
        file = TaskFile(config.held_out_file, "tasks.held_out_file", config)
        if n > len(file):
            raise ValueError(f"{n} held-out tasks exceed the {len(file)} rows of tasks.held_out_file")
        return [file.task(i * len(file) // n, 0) for i in range(n)]
    first, end = config.held_out_seeds
    source = NamedTasks(config, config.held_out_seeds)
    a_name = -(-n // len(source))
    if a_name > end - first:
        raise ValueError(f"{n} held-out tasks exceed the {(end - first) * len(source)} pages of tasks.held_out_seeds")
    seeds = [first + i * (end - first) // a_name for i in range(a_name)]
    return [source.task(i % len(source), seeds[i // len(source)]) for i in range(n)]


def demonstration_tasks(config: TasksConfig) -> list[Task]:
    """Every name with every demonstration seed, names in turn."""
    source = NamedTasks(config, config.demonstration_seeds)
    return [source.task(index, seed) for seed in range(*config.demonstration_seeds) for index in range(len(source))]
