"""Configuration: pydantic models, YAML plus `key=value`, validation.  Imports no torch."""

from megatron_webrl.config.checks import check_files, model_shape
from megatron_webrl.config.load import dump, load_config, validate
from megatron_webrl.config.models import (
    AgentConfig,
    AlgorithmConfig,
    BrowserConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    ParallelConfig,
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
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ReplayConfig",
    "RunConfig",
    "SamplingConfig",
    "SftConfig",
    "TasksConfig",
    "TrainerConfig",
    "check_files",
    "dump",
    "load_config",
    "model_shape",
    "validate",
]
