"""Environments and the samplers of their tasks."""

from megatron_webrl.tasks.environment import Acted, Episode, Observation
from megatron_webrl.tasks.miniwob import MiniWob, MiniWobEpisode, check_task_names, has_oracle, task_names
from megatron_webrl.tasks.sampler import (
    AdaptiveSampler,
    DifficultySampler,
    Sampler,
    UniformSampler,
    demonstration_tasks,
    held_out_tasks,
    make_sampler,
)

__all__ = [
    "Acted",
    "AdaptiveSampler",
    "DifficultySampler",
    "Episode",
    "MiniWob",
    "MiniWobEpisode",
    "Observation",
    "Sampler",
    "UniformSampler",
    "check_task_names",
    "demonstration_tasks",
    "has_oracle",
    "held_out_tasks",
    "make_sampler",
    "task_names",
]
