"""Environments and the samplers of their tasks."""

from megatron_webrl.tasks.environment import Acted, Episode, Observation
from megatron_webrl.tasks.miniwob import MiniWob, MiniWobEpisode, check_task_names, has_oracle, task_names
from megatron_webrl.tasks.sampler import UniformSampler, demonstration_tasks, held_out_tasks

__all__ = [
    "Acted",
    "Episode",
    "MiniWob",
    "MiniWobEpisode",
    "Observation",
    "UniformSampler",
    "check_task_names",
    "demonstration_tasks",
    "has_oracle",
    "held_out_tasks",
    "task_names",
]
