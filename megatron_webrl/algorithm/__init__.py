"""The objective: advantages, the surrogate, and the output layer fused with the loss.  Pure torch and numpy; knows no
Megatron."""

from megatron_webrl.algorithm.advantages import normalize_group_rewards, raft_advantage, step_advantage
from megatron_webrl.algorithm.fused import LossTerms, ReduceHiddenGrad, fused_linear_grpo_loss, linear_logprob_entropy
from megatron_webrl.algorithm.surrogate import Surrogate, surrogate

__all__ = [
    "LossTerms",
    "ReduceHiddenGrad",
    "Surrogate",
    "fused_linear_grpo_loss",
    "linear_logprob_entropy",
    "normalize_group_rewards",
    "raft_advantage",
    "step_advantage",
    "surrogate",
]
