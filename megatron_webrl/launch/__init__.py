"""Ray placement and the life of a run."""

from megatron_webrl.launch.alone import sft, train_recorded
from megatron_webrl.launch.cluster import Cluster, RoleDied
from megatron_webrl.launch.display import Display
from megatron_webrl.launch.evaluation import report, summary
from megatron_webrl.launch.resume import Resume
from megatron_webrl.launch.run import (
    RunFailed,
    RunResult,
    check_surroundings,
    collect,
    dry_run,
    dry_run_evaluation,
    evaluate,
    started,
    train,
)

__all__ = [
    "Cluster",
    "Display",
    "Resume",
    "RoleDied",
    "RunFailed",
    "RunResult",
    "check_surroundings",
    "collect",
    "dry_run",
    "dry_run_evaluation",
    "evaluate",
    "report",
    "sft",
    "started",
    "summary",
    "train",
    "train_recorded",
]
