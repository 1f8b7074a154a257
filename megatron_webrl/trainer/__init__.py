"""The Megatron trainer: Qwen3-VL on megatron.core, from groups of trajectories to weights."""

from megatron_webrl.trainer.patches import apply_patches

apply_patches()  # before anything imports megatron.core

from megatron_webrl.trainer.batch import Row, rows_of  # noqa: E402
from megatron_webrl.trainer.grpo import StepReport  # noqa: E402
from megatron_webrl.trainer.policy import PolicyTrainer  # noqa: E402

__all__ = ["PolicyTrainer", "Row", "StepReport", "rows_of"]
