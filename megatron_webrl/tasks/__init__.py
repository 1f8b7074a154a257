"""Environments and the samplers of their tasks."""

from megatron_webrl.tasks.environment import (
    Acted,
    Environment,
    Episode,
    Evidence,
    Judge,
    Observation,
    PageState,
    Ruling,
    Verdict,
)
from megatron_webrl.tasks.miniwob import MiniWob, MiniWobEpisode, has_oracle, task_names
from megatron_webrl.tasks.registry import check_environment, make_environment
from megatron_webrl.tasks.sampler import (
    AdaptiveSampler,
    DifficultySampler,
    Sampler,
    UniformSampler,
    demonstration_tasks,
    held_out_tasks,
    make_sampler,
    train_source,
)
from megatron_webrl.tasks.web import WebEnvironment, WebEpisode

__all__ = [
    "Acted",
    "AdaptiveSampler",
    "DifficultySampler",
    "Environment",
    "Episode",
    "Evidence",
    "Judge",
    "MiniWob",
    "MiniWobEpisode",
    "Observation",
    "PageState",
    "Ruling",
    "Sampler",
    "UniformSampler",
    "Verdict",
    "WebEnvironment",
    "WebEpisode",
    "check_environment",
    "demonstration_tasks",
    "has_oracle",
    "held_out_tasks",
    "make_environment",
    "make_sampler",
    "task_names",
    "train_source",
]
