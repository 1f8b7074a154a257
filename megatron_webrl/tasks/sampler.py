"""Which tasks are practised, demonstrated and held out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_webrl.config import TasksConfig
from megatron_webrl.trajectory import Task

EXPLORATION = 0.1
"""Share of the draws of `AdaptiveSampler` that go to all names alike."""
DECAY = 0.9
"""What a name's counts are multiplied with at each new group of it: they hold its newest 1/(1 − DECAY) = 10 groups."""


def make_task(config: TasksConfig, name: str, seed: int) -> Task:
    """The task `name` with the page of `seed`."""
    level = config.level(name)
    return Task(f"{config.environment}/{name}/{seed}", config.environment, name, seed, config.horizon(level), level)


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
    """What the samplers share; remembers nothing.  Page seeds are uniform in tasks.train_seeds."""

    def __init__(self, config: TasksConfig, seed: int) -> None:
        self._config = config
        self._seed = seed

    def draw(self, n: int) -> Task:
        dice = random.Random(f"{self._seed}/task/{n}")
        return make_task(self._config, self._name(n, dice), dice.randrange(*self._config.train_seeds))

    def _name(self, n: int, dice: random.Random) -> str:
        raise NotImplementedError

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        pass

    def rate(self, name: str) -> tuple[float, float]:
        return (0.0, 0.0)

    def restore(self, rates: Mapping[str, tuple[float, float]]) -> None:
        pass

    def practises(self, task: Task) -> bool:
        first, end = self._config.train_seeds
        return (
            task.environment == self._config.environment
            and task.name in self._config.names
            and first <= task.seed < end
        )


class UniformSampler(_Memoryless):
    """Each round of draws goes once through all names, in a fresh shuffle."""

    def _name(self, n: int, dice: random.Random) -> str:
        round_, place = divmod(n, len(self._config.names))
        names = list(self._config.names)
        random.Random(f"{self._seed}/round/{round_}").shuffle(names)
        return names[place]


class DifficultySampler(_Memoryless):
    """P(level) ∝ tasks.difficulty_weights (1 where none is given) among the levels that have names; names of a level alike."""

    def __init__(self, config: TasksConfig, seed: int) -> None:
        super().__init__(config, seed)
        self._levels: dict[int, list[str]] = {}
        for name in config.names:
            self._levels.setdefault(config.level(name), []).append(name)
        self._weights = [config.difficulty_weights.get(level, 1.0) for level in self._levels]

    def _name(self, n: int, dice: random.Random) -> str:
        (names,) = dice.choices(list(self._levels.values()), self._weights)
        return dice.choice(names)


class AdaptiveSampler(_Memoryless):
    """P(name) = EXPLORATION / names + (1 − EXPLORATION) · w / Σ w, with w = 1 − p^G − (1 − p)^G: the probability that the
    rewards of a group of G differ, so that it teaches (DAPO drops the others, arXiv:2503.14476).

    p is the posterior mean of the name's success under Jeffreys' prior, (s + ½) / (e + 1), with s successes (reward > 0) in e
    episodes, both decayed by DECAY a group: what the policy could not do it may be able to do now.
    """

    def __init__(self, config: TasksConfig, seed: int, group_size: int) -> None:
        super().__init__(config, seed)
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
        weights = [self._mixed(*self.rate(name)) for name in self._config.names]
        total = sum(weights)
        return [EXPLORATION / len(weights) + (1 - EXPLORATION) * weight / total for weight in weights]

    def _mixed(self, successes: float, episodes: float) -> float:
        p = (successes + 0.5) / (episodes + 1)
        return 1 - p**self._group_size - (1 - p) ** self._group_size

    def _name(self, n: int, dice: random.Random) -> str:
        return dice.choices(self._config.names, self.probabilities())[0]


def make_sampler(config: TasksConfig, seed: int, group_size: int) -> Sampler:
    """The sampler that tasks.sampler names.  seed: of the run."""
    if config.sampler == "adaptive":
        return AdaptiveSampler(config, seed, group_size)
    return {"uniform": UniformSampler, "difficulty": DifficultySampler}[config.sampler](config, seed)


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
