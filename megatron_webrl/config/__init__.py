"""Configuration: pydantic models, YAML plus `key=value`, validation.  Imports no torch."""

from megatron_webrl.config.checks import ModelShape, check_files, check_layout, model_shape
from megatron_webrl.config.estimate import RankEstimate, Workload, estimate
from megatron_webrl.config.load import dump, load_config, validate
from megatron_webrl.config.models import (
    AgentConfig,
    AlgorithmConfig,
    BrowserConfig,
    EngineConfig,
    EvaluationConfig,
    JudgeConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    ParallelConfig,
    RefreshConfig,
    ReplayConfig,
    RunConfig,
    SamplingConfig,
    SftConfig,
    TasksConfig,
    TrainerConfig,
)

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "BrowserConfig",
    "EngineConfig",
    "EvaluationConfig",
    "JudgeConfig",
    "ModelConfig",
    "ModelShape",
    "ObserveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RankEstimate",
    "RefreshConfig",
    "ReplayConfig",
    "RunConfig",
    "SamplingConfig",
    "SftConfig",
    "TasksConfig",
    "TrainerConfig",
    "Workload",
    "check_files",
    "check_layout",
    "dump",
    "estimate",
    "load_config",
    "model_shape",
    "validate",
]
